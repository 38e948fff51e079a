"""Drawings: small, readable on a phone, without colour and without scripts, and each colour with one meaning."""

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
from pardemo.planner.allocator import by_the_rules

#: A GPU's lines by micro-batch: a little, nearly full, far more than the picture has room for.
MEMORY = {
    way: {
        b: {"frozen parameters": 28e9, "activations": b * 0.44e9, "logits": b * of, "program": 3e9} for b in (1, 8, 32)
    }
    for way, of in (("LoRA", 1.5e9), ("LoRA, no recomputation", 9e9))
}
DRAWINGS = {
    "column_cut": drawings.column_cut,
    "row_cut": drawings.row_cut,
    "ring_tree_chain": drawings.ring_tree_chain,
    "two_machines": partial(drawings.two_machines, 450e9, 12.5e9),
    "mlp_cut": drawings.mlp_cut,
    "mlp_cut, backward": partial(drawings.mlp_cut, backward=True),
    "mlp_cut, gated": partial(drawings.mlp_cut, gated=True),
    "server and ring of 4": drawings.parameter_server_and_ring,
    "wires of 4": partial(drawings.parameter_server_and_ring, loads=False),
    "data_parallel_step of 4": drawings.data_parallel_step,
    "ddp_buckets": drawings.ddp_buckets,
    "all_reduce_by_nodes of 4": drawings.all_reduce_by_nodes,
    **{f"heads, {n} groups": partial(drawings.attention_heads, n) for n in (4, 2, 1)},
    "fused_qkv": drawings.fused_qkv,
    "shared_heads": drawings.shared_heads,
    "block_cut": drawings.block_cut,
    "sequence_parallel": drawings.sequence_parallel,
    "bits_of_a_number": drawings.bits_of_a_number,
    "scale_of_blocks": drawings.scale_of_blocks,
    "error_kept": drawings.error_kept,
    "three_ways": drawings.three_ways,
    "ring_of_products of 4": drawings.ring_of_products,
    "two_halves": drawings.two_halves,
    "still_whole": drawings.still_whole,
    "step_parts": drawings.step_parts,
    "block_activations": drawings.block_activations,
    "sequence_cuts": drawings.sequence_cuts,
    "one_long_sequence": drawings.one_long_sequence,
    "two_blocks": drawings.two_blocks,
    "tokens_for_heads": drawings.tokens_for_heads,
    "labels_at_a_cut": drawings.labels_at_a_cut,
    "dispatch_and_combine": drawings.dispatch_and_combine,
    "who_goes_where": partial(
        drawings.who_goes_where, ["n", "\n", "x"], [[0.75, 0.25] + [0.0] * 14, [0.0] * 15 + [1.0], [0.0625] * 16]
    ),
    "vocabulary_cut": drawings.vocabulary_cut,
    "vocabulary_lookup": drawings.vocabulary_lookup,
    "two_nodes": drawings.two_nodes,
    "three_placements": drawings.three_placements,
    **{f"stages of {n}": partial(drawings.pipeline_stages, n) for n in (2, 3, 4)},
    **{f"two chunks on {n}": partial(drawings.two_chunks, n) for n in (2, 4, 5)},
    **{f"a V on {n}": partial(drawings.a_v, n) for n in (2, 4, 5)},
    "two_gradients": drawings.two_gradients,
    "vocabulary_loss": drawings.vocabulary_loss,
    "tied_weights": drawings.tied_weights,
    "a_pair": drawings.a_pair,
    "two_cuts_in_numbers": partial(
        drawings.two_cuts_in_numbers,
        [[1, 2, 3, 4], [5, 6, 7, 8]],
        [[12, 13, 14, 15]] * 4,
        [[[120, 130], [312, 338]], [[140, 150], [364, 390]]],
        [[[36, 39, 42, 45], [132, 143, 154, 165]], [[84, 91, 98, 105], [180, 195, 210, 225]]],
        [[120, 130, 140, 150], [312, 338, 364, 390]],
    ),
    **{f"cube_on_hosts of {n}": partial(drawings.cube_on_hosts, n) for n in (2, 3, 4)},
    **{f"zero_stages of {n}": partial(drawings.zero_stages, n) for n in range(2, 7)},
    "sixteen_bytes": drawings.sixteen_bytes,
    "zero3_or_tensor_parallel": drawings.zero3_or_tensor_parallel,
    "checkpoints_in_parts": drawings.checkpoints_in_parts,
    "cube_step": drawings.cube_step,
    "one_sum_or_three": drawings.one_sum_or_three,
    "two_hops": drawings.two_hops,
    "layout_choice": drawings.layout_choice,
    "zero_traffic": drawings.zero_traffic,
    "kept_over_a_step": drawings.kept_over_a_step,
    "waiting_places": drawings.waiting_places,
    "kept_by_optimizer": drawings.kept_by_optimizer,
    "to_the_owners": drawings.to_the_owners,
    "one_script": drawings.one_script,
    "prepare": drawings.prepare,
    "launchers": drawings.launchers,
    "replicas_of_shards": drawings.replicas_of_shards,
    "file_to_ranks": partial(
        drawings.file_to_ranks, {"ACCELERATE_USE_FSDP": "true", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}
    ),
    "seven_mistakes": drawings.seven_mistakes,
    "tensor_parallel_with_zero": drawings.tensor_parallel_with_zero,
    "layout_rule": drawings.layout_rule,
    "sharding_choice": drawings.sharding_choice,
    "shards_on_nodes": drawings.shards_on_nodes,
    "sums_in_8_bits": drawings.sums_in_8_bits,
    "sent_instead": partial(drawings.sent_instead, 161, 128, directions=4, every=8),
    "sent_instead, of a wide one": partial(drawings.sent_instead, 100, 180, directions=8, every=20),
    **{f"unequal_shards {n}": partial(drawings.unequal_shards, n) for n in ((4, 8, 16, 32), (4, 8), (1, 1, 9))},
    "lora": drawings.lora,
    "states_and_gpu": drawings.states_and_gpu,
    "gated_layer": drawings.gated_layer,
    "epoch_of_steps": drawings.epoch_of_steps,
    "finetune_flow": drawings.finetune_flow,
    "where_a_byte_is_counted": drawings.where_a_byte_is_counted,
    "nested_bars": drawings.nested_bars,
    "one_step_twice": drawings.one_step_twice,
    "saved_and_lost": drawings.saved_and_lost,
    **{
        f"shards_of_fewer {n}": partial(drawings.shards_of_fewer, *n)
        for n in ((12, 4, 3), (12, 4, 2), (56, 8, 7), (12, 3, 2), (2, 2, 1))
    },
    **{
        f"copies_at_neighbours {n}": partial(drawings.copies_at_neighbours, *n)
        for n in ((4, (2,)), (4, (2, 3)), (3, ()))
    },
    "sums_of_a_step": drawings.sums_of_a_step,
    "four_answers": drawings.four_answers,
    "labelled_tokens": partial(drawings.labelled_tokens, ["<reserved_106>", *"news", "</s>"], [False] * 3 + [True] * 3),
    "cut_tails": partial(drawings.cut_tails, 2002, 501, 1024),
    "rows_seen": partial(drawings.rows_seen, {"shuffled": [True, False] * 10, "built": [False] * 20}),
    "shared_words": partial(drawings.shared_words, ["section", "who", "did", "what"], ["did", "who", "what"]),
}
PLAYERS = {
    "fragments": partial(drawings.fragments, {1: by_the_rules([("attention", 300)], 1000)}),
    **{f"collectives of {n}": partial(drawings.collectives, n) for n in (2, 3, 4)},
    **{f"ring of {n}": partial(drawings.ring_all_reduce, n) for n in range(2, 6)},
    **{f"ring of keys on {n}": partial(drawings.ring_of_keys, n) for n in (2, 4)},
    **{
        f"pipeline {sizes}": partial(drawings.pipeline_schedule, *sizes)
        for sizes in (
            ("gpipe", 4, 4), ("gpipe", 4, 8), ("gpipe", 2, 10), ("one_f_one_b", 4, 8), ("one_f_one_b", 6, 7),
            ("one_f_one_b", 1, 3), ("zb_h1", 4, 8), ("zb_h1", 6, 5), ("zb_h1", 1, 2), ("zb_v", 2, 4, 2),
            ("zb_v", 3, 5, 2), ("zb_v", 4, 3, 2), ("zb_v", 1, 2, 2), ("interleaved", 2, 4, 2), ("interleaved", 4, 4, 2),
            ("interleaved", 3, 3, 3),
        )
    },
    "GPipe, before a guess": partial(drawings.pipeline_schedule, "gpipe", 4, 8, before_guess=True),
    **{f"ZB-V on {n}": partial(drawings.zero_bubble_v, n) for n in (2, 3)},
    "memory_by_batch": partial(drawings.memory_by_batch, MEMORY, 83e9),
    **{f"ZeRO-{stage} of {n}": partial(drawings.zero_step, stage, n) for stage in (1, 2, 3) for n in (2, 3, 4)},
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
