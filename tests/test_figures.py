"""Pictures: written whole, with alternative text, in the one style."""

import numpy as np
import pytest
from matplotlib import font_manager
from PIL import Image

from pardemo.collection import figures
from pardemo.collection.figures.style import COLOURS, HATCHES, SETTINGS
from pardemo.meters import Span


def test_saved_with_alternative_text(out):
    fig, ax = figures.new()
    figures.predicted(ax, [1, 2], [1, 2])
    figures.measured(ax, [1, 2], [1, 2], hollow=[False, True])
    picture = figures.save(fig, "01_test", "A line and 2 × 2 points.")
    file = out / "figures" / "01_test.png"
    assert picture._repr_mimebundle_() == (
        {"image/png": file.read_bytes()},
        {"image/png": {"alt": "A line and 2 × 2 points."}},
    ), "what a notebook shows is the file, with its text"
    with Image.open(file) as image:
        assert image.info["Description"] == "A line and 2 × 2 points."
        assert image.size == (880, 440)
    assert [p.name for p in (out / "figures").iterdir()] == ["01_test.png"], "no temporary file is left"


def test_alternative_text_is_required(out):
    with pytest.raises(ValueError, match="alternative text"):
        figures.save(figures.new()[0], "01_test", "")


def test_prediction_is_a_line_measurement_points():
    _, ax = figures.new()
    (line,) = figures.predicted(ax, [1, 2], [1, 2])
    assert line.get_marker() in ("None", "")
    assert not ax.collections
    points = figures.measured(ax, [1, 2], [1, 2], hollow=[False, True])
    assert [tuple(c) == (1, 1, 1, 1) for c in points.get_facecolors()] == [False, True]


def test_sliders_show_the_picture_that_they_choose(monkeypatch):
    shown = []
    monkeypatch.delenv("PARDEMO_HEADLESS", raising=False)
    monkeypatch.setattr("IPython.display.display", shown.append)
    sliders = figures.states_explorer(7.5, 64, 12, 2)
    sliders.update()
    assert shown[-1].alt == (
        "Model states of 7.5·10⁹ parameters on 64 ranks, stages 0 to 3: 120.0, 31.4, 16.6, 1.9 GB each."
    )
    (stage,) = [child for child in sliders.children if getattr(child, "description", "") == "stage"]
    before = len(shown)
    stage.value = 3
    assert len(shown) == before + 1
    assert shown[-1].png != shown[-2].png, "another bar is outlined"


def test_without_a_reader_the_sliders_are_a_table(monkeypatch):
    monkeypatch.setenv("PARDEMO_HEADLESS", "1")
    table = figures.states_explorer().data
    assert list(table["GB per rank"].round(1)) == [120.0, 31.4, 16.6, 1.9]


def test_bars_outline_and_gantt():
    _, ax = figures.new()
    figures.bars(ax, ["a", "b"], {"send": [1, 2], "receive": [3, 4]}, outline={"send": [1, 2], "receive": [3, 4]})
    assert len(ax.patches) == 8
    _, ax = figures.new()
    figures.gantt(ax, [Span(0, "compute", "", 1.0, 1.5), Span(1, "communication", "", 1.5, 1.6)])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    box = ax.collections[0].get_paths()[0].get_extents()
    assert (box.x0, box.x1) == (0, 500), "milliseconds since the first span"


def test_ring_states_writes_every_number():
    states = np.arange(1, 9).reshape(2, 2, 2)
    fig = figures.ring_states(states, ["one", "two"])
    texts = [t.get_text() for ax in fig.axes for t in ax.texts]
    assert texts == [str(k) for k in range(1, 9)]


def test_the_font_comes_with_matplotlib():
    path = font_manager.findfont(SETTINGS["font.family"], fallback_to_default=False)
    assert "matplotlib" in path


def test_kinds_can_be_told_apart_without_colour():
    assert HATCHES["send"] != HATCHES["receive"]
    assert HATCHES["compute"] != HATCHES["communication"]
    assert set(HATCHES) <= set(COLOURS)
