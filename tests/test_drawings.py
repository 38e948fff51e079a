"""Drawings: small, readable on a phone, without colour and without scripts, and each colour with one meaning."""

import inspect
import json
import math
import re
from functools import partial
from itertools import combinations, pairwise

import pytest
import svgs
from book import drawings, figures

from pardemo import project
from pardemo.draw import palette
from pardemo.planner.dry_run.allocator import by_the_rules

#: A GPU's lines by micro-batch: a little, nearly full, far more than the picture has room for.
MEMORY = {
    way: {
        b: {"frozen parameters": 28e9, "activations": b * 0.44e9, "logits": b * of, "program": 3e9} for b in (1, 8, 32)
    }
    for way, of in (("LoRA", 1.5e9), ("LoRA, no recomputation", 9e9))
}


def without_arguments(kind):
    """Each drawing, or player, that can be had without arguments, by its name."""
    made = {name: getattr(drawings, name) for name in sorted(drawings.functions())}
    return {
        name: draw
        for name, draw in made.items()
        if getattr(draw, "__annotations__", {}).get("return") is kind
        and all(each.default is not each.empty for each in inspect.signature(draw).parameters.values())
    }


DRAWINGS = without_arguments(drawings.Drawing) | {
    "two_machines": partial(drawings.two_machines, 450e9, 12.5e9),
    "mlp_cut, backward": partial(drawings.mlp_cut, backward=True),
    "mlp_cut, gated": partial(drawings.mlp_cut, gated=True),
    "wires of 4": partial(drawings.parameter_server_and_ring, loads=False),
    "who_goes_where": partial(
        drawings.who_goes_where, ["n", "\n", "x"], [[0.75, 0.25] + [0.0] * 14, [0.0] * 15 + [1.0], [0.0625] * 16]
    ),
    "stages of 4": partial(drawings.pipeline_stages, 4),
    "two chunks on 5": partial(drawings.two_chunks, 5),
    "a V on 5": partial(drawings.a_v, 5),
    "two_cuts_in_numbers": partial(
        drawings.two_cuts_in_numbers,
        [[1, 2, 3, 4], [5, 6, 7, 8]],
        [[12, 13, 14, 15]] * 4,
        [[[120, 130], [312, 338]], [[140, 150], [364, 390]]],
        [[[36, 39, 42, 45], [132, 143, 154, 165]], [[84, 91, 98, 105], [180, 195, 210, 225]]],
        [[120, 130, 140, 150], [312, 338, 364, 390]],
    ),
    **{f"cube_on_hosts of {n}": partial(drawings.cube_on_hosts, n) for n in (2, 4)},
    "zero_stages, to guess": partial(drawings.zero_stages, totals=False),
    "file_to_ranks": partial(
        drawings.file_to_ranks, {"ACCELERATE_USE_FSDP": "true", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}
    ),
    "sent_instead": partial(drawings.sent_instead, 161, 128, directions=4, every=8),
    "sent_instead, of a wide one": partial(drawings.sent_instead, 100, 180, directions=8, every=20),
    **{f"unequal_shards {n}": partial(drawings.unequal_shards, n) for n in ((4, 8, 16, 32), (4, 8), (1, 1, 9))},
    **{f"shards_of_fewer {n}": partial(drawings.shards_of_fewer, *n) for n in ((56, 8, 7), (2, 2, 1))},
    **{f"copies_at_neighbours {n}": partial(drawings.copies_at_neighbours, *n) for n in ((2,), (2, 3))},
    "labelled_tokens": partial(drawings.labelled_tokens, ["<reserved_106>", *"news", "</s>"], [False] * 3 + [True] * 3),
    "cut_tails": partial(drawings.cut_tails, 2002, 501, 1024),
    "shared_words": partial(drawings.shared_words, ["section", "who", "did", "what"], ["did", "who", "what"]),
}
PLAYERS = without_arguments(drawings.Player) | {
    "fragments": partial(drawings.fragments, {1: by_the_rules([("attention", 300)], 1000)}),
    **{f"collectives of {n}": partial(drawings.collectives, n) for n in (2, 4)},
    **{f"ring of {n}": partial(drawings.ring_all_reduce, n) for n in (2, 5)},
    **{f"ring of keys on {n}": partial(drawings.ring_of_keys, n) for n in (2, 4)},
    **{
        f"pipeline {sizes}": partial(drawings.pipeline_schedule, *sizes)
        for sizes in (
            ("gpipe", 2, 10), ("one_f_one_b", 6, 7), ("one_f_one_b", 1, 3), ("zb_h1", 6, 5), ("zb_v", 4, 3, 2),
            ("zb_v", 1, 2, 2), ("interleaved", 4, 4, 2), ("interleaved", 3, 3, 3),
        )
    },
    "GPipe, before a guess": partial(drawings.pipeline_schedule, "gpipe", 4, 8, before_guess=True),
    **{f"ZB-V on {n}": partial(drawings.zero_bubble_v, n) for n in (2, 3)},
    "memory_by_batch": partial(drawings.memory_by_batch, MEMORY, 83e9),
    **{f"ZeRO-{stage} of {n}": partial(drawings.zero_step, stage, n) for stage in (1, 2, 3) for n in (2, 4)},
    **{f"states of {size}": partial(drawings.states_by_ranks, size) for size in (7.5, 70)},
}  # fmt: skip


