"""Drawings: right in what they show. What can be had from the package's own code is compared with it."""

import math
import re
from types import SimpleNamespace

import pytest
import svgs
import torch
import torch.distributed as dist
from book import drawings
from conftest import says
from torch import nn
from torch.nn import functional as F

from pardemo import CallMeter, expert_parallel
from pardemo.baichuan2 import Baichuan2Config
from pardemo.book.chapters.baichuan2_finetune import drawings as finetune
from pardemo.book.chapters.experts import drawings as experts
from pardemo.book.chapters.fewer_bits import drawings as few_bits
from pardemo.book.chapters.long_sequences import drawings as long
from pardemo.book.chapters.megatron_attention import drawings as attention
from pardemo.book.chapters.optimizers import drawings as of_optimizers
from pardemo.book.chapters.sequence_parallel import drawings as sequence
from pardemo.book.chapters.vocabulary import drawings as vocabulary
from pardemo.context_parallel import positions
from pardemo.draw import palette
from pardemo.formulas import communication, failures, memory, optimizers
from pardemo.formulas import low_precision as formulas_of_bits
from pardemo.groups import ParallelDims
from pardemo.low_precision import FORMATS
from pardemo.peers import megatron
from pardemo.small_models import gpt
from pardemo.tensor_parallel import ParallelAttention, copy_to, scatter_sequence

TALK, TENSOR = palette.DONE["communication"], palette.KEPT["activations"]


def test_server_and_ring_send_what_the_formulas_say():
    ranks, svg = 4, svgs.drawing(drawings.parameter_server_and_ring())
    assert len(svg.heads) == 2 * (ranks - 1) + ranks, "each worker up and down; each rank on to the next"
    bars = [bar.right - bar.x for bar in sorted(svg.filled(TALK), key=lambda bar: (bar.x, bar.y))]
    server, worker, ring = (
        formula(1, ranks).sent
        for formula in (communication.parameter_server, communication.parameter_worker, communication.ring_all_reduce)
    )
    sent = [server, *[worker] * (ranks - 1), *[ring] * ranks]
    assert [bar / bars[0] for bar in bars] == pytest.approx([load / server for load in sent], abs=0.002)


@pytest.mark.parametrize("samples", [(4, 8, 16, 32), (3, 1, 5)])
def test_a_sample_is_as_wide_as_it_counts_in_the_mean(samples):
    def counts(weight):
        losses = [torch.ones(count, dtype=torch.double, requires_grad=True) for count in samples]
        means = [weight(len(loss)) * loss.mean() for loss in losses]
        (sum(means) / len(means)).backward()
        return torch.cat([loss.grad for loss in losses])

    svg = svgs.drawing(drawings.unequal_shards(samples))
    drawn = sorted((box for box in svg.boxes if box.fill in palette.RANKS), key=lambda box: (box.y, box.x))
    widths = torch.tensor([box.right - box.x for box in drawn], dtype=torch.double)
    plain, weighted = counts(lambda n: 1), counts(lambda n: len(samples) * n / sum(samples))
    found = torch.cat([plain, weighted])
    assert widths.tolist() == pytest.approx((found * (widths.sum() / found.sum())).tolist(), abs=0.15)
    owners = [rank for rank, count in enumerate(samples) for _ in range(count)]
    assert [palette.RANKS.index(box.fill) for box in drawn] == owners * 2
    told = [f"{n} {'samples × ' if not rank else '× '}1/{len(samples) * n}" for rank, n in enumerate(samples)]
    told += [f"{n} × 1/{sum(samples)}" for n in samples]
    assert [word for word in svg.words() if "×" in word] == told


def test_a_fused_weight_is_cut_as_the_layer_does_it_and_in_the_orders_that_are_stored(world_of):
    rows = torch.arange(12.0)[:, None].expand(12, 4)
    blocks = attention.in_blocks(4)

    def cut():
        full = nn.Linear(4, 12, bias=False), nn.Linear(4, 4, bias=False)
        full[0].weight.data.copy_(rows)
        full[1].weight.data.zero_()
        return ParallelAttention(*full, heads=4).qkv.weight[:, 0].tolist()

    svg = svgs.drawing(drawings.fused_qkv())
    cells = [text for text in svg.texts if re.fullmatch("[qkv][₀-₃]", text.text)]
    drawn = [[text.text for text in cells[at : at + 6]] for at in (12, 18)]
    names = [letter + "₀₁₂₃"[head] for letter, head in blocks]
    assert drawn == [[names[int(row)] for row in found] for found in world_of(2).run(cut)]
    layer = SimpleNamespace(
        self_attention=SimpleNamespace(
            num_query_groups_per_partition=4, num_attention_heads_per_partition=4, hidden_size_per_attention_head=1
        )
    )
    order = megatron._by_group(rows[:, 0], layer).int().tolist()
    assert [blocks[row] for row in order] == attention.head_by_head(4), "Megatron's own order"
    naive = [{svg.box_of(text).fill for text in cells[at : at + 6]} for at in (0, 6, 24, 30)]
    assert [len(owners) for owners in naive] == [2, 2, 1, 1], "half of three blocks belongs to both ranks"
    assert {text[0] for text in names[:6]} == {"q", "k"}, "and has no values, as is written below"


