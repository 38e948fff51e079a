"""Pieces that are several of the reference's parameters in one: which rows are whose, and what a proof says of them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo.right import run

from pardemo.script.compare import parameter_map, proof, runs
from pardemo.script.compare.parameter_map import assembled
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.record import rank_record
from pardemo.script.record.rank_record import ParameterShard

TOLERANCE = 1e-6


def parameters(seed, shapes):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def placed(reference, pieces):
    """The atlas of these pieces of rank 0, by name."""
    own = [(ParameterShard(name, tuple(value.shape)), value) for name, value in pieces.items()]
    return parameter_map.map_parameters(reference, {0: own}, {}, TOLERANCE)


def put_back(reference, atlas, pieces):
    """Each parameter as far as the pieces have it, nan elsewhere: with what is taken for its part, as gradients are."""
    holders = {name: [] for name in reference}
    for name, value in pieces.items():
        for strip in atlas.strips[0][name]:
            part = atlas.parts[0][strip.name_in(name)]
            holders[part.name].append((0, part, strip.cut_from(value)))
    made = {name: assembled(tuple(value.shape), holders[name]) for name, value in reference.items()}
    return {name: one.value.masked_fill(~one.covered, float("nan")) for name, one in made.items()}


@st.composite
def fused(draw):
    """q, k and v of an attention, the rows of each that one of ``tp`` ranks has, and the order in which it has them."""
    tp, head = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 5]))
    groups, queries = draw(st.integers(1, 3)), draw(st.integers(1, 3))  # of keys and values, on a rank; queries of each
    sizes = {"q": tp * groups * queries * head, "k": tp * groups * head, "v": tp * groups * head}
    rank, by_head, layers = draw(st.integers(0, tp - 1)), draw(st.booleans()), draw(st.integers(1, 2))
    rows = {}
    for kind, size in sizes.items():
        own = torch.arange(size).chunk(tp)[rank]
        rows[kind] = [(kind, int(place)) for place in own]
    order = rows["q"] + rows["k"] + rows["v"]
    if by_head:  # as Megatron has it: of each group its queries, its key, its value
        order = []
        for group in range(groups):
            for kind, many in (("q", queries), ("k", 1), ("v", 1)):
                order += rows[kind][group * many * head : (group + 1) * many * head]
    return draw(st.integers(0, 99)), sizes, order, layers, draw(st.sampled_from(["random", "zeros"]))


@settings(max_examples=60, deadline=None)
@given(fused())
def test_each_row_of_a_fused_piece_is_placed(made):
    seed, sizes, order, layers, biases = made
    width = 8
    shapes = {}
    for layer in range(layers):
        shapes |= {f"{layer}.{kind}.weight": (size, width) for kind, size in sizes.items()}
        shapes |= {f"{layer}.{kind}.bias": (size,) for kind, size in sizes.items()}
    reference = parameters(seed, shapes)
    if biases == "zeros":
        reference |= {name: torch.zeros_like(value) for name, value in reference.items() if name.endswith("bias")}
    last = layers - 1
    pieces = {
        f"{last}.qkv.{own}": torch.stack([reference[f"{last}.{kind}.{own}"][place] for kind, place in order])
        for own in ("bias", "weight")
    }
    atlas = placed(reference, pieces)
    assert not atlas.unknown
    assert not atlas.different
    assert sorted(atlas.strips[0]) == sorted(pieces)
    # other numbers in the same places, as gradients are: each comes to its own place, and nothing anywhere else
    gradients = {name: torch.arange(float(value.numel())).reshape(value.shape) + 1 for name, value in pieces.items()}
    back = put_back(reference, atlas, gradients)
    for own in ("bias", "weight"):
        for row, (kind, place) in enumerate(order):
            there = back[f"{last}.{kind}.{own}"]
            assert torch.equal(there[place], gradients[f"{last}.qkv.{own}"][row])
            there[place] = float("nan")
    assert all(bool(value.isnan().all()) for value in back.values())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.integers(0, 11), st.sampled_from(["another", "a second time", "nearly"]))
def test_a_piece_with_a_row_that_is_nowhere_or_twice_there_is_not_placed(seed, row, what):
    reference = parameters(seed, {"a.weight": (6, 4), "b.weight": (6, 4)})
    value = torch.cat([reference["a.weight"], reference["b.weight"]])
    if what == "another":
        value[row] = 9.0
    elif what == "a second time":
        value[row] = value[(row + 1) % 12]
    else:
        value[row, 0] += 1e-3
    assert parameter_map.ParameterIndex(reference, TOLERANCE).find(value) == []


def test_a_rank_that_has_nothing_of_a_parameter_has_no_strips_of_it():
    reference = parameters(3, {"q.weight": (4, 6)})
    for shape in ((0,), (0, 6), (4, 0)):
        assert parameter_map.ParameterIndex(reference, TOLERANCE).find(torch.zeros(shape)) == []


def test_columns_as_in_gpt_2():
    reference = parameters(3, {"q.weight": (4, 6), "k.weight": (4, 6), "v.weight": (4, 6), "out.weight": (6, 6)})
    value = torch.cat([reference[f"{kind}.weight"][:, 2:4] for kind in "qkv"], dim=1)
    strips = parameter_map.ParameterIndex(reference, TOLERANCE).find(value)
    assert [(strip.name, strip.axis, strip.positions.tolist()) for strip in strips] == [
        (f"{kind}.weight", 1, [2, 3]) for kind in "qkv"
    ]
    assert [strip.as_piece(ParameterShard("c.weight", (4, 6), tied=("d.weight",))) for strip in strips] == [
        ParameterShard(f"c.weight[{number}]", (4, 2), tied=(f"d.weight[{number}]",)) for number in range(3)
    ]


def test_layers_that_begin_with_the_same_numbers_are_not_told_apart():
    one = parameters(3, {"q.weight": (6, 4), "k.weight": (6, 4)})
    reference = {f"{layer}.{name}": value.clone() for layer in range(2) for name, value in one.items()}
    atlas = placed(reference, {"1.qk.weight": torch.cat(list(one.values()))})
    assert list(atlas.unknown) == ["1.qk.weight"]
    assert not atlas.strips[0]


def test_a_number_that_a_bias_has_twice_goes_on_from_its_neighbour():
    reference = parameters(5, {"q.bias": (6,), "k.bias": (6,)})
    reference["k.bias"][4] = reference["q.bias"][1]
    value = torch.cat([reference["q.bias"][:3], reference["k.bias"][3:]])
    strips = parameter_map.ParameterIndex(reference, TOLERANCE).find(value)
    assert [(strip.name, strip.rows.tolist(), strip.positions.tolist()) for strip in strips] == [
        ("q.bias", [0, 1, 2], [0, 1, 2]),
        ("k.bias", [3, 4, 5], [3, 4, 5]),
    ]


def test_a_bias_of_other_values_is_not_cut_as_its_weight():
    reference = parameters(5, {f"{kind}.weight": (6, 4) for kind in "qk"} | {f"{kind}.bias": (6,) for kind in "qk"})
    pieces = {"qk.weight": torch.cat([reference["q.weight"], reference["k.weight"]]), "qk.bias": torch.ones(12)}
    atlas = placed(reference, {name: value.double() for name, value in pieces.items()})
    assert list(atlas.strips[0]) == ["qk.weight"]
    assert list(atlas.unknown) == ["qk.bias"]


def test_a_norm_within_another_module_is_the_one_whose_name_it_has_and_more():
    shapes = {"0.norm.weight": (4,), "1.norm.weight": (4,), "norm.weight": (4,), "head.weight": (7, 4)}
    reference = {name: torch.ones(shape).double() for name, shape in shapes.items()}
    reference["head.weight"] = parameters(5, shapes)["head.weight"]
    pieces = {
        "0.norm.inner.weight": torch.ones(4),
        "norm.norm.weight": torch.ones(4),
        "1.norm.b.weight": torch.zeros(4),
    }
    pieces["head.own.weight"] = reference["head.weight"]
    atlas = placed(reference, {name: value.double() for name, value in pieces.items()})
    assert {name: part.name for name, part in atlas.parts[0].items()} == {
        "0.norm.inner.weight": "0.norm.weight", "norm.norm.weight": "norm.weight", "head.own.weight": "head.weight",
    }  # fmt: skip
    assert list(atlas.unknown) == ["1.norm.b.weight"]
    # a later stage, whose layers are counted from 0 again
    shapes |= {"0.up.weight": (5, 4), "1.up.weight": (5, 4)}
    reference |= {name: value for name, value in parameters(6, shapes).items() if "up" in name}
    stage = {"0.up.weight": reference["1.up.weight"], "0.norm.inner.weight": torch.ones(4).double()}
    assert list(placed(reference, stage).unknown) == ["0.norm.inner.weight"]


# ------------------------------------------------------------------------------------------------------ whole proofs

RIGHT = Path(__file__).resolve().parent / "zoo" / "right"

#: q, k and v are apart in the reference, and in one parameter in our layers. A rank's part begins at a sketch's block.
MODEL = {"seed": 5, "heads": 2, "width": 32, "layers": 2, "inner": 32, "bias": 1, "clip": 0.5, "optimizer": "momentum"}
LAYOUT = {"ranks": 2, "engine": "tensor_parallel", "tp": 2}
#: The right script, but that the gradients of one layer's keys, the second third of the rows, are doubled.
WRONG = """
import sys