@pytest.fixture(scope="module")
def shown():
    """Every picture, drawn once: (name, what was made, its SVGs)."""
    found = [(name, made := draw(), [svgs.drawing(made)]) for name, draw in DRAWINGS.items()]
    return found + [(name, made := draw(), svgs.frames(made)) for name, draw in PLAYERS.items()]


def test_every_public_drawing_is_looked_at_here():
    drawn = {getattr(draw, "func", draw).__name__ for draw in (DRAWINGS | PLAYERS).values()}
    made = {
        name: getattr(getattr(drawings, name), "__annotations__", {}).get("return") for name in drawings.functions()
    }
    assert drawn == {name for name, what in made.items() if what in (drawings.Drawing, drawings.Player)}


def test_pictures_are_small_and_say_what_they_show(shown):
    for name, made, pictures in shown:
        page = made._repr_html_()
        assert len(page) < (300_000 if isinstance(made, drawings.Player) else 20_000), name
        assert "http" not in page, "nothing comes from elsewhere"
        for svg in pictures:
            assert svg.width == 640, name
            assert svg.root.get("role") == "img"
            assert len(svg.alt) > 40 or isinstance(made, drawings.Player), name
            assert svg.alt


def test_texts_are_large_enough_for_a_phone(shown):
    for name, _, pictures in shown:
        for svg in pictures:
            assert min(text.size for text in svg.texts) >= 18, name


def test_no_text_leaves_the_picture_or_lies_on_another(shown):
    wrong = set()
    for name, _, pictures in shown:
        for svg in pictures:
            canvas = svgs.Box(0, 0, svg.width, svg.height, "none")
            wrong |= {(name, text.text) for text in svg.texts if not canvas.holds(text, 0)}
            wrong |= {(name, a.text, b.text) for a, b in combinations(svg.texts, 2) if a.meets(b)}
    assert wrong == set()


def test_no_text_is_crossed_by_a_line_or_by_the_edge_of_a_box(shown):
    wrong = set()
    for name, _, pictures in shown:
        for svg in pictures:
            edges = [(edge, box.order) for box in svg.boxes for edge in sides(box)]
            edges += [(edge, line.order) for line in svg.lines for edge in pairwise(line.points)]
            for text in svg.texts:
                under = svg.box_of(text)
                covered = -1 if under is None else under.order  # what was drawn before it cannot be seen on it
                wrong |= {(name, text.text) for edge, order in edges if order >= covered and crosses(edge, text)}
    assert wrong == set()


def sides(box):
    corners = [(box.x, box.y), (box.right, box.y), (box.right, box.bottom), (box.x, box.bottom)]
    return pairwise([*corners, corners[0]])


def crosses(edge, text, slack=1.5):
    """Whether a segment enters the room of a text."""
    (x0, y0), (x1, y1) = edge
    if x0 < text.x > x1 or x0 > text.right < x1 or y0 < text.y > y1 or y0 > text.bottom < y1:
        return False  # most of them
    low, high = 0.0, 1.0
    for begin, end, least, most in ((x0, x1, text.x, text.right), (y0, y1, text.y, text.bottom)):
        least, most = least + slack, most - slack
        if begin == end:
            if not least < begin < most:
                return False
            continue
        enters, leaves = sorted(((least - begin) / (end - begin), (most - begin) / (end - begin)))
        low, high = max(low, enters), min(high, leaves)
    return low < high