def test_shared_heads_lie_where_the_layer_puts_them(world_of):
    def held():
        qkv, out = nn.Linear(8, 12, bias=False), nn.Linear(8, 8, bias=False)  # 8 query heads, 2 of key and value, of 1
        qkv.weight.data.copy_(torch.arange(12.0)[:, None].expand(12, 8))
        out.weight.data.zero_()
        return ParallelAttention(qkv, out, heads=8, kv_heads=2).qkv.weight[:, 0].int().tolist()

    for rank, rows in enumerate(world_of(4).run(held)):
        shared = attention.shared_of(rank)
        assert rows == [*attention.heads_of(rank), 8 + shared, 10 + shared]
    svg = svgs.drawing(drawings.shared_heads())
    assert [svg.words().count(word) for word in ("k₀", "v₀", "k₁", "v₁")] == [2, 2, 2, 2]
    assert [len(svg.filled(colour)) for colour in palette.RANKS[:4]] == [2 + 3] * 4, "queries; its copies, and a band"
    assert svg.heads == [TALK] * 4, "two double arrows"


def test_the_block_is_drawn_with_the_all_reduces_that_it_calls(world_of):
    def forward_and_backward():
        layer = gpt.parallel_block(gpt.seeded(lambda: gpt.Block(16, 4)))
        x = gpt.numbers(1, 8, 16).requires_grad_()
        with CallMeter() as forward:
            y = layer(x)
        with CallMeter() as backward:
            y.sum().backward()
        return forward.counts, backward.counts

    operators = [step for step in attention.BLOCK if isinstance(step, str)]
    drawn = {"all_reduce": operators.count("g")}, {"all_reduce": operators.count("f")}
    assert world_of(2).run(forward_and_backward)[0] == drawn
    svg = svgs.drawing(drawings.block_cut())
    assert len(svg.filled(palette.WHOLE)) == 2 * 3
    assert [len(svg.filled(colour)) for colour in palette.RANKS[:2]] == [2, 2]


def test_the_collectives_of_sequence_parallelism_are_those_that_the_block_calls(world_of):
    def forward():
        block = gpt.parallel_block(gpt.seeded(lambda: gpt.Block(16, 4)), sequence_parallel=True)
        x = scatter_sequence(gpt.numbers(1, 8, 16))
        with CallMeter() as calls, torch.no_grad():
            block(x)
        return calls.counts

    called = world_of(2).run(forward)[0]
    collectives = [step for step in sequence.BLOCK if isinstance(step, str)]
    assert {name.replace("-", "_"): collectives.count(name) for name in set(collectives)} == called
    svg = svgs.drawing(drawings.sequence_parallel())
    assert [svg.words().count(name) for name in ("all-gather", "reduce-scatter")] == [2, 2]
    assert len(svg.filled(TALK)) == 4
    # of seven tensors three are halves by tokens, two are whole on both ranks, two are halves by columns
    of_rank = [sum(box.area for box in svg.filled(colour)) for colour in palette.RANKS[:2]]
    assert of_rank == pytest.approx([(3 * 0.5 + 2 * 2 * 0.5 + 2 * 0.5) * 146 * 56] * 2)


def test_formats_are_drawn_with_the_bits_that_torch_gives_them():
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "E5M2": torch.float8_e5m2, "E4M3": torch.float8_e4m3fn}
    for name, kind in kinds.items():
        exponent, fraction, _ = few_bits.LAYOUTS[name]
        assert 1 + exponent + fraction == torch.finfo(kind).bits
        assert torch.finfo(kind).eps == 2.0**-fraction
        assert formulas_of_bits.smallest(exponent, fraction) == torch.finfo(kind).smallest_normal * 2.0**-fraction
    svg = svgs.drawing(drawings.bits_of_a_number())
    of_exponent = sum(exponent for exponent, _, _ in few_bits.LAYOUTS.values())
    assert len(svg.filled(palette.OTHER)) == of_exponent + 1, "and the legend's"


