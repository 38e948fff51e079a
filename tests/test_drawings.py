"""Drawings: right in what they show, small, readable without colour and without scripts."""

import re

import pytest

from pardemo.collection import drawings
from pardemo.collection.drawings import key

DRAWINGS = [drawings.column_cut, drawings.row_cut, drawings.mlp_cut]


@pytest.mark.parametrize("draw", DRAWINGS)
def test_a_drawing_scales_says_what_it_shows_and_is_small(draw):
    drawing = draw()
    page = drawing._repr_html_()
    assert page.startswith('<svg viewBox="0 0 640 ')
    assert 'role="img"' in page
    assert len(drawing.alt) > 40
    assert len(page) < 20_000
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)"', page)) >= 18, "on a phone it is a half"


@pytest.mark.parametrize("ranks", range(2, 6))
def test_the_rings_last_frame_has_the_whole_sum_everywhere_and_each_step_sends_one_chunk_a_rank(ranks):
    player = drawings.ring_all_reduce(ranks)
    assert len(player) == 1 + 2 * (ranks - 1)
    frames = re.findall(r'<div class="frame">(.*?)</div>', player._repr_html_(), re.DOTALL)
    added = [len(re.findall(rf'fill="{key.INK}"', frame)) for frame in frames]
    assert added[0] == ranks * ranks, "each chunk has one rank's numbers"
    assert added[ranks - 1] == ranks * ranks * (ranks + 1) // 2, "one chunk with all, one with all but one …"
    assert added[-1] == ranks**3, "every chunk has everybody's"
    assert [frame.count("<polygon") for frame in frames] == [0] + [ranks] * (2 * (ranks - 1))
    assert len(player._repr_html_()) < 300_000


def test_without_scripts_all_frames_are_there_and_the_buttons_are_not():
    page = drawings.ring_all_reduce(2)._repr_html_()
    assert 'class="bar" hidden' in page
    assert page.count('class="frame"') == 3
    assert 'class="frame" hidden' not in page
    assert "http" not in page, "nothing comes from elsewhere"


@pytest.mark.parametrize("ranks", [1, 6])
def test_a_ring_that_cannot_be_drawn(ranks):
    with pytest.raises(ValueError, match=f"a ring of 2 to 5 ranks can be drawn, not of {ranks}"):
        drawings.ring_all_reduce(ranks)


def test_colours_are_told_apart():
    used = [*key.KEPT.values(), *key.DONE.values(), *key.RANKS]
    assert len(set(used)) == len(used)