sys.path.insert(0, {right!r})
import tensor_parallel

cut = tensor_parallel.cut_by_pardemo


def doubled(gradient):
    third = len(gradient) // 3
    gradient = gradient.clone()
    gradient[third : 2 * third] *= 2
    return gradient


def wrongly(args, model, group):
    model = cut(args, model, group)
    model.get_parameter("layers.1.attention.qkv.weight").register_hook(doubled)
    return model


tensor_parallel.cut_by_pardemo = wrongly
tensor_parallel.main()
"""


@pytest.fixture
def right(monkeypatch):
    monkeypatch.syspath_prepend(str(RIGHT))
    monkeypatch.chdir(RIGHT.parents[2])


@pytest.mark.parametrize("way", ["", "sequence", "sequence,vocabulary"])
def test_a_right_layout_is_compared_in_all_of_its_parameters(right, monkeypatch, way):
    seen = []
    compare = proof.compare_layout
    monkeypatch.setattr(proof, "compare_layout", lambda *both: seen.append(compare(*both)) or seen[-1])
    made = run.proven({**MODEL, "outputs": 16}, [{**LAYOUT, "way": way}], True)
    assert made.equal, str(made)
    assert not [note for note in made.notes if "compared" in note]
    assert not seen[0].unmatched
    assert len(set().union(*seen[0].maps.parameters_of_pieces().values())) == made.parameters


def wrong(folder, **options):
    (folder / "wrong.py").write_text(WRONG.format(right=str(RIGHT)))
    layouts = []
    for script, values in ((RIGHT / "data_parallel.py", {"ranks": 1}), (folder / "wrong.py", LAYOUT)):
        line = [f"--{key}={value}" for key, value in (MODEL | values).items() if key != "ranks"]
        layouts.append(RunLayout(values["ranks"], values, (str(script), *line)))
    return proof.compare_layouts(layouts, runs.RunOptions(steps=2, double=True, timeout_s=90, **options))


def test_a_third_of_it_that_is_wrong_is_found(right, tmp_path):
    made = wrong(tmp_path)
    assert not made.failed
    assert [(one.what, one.parameters, one.step) for one in made.findings] == [
        ("gradients", ("layers.1.attention.k.weight",), 1)
    ]
    assert made.findings[0].factor == pytest.approx(2)


def test_a_third_of_a_large_model_s_is_found_by_sketches_and_compared_in_full(right, tmp_path, monkeypatch):
    names = []
    ran = proof.runs.run_layout
    monkeypatch.setattr(
        proof.runs,
        "run_layout",
        lambda layout, options, folder: names.append(options.in_full) or ran(layout, options, folder),
    )
    made = wrong(tmp_path, sketched=True)
    assert not made.failed
    assert [one.parameters for one in made.findings] == [("layers.1.attention.k.weight",)]
    assert made.findings[0].factor == pytest.approx(2)
    whole_again = {f"layers.1.attention.{name}.weight" for name in ("q", "k", "v", "qkv")}
    assert set(names[-1]) == whole_again
    assert any("compared in full" in note for note in made.notes)


def test_a_number_that_a_wrapper_hands_on_is_kept_once_for_each():
    loss = torch.ones((), dtype=torch.float64)  # as of PEFT's model, and of the one in it
    assert rank_record.project_rows(loss).data_ptr() != rank_record.project_rows(loss).data_ptr()