def test_what_shares_an_outliers_scale_is_a_block():
    svg = svgs.drawing(drawings.scale_of_blocks())
    blocks = [block for block, _, _ in few_bits.SCALES]
    assert blocks[1:] == [FORMATS[name].block for name in ("mxfp8", "nvfp4")]
    assert len(svg.filled(palette.OTHER)) == sum(blocks) + 1, "and the legend's"
    assert len(svg.filled(palette.KEPT["parameters"])) == sum(blocks[0] // block for block in blocks), "scales"
    assert svg.words().count("E4M3") == 4


def test_two_blocks_of_a_softmax_are_the_whole_one():
    scores, values = (torch.tensor(each, dtype=torch.float64).flatten() for each in (long.SCORES, long.VALUES))
    blocks = [long.one_block(*each) for each in zip(long.SCORES, long.VALUES, strict=True)]
    largest, total, out, _ = long.merged_block(*blocks)
    assert out == pytest.approx((scores.softmax(0) @ values).item())
    assert largest + math.log(total) == pytest.approx(scores.logsumexp(0).item())
    words = " ".join(svgs.drawing(drawings.two_blocks()).words())
    assert f"= {out:.1f}" in words
    assert f"= {total:.2f}" in words


def test_labels_that_are_shifted_after_the_cut_are_wrong_where_it_is_drawn():
    right = [label for tokens in long.TOKENS for label in long.labels_of(tokens)]
    alone = [label for tokens in long.TOKENS for label in long.shifted_alone(tokens)]
    wrong = sum(a != b for a, b in zip(right, alone, strict=True))
    svg = svgs.drawing(drawings.labels_at_a_cut())
    assert len(svg.filled(palette.VERDICTS["fails"])) == wrong == 2
    tokens = [positions(8, rank, 2) + 1 for rank in range(2)]
    assert [each.tolist() for each in tokens] == [list(each) for each in long.TOKENS], "the zigzag"


def test_drawn_tokens_go_where_the_package_sends_them(world_of):
    def arrive():
        chosen = torch.tensor([[expert] for _, expert in experts.CHOICES[dist.get_rank()]])
        letters = torch.tensor([[ord(token)] for token, _ in experts.CHOICES[dist.get_rank()]])
        everyone, weights = dist.group.WORLD, torch.ones(len(chosen), 1)
        how = expert_parallel.plan(chosen, weights, experts.EACH * len(experts.CHOICES), everyone)
        rows = expert_parallel.dispatch(letters.float(), 1, how, everyone)
        return [[chr(int(row)) for row in part] for part in rows]

    assert world_of(2).run(arrive) == [list(of_rank.values()) for of_rank in experts.arrived()]
    svg = svgs.drawing(drawings.dispatch_and_combine())
    assert len(svg.filled(TALK)) == 2
    # each token: as it is, sorted, arrived, made, and back
    assert [len(svg.filled(colour)) for colour in palette.RANKS[:2]] == [5 * 3] * 2
    assert [word for word in svg.words() if word.endswith(" rows")] == ["4 rows", "2 rows"]


@pytest.mark.parametrize(("rows", "before", "now"), [(12, 4, 3), (56, 8, 7)])
def test_each_row_is_read_from_the_shard_above_it(rows, before, now):
    svg = svgs.drawing(drawings.shards_of_fewer(rows, before, now))
    reads = [read for rank in range(now) for read in failures.resharded(rows, before, now, rank)]
    assert svg.heads == [TALK] * len(reads)
    for shard in range(before):
        saved, *pieces = sorted(svg.filled(palette.RANKS[shard]), key=lambda box: (box.y, box.x))
        assert len(pieces) == sum(read.shard == shard for read in reads)
        assert sum(box.right - box.x for box in pieces) == pytest.approx(saved.right - saved.x, abs=0.5)
        assert all(saved.x - 0.2 <= box.x and box.right <= saved.right + 0.2 for box in pieces), "straight down"


def test_a_state_is_lost_where_its_host_and_the_next_one_are_gone():
    one, two = (" ".join(svgs.drawing(drawings.copies_at_neighbours(*dead)).words()) for dead in ((2,), (2, 3)))
    assert says(one, "2", "state", "2", "3")
    assert "copy of 2" in one
    assert "State 2 is lost" in two
    assert "copy of 2" not in two
    assert "state 2" not in two


def test_the_vocabularys_loss_is_cross_entropy():
    largest, sums, labels = vocabulary.three_numbers()
    loss = F.cross_entropy(torch.tensor([vocabulary.LOGITS]).float(), torch.tensor([vocabulary.LABEL])).item()
    assert max(largest) + math.log(sum(sums)) - sum(labels) == pytest.approx(loss)
    svg = svgs.drawing(drawings.vocabulary_loss())
    assert f"= {loss:.2f}" in " ".join(svg.words())
    assert len(svg.heads) == 3, "numbers of a token that travel"
    assert str(max(largest)) in svg.words()
    assert says(svg.words(), "Baichuan2", "125,696")
    assert Baichuan2Config.b13().vocab_size == 125_696


def test_each_token_is_found_by_one_rank_and_by_all_after_the_sum():
    svg = svgs.drawing(drawings.vocabulary_lookup())
    rows = torch.eye(4)  # of a table of four words, two on each rank
    tokens, half = torch.tensor(vocabulary.TOKENS), rows.split(2)
    by_rank = [[int(word) // 2 == rank for word in tokens] for rank in range(2)]
    cells = [text for text in svg.texts if text.text == "0" or text.text.startswith("row ")]
    found = [[text.text != "0" for text in cells[at : at + 3]] for at in (2, 7)]
    assert found == by_rank, "behind two rows of the table each"
    parts = [torch.stack([rows[w] if w // 2 == r else 0 * rows[w] for w in tokens]) for r in range(len(half))]
    assert torch.equal(sum(parts), rows[tokens])
    assert [text.text for text in cells[-3:]] == [f"row {word}" for word in vocabulary.TOKENS]


def test_what_a_block_keeps_is_what_the_formulas_say():
    s, b, h, a = 256, 1, 64, 4
    core = 5 * a * s * s * b
    plain, scores = (sum(getattr(step, kind) for step in sequence.STEPS) for kind in ("plain", "scores"))
    assert plain * s * b * h == memory.block_activation_bytes(s, b, h, a) - core
    assert scores * a * s * s * b == core
    cut = sum(step.plain + step.scores * a * s / h for step in sequence.STEPS if step.cut)
    whole_on_each = sum(step.plain for step in sequence.STEPS if not step.cut)
    assert (whole_on_each + cut / 4) * s * b * h == memory.block_activation_bytes(s, b, h, a, 4)
    svg = svgs.drawing(drawings.block_activations())
    bars = {text.text: text for text in svg.texts}
    drawn = [bar for bar in svg.filled(palette.WHOLE) if bar.x == 164]
    assert sum(bar.right - bar.x for bar in drawn) == pytest.approx(whole_on_each * 24)
    assert "2 + 2as/h" in bars


@pytest.mark.parametrize("tensor", [2, 3])
def test_the_cube_on_hosts_has_the_groups_of_the_layout(tensor):
    layout = ParallelDims(tp=tensor, dp=2, pp=2)
    svg = svgs.drawing(drawings.cube_on_hosts(tensor))
    places = {int(text.text): text for text in svg.texts if text.text.isdigit()}
    frames = [box for box in svg.boxes if box.border == TENSOR and box.right - box.x > 60]
    inside = sorted(sorted(rank for rank, text in places.items() if frame.holds(text)) for frame in frames)
    assert inside == layout.groups("tp")
    for axis, across in (("dp", "x"), ("pp", "y")):  # partners stand side by side, or one below the other
        for one, other in layout.groups(axis):
            a, b = svg.box_of(places[one]), svg.box_of(places[other])
            assert getattr(a, across) < getattr(b, across)
            assert a.y == b.y if axis == "dp" else a.x == b.x
            assert a.fill == b.fill, "the same part of the layers"
    for axis in ("tp", "dp", "pp"):
        assert all("-".join(map(str, group)) in svg.alt for group in layout.groups(axis))


def test_areas_of_zeros_stages_are_bytes():
    ranks, svg = 4, svgs.drawing(drawings.zero_stages())
    height = 98  # from row to row
    unit = None
    for stage in memory.STAGES:
        found = {}
        for kind in ("parameters", "gradients", "optimizer states"):
            boxes = [
                box for box in svg.filled(palette.KEPT[kind]) if 60 + height * stage < box.y < 60 + height * (stage + 1)
            ]
            found[kind] = sum(box.area for box in boxes if box.y < 440)
        theory = memory.model_states(ranks, ranks, stage)
        unit = unit or found["optimizer states"] / theory["optimizer states"]
        assert found == pytest.approx({kind: nbytes * unit for kind, nbytes in theory.items()}, rel=0.02)
        assert f"= {memory.model_states_bytes(ranks, ranks, stage) / ranks:.3g}" in svg.words()


def test_loras_numbers_are_the_articles():
    config = Baichuan2Config.b13()
    assert (3 * config.hidden_size, config.hidden_size) == (finetune.OUT, finetune.IN)
    assert config.num_hidden_layers * finetune.RANK * (finetune.OUT + finetune.IN) == 6_553_600
    svg = svgs.drawing(drawings.lora())
    assert "%" not in " ".join(svg.words()), "the share is the page's first guess"
    boxes = {text.text: svg.box_of(text) for text in svg.texts if text.text in ("W", "lora_A") and text.size > 20}
    (lora_b,) = (box for box in svg.boxes if box.fill == boxes["lora_A"].fill and box.right - box.x == 32)
    assert boxes["W"].fill == palette.SHADES["frozen parameters"]
    assert boxes["lora_A"].right - boxes["lora_A"].x == boxes["W"].right - boxes["W"].x, "both take in x"
    assert lora_b.bottom - lora_b.y == boxes["W"].bottom - boxes["W"].y, "both make y"
    bytes_of = [box.right - box.x for box in svg.boxes if box.y == 464]
    assert [width / bytes_of[0] * 2 for width in bytes_of] == list(memory.ADAM)


def test_the_fine_tunes_sample_is_encoded_as_drawn():
    from pardemo.finetune.samples import IGNORED, encode

    class Tokenizer:
        eos_token_id = 2

        def prompt_ids(self, messages):
            assert messages[0]["content"] == "task and news"
            return [195, 11, 12, 13, 196]

        def text_ids(self, text):
            return [21, 22, 23]

    found = encode({"instruction": "task and ", "input": "news", "output": "headline"}, Tokenizer(), 1024)
    names = {11: "n₁", 12: "n₂", 13: "n₃", 21: "h₁", 22: "h₂", 23: "h₃", IGNORED: "−100"}
    svg = svgs.drawing(drawings.finetune_flow())
    rows = {y: [t.text for t in svg.texts if t.y == y and t.x > 80] for y in sorted({t.y for t in svg.texts})}
    drawn = [row for row in rows.values() if len(row) == len(finetune.TOKENS)]
    assert drawn == [[names.get(n, str(n)) for n in found[kind]] for kind in ("input_ids", "labels")]


@pytest.mark.parametrize(("number", "apart"), [(0, False), (1, True)])
def test_an_f_stands_where_the_backward_pass_sums(world_of, number, apart):
    def backward():
        x = gpt.numbers(2, 3).requires_grad_()
        weights = [gpt.numbers(3, 3, seed=n) for n in range(3)]
        inputs = [copy_to(x) for _ in weights] if apart else [copy_to(x)] * 3
        y = sum((one @ weight).sum() for one, weight in zip(inputs, weights, strict=True))
        with CallMeter() as calls:
            y.backward()
        return calls.counts

    title, sums = attention.WAYS[number]
    assert world_of(2).run(backward)[0] == {"all_reduce": sums}
    svg = svgs.drawing(drawings.one_sum_or_three())
    heights = sorted(text.y for text in svg.texts if text.text == "f: 2φ")
    below = next(text.y for text in svg.texts if text.text == attention.WAYS[1][0])
    assert sum((height > below) == apart for height in heights) == sums
    assert f"backward {2 * sums}φ" in svg.words(), title


def test_areas_of_states_are_bytes():
    """Each optimizer's green beside the matrix's blue is what it keeps for each of the matrix's 4 bytes."""
    svg = svgs.drawing(drawings.kept_by_optimizer())
    (matrix,) = svg.filled(palette.KEPT["parameters"])
    states = sum(box.area for box in svg.filled(palette.KEPT["optimizer states"]))
    wide, high = 96, 54
    per_byte = {"Adafactor": 8 * (wide + high), "Shampoo": 2 * (wide**2 + high**2)}  # a row is drawn 8 thick
    shares = {"SGD, momentum": 1, "Adam": 2, "8-bit Adam": 0.5, "Muon": 1}
    assert set(per_byte) | set(shares) == {name for name, _, _ in of_optimizers.OPTIMIZERS} == set(optimizers.KEPT)
    for name, share in shares.items():
        assert optimizers.kept_bytes(name, [(512, 1024)]) == pytest.approx(4 * share * 512 * 1024, rel=0.02)
    assert optimizers.kept_bytes("Shampoo", [(high, wide)]) == 4 * per_byte["Shampoo"]
    assert states == pytest.approx(sum(shares.values()) * matrix.area + sum(per_byte.values()), rel=0.001)