def test_text_on_a_colour_can_be_read(shown):
    for name, _, pictures in shown:
        for svg in pictures:
            for text in svg.texts:
                box = svg.box_of(text)
                if box is None:
                    assert text.fill in ("currentColor", palette.DONE["communication"]), (name, text.text)
                else:
                    assert palette.contrast(text.fill, box.fill) > 4.2, (name, text.text)


def test_without_scripts_all_frames_are_there_and_the_buttons_are_not():
    page = drawings.ring_all_reduce(2)._repr_html_()
    assert 'class="bar" hidden' in page
    assert page.count('class="frame"') == 3
    assert 'class="frame" hidden' not in page


def test_each_colour_means_one_thing():
    pairs = combinations(palette.MEANINGS.items(), 2)
    near = {(one, other): math.dist(lab(a), lab(b)) for (one, a), (other, b) in pairs}
    assert {names: distance for names, distance in near.items() if distance < 14} == {}


def lab(colour):
    """CIE L*a*b* of an sRGB colour: a distance of 2 is just seen."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    xyz = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b
    xyz = *xyz, (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_drawings_use_colours_of_the_key_alone(shown):
    known = {*palette.MEANINGS.values(), palette.INK, palette.PAPER, "none", "currentColor"}
    for name, _, pictures in shown:
        assert set().union(*(svg.colours for svg in pictures)) <= known, name


def test_charts_use_colours_of_the_key_alone():
    """Send and communication are one thing, and waiting is being idle; all others have colours of their own."""
    assert set(figures.COLOURS.values()) <= set(palette.MEANINGS.values())
    same = {"send": "communication", "wait": "idle"}
    assert {name: figures.COLOURS[of] for name, of in same.items()} == {name: figures.COLOURS[name] for name in same}
    for name in set(figures.COLOURS) - set(same):
        assert figures.COLOURS[name] == palette.MEANINGS[name]
    charts = [*figures.files(), *drawings.files(), *(project.PACKAGE / "draw").glob("*.py")]
    charts.append(project.PACKAGE / "planner" / "layouts" / "charts.py")
    assert len(charts) > 60
    for path in charts:
        if path.name != "palette.py":
            assert re.findall(r"#[0-9A-Fa-f]{6}|color=\"0\.\d+\"", path.read_text()) == [], path.name


def test_every_colour_that_notebooks_name_is_there():
    notebooks = [json.loads(path.read_text()) for path in project.notebooks().values()]
    source = "\n".join("".join(cell["source"]) for notebook in notebooks for cell in notebook["cells"])
    named = set(re.findall(r'COLOURS\["([^"]+)"\]', source))
    before = {"compute", "forward", "backward", "communication", "send", "receive", "wait", "parameters", "gradients",
              "optimizer states", "activations", "predicted", "ring", "parameter server", "torch", "holds", "differs",
              "off", "fails"}  # fmt: skip
    assert named | before <= set(figures.COLOURS)


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda: drawings.ring_all_reduce(6), "2 to 5 ranks can be drawn, not 6"),
        (lambda: drawings.unequal_shards([4, 0]), r"the samples of 2 to 4 ranks can be drawn, at least one on each"),
        (lambda: drawings.sent_instead(1000, 10, 4, 8), "1000 × 10 numbers by 4 directions cannot be drawn"),
        (lambda: drawings.pipeline_schedule("1f1b", 2, 2), "one of gpipe, one_f_one_b, interleaved, zb_h1, zb_v, not"),
        (lambda: drawings.pipeline_schedule("gpipe", 2, 2, 2), "gpipe has one chunk on each rank, not 2"),
        (lambda: drawings.pipeline_schedule("gpipe", 4, 20), "6 stages, 10 micro-batches and 37 steps can be drawn"),
        (lambda: drawings.pipeline_schedule("interleaved", 2, 3, 2), "3 do not divide"),
        (lambda: drawings.zero_step(0), "there are ZeRO-1, ZeRO-2 and ZeRO-3, and no ZeRO-0"),
        (lambda: drawings.zero_step(3, 8), "2 to 4 ranks can be drawn, not 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_said(draw, told):
    with pytest.raises(ValueError, match=told):
        draw()
