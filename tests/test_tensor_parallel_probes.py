"""Cores, activations and norms of which a rank runs a part: as in one process, or refused in one line."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo.small_models import gpt
from pardemo.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelMLP,
    RowParallelLinear,
)

HIDDEN, HEADS, BATCH, SEQUENCE = 32, 4, 2, 16
CLOSE = 1e-5  # fp32 sums in another order: some 1e-7 of a tensor's norm


def attention_of(full, core, **options):
    return ParallelAttention(full.qkv, full.out, HEADS, core=core, **options)


def full_attention():
    return gpt.seeded(lambda: gpt.Attention(HIDDEN, HEADS))


def plain(full, core, x):
    """The same attention in one process, with the core over all heads."""
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in full.qkv(x).chunk(3, -1))
    return full.out(core(q, k, v).transpose(1, 2).flatten(2))


def complaint(make):
    try:
        make()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it was accepted"


# --- cores -----------------------------------------------------------------------------------------------------------


def slopes(heads):
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


def biased(q, k, v, of_head):
    """ALiBi: a head's bias grows with the distance."""
    place = torch.arange(q.shape[-2])
    bias = -(place[:, None] - place[None]).abs() * of_head[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


def alibi(q, k, v):
    return biased(q, k, v, slopes(q.shape[1]))


class FromTheFirstHead(nn.Module):
    """T5's table of a bias for each head, which begins with zeros, read from the first head on."""

    def __init__(self, cut=True):
        super().__init__()
        self.bias, self.cut = nn.Parameter(torch.zeros(HEADS, 1, SEQUENCE)), cut

    def forward(self, q, k, v):
        bias = self.bias[: q.shape[1] if self.cut else HEADS, :, : q.shape[2]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def talking_heads(q, k, v):
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return (scores + 0.1 * scores.mean(1, keepdim=True)) @ v


def masked_alibi(q, k, v):
    """Runs with SEQUENCE tokens alone."""
    mask = torch.ones(SEQUENCE, SEQUENCE).tril().log()
    return (q @ k.transpose(-1, -2) + mask - slopes(q.shape[1])[:, None, None]).sigmoid() @ v


def own_dice(q, k, v):
    return F.scaled_dot_product_attention(q, k, v) * (torch.rand(q.shape[:2])[..., None, None] > 0.5)


MIXES = "it mixes heads, or reads how many there are; give it what belongs to this rank's heads, such as their slopes"
CORES = {
    "alibi": (lambda: alibi, f"the core alibi gives heads 0 to 1 other results alone than among all: {MIXES}"),
    "T5": (FromTheFirstHead, "the core FromTheFirstHead gives heads 2 to 3 other results alone than among all"),
    "a whole table": (lambda: FromTheFirstHead(cut=False), "does not run on heads 0 to 1 alone (RuntimeError: "),
    "talking heads": (lambda: talking_heads, "the core talking_heads gives heads 0 to 1 other results alone"),
    "one length": (lambda: masked_alibi, "the core masked_alibi gives heads 0 to 1 other results alone"),
    "dice": (lambda: own_dice, "the core own_dice draws random numbers by other means than torch's dropout"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CORES)
def test_cores_that_need_all_heads_are_refused_on_every_rank(case):
    text = complaint(lambda: attention_of(full_attention(), CORES[case][0]())(gpt.numbers(BATCH, SEQUENCE, HIDDEN)))
    assert text.startswith("ValueError: "), text
    assert CORES[case][1] in text, text
    assert "\n" not in text


def alibi_of_own_heads():
    n, rank = dist.get_world_size(), dist.get_rank()
    mine = slopes(HEADS).chunk(n)[rank]
    return lambda q, k, v: biased(q, k, v, mine)


def in_place(q, k, v):
    return F.scaled_dot_product_attention(q.mul_(0.5), k, v, is_causal=True)


def with_a_mask(q, k, v):
    mask = torch.ones(SEQUENCE, SEQUENCE).tril().bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


FINE = {
    "slopes of own heads": (alibi_of_own_heads, alibi),
    "in place": (lambda: in_place, lambda q, k, v: in_place(q.clone(), k, v)),
    "a mask of one length": (lambda: with_a_mask, with_a_mask),
    "dropout of nothing": (lambda: lambda q, k, v: with_a_mask(F.dropout(q, 0.0), k, v), with_a_mask),
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("case", FINE)
def test_cores_of_a_ranks_own_heads_equal_one_process(rank, world_size, case):
    full, (make, whole) = full_attention(), FINE[case]
    layer = attention_of(full, make())
    x, gradient = gpt.numbers(BATCH, SEQUENCE, HIDDEN, seed=1), gpt.numbers(BATCH, SEQUENCE, HIDDEN, seed=2)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = layer(mine), plain(full, whole, theirs)
    y.backward(gradient)
    expected.backward(gradient)
    weight = torch.cat([part.chunk(world_size)[rank] for part in full.qkv.weight.grad.chunk(3)])
    pairs = [(y, expected), (mine.grad, theirs.grad), (layer.qkv.weight.grad, weight)]
    assert max(gpt.relative_error(a, b) for a, b in pairs) < CLOSE


@pytest.mark.ranks(2)
def test_dropout_in_a_core_is_taken_and_still_drops():
    full, x = full_attention(), gpt.numbers(BATCH, SEQUENCE, HIDDEN)
    before = torch.get_rng_state()
    dropped = attention_of(full, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.5))
    attention_of(full, lambda q, k, v: F.dropout(F.scaled_dot_product_attention(q, k, v), 0.5))
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers were used up"
    assert not torch.equal(dropped(x), dropped(x))


# --- activations -----------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "relu_": lambda: torch.relu_,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activations_in_place_equal_one_process(rank, world_size, case, gated):
    gate, up, down = (gpt.seeded(lambda: nn.Linear(16, 16), seed) for seed in range(3))
    activation = ACTIVATIONS[case]()
    layer = ParallelMLP([gate, up] if gated else gate, down, activation=activation)
    x, gradient = gpt.numbers(BATCH, SEQUENCE, 16, seed=1), gpt.numbers(BATCH, SEQUENCE, 16, seed=2)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    inner = activation(gate(theirs))
    expected, y = down(inner * up(theirs) if gated else inner), layer(mine)
    y.backward(gradient)
    expected.backward(gradient)
    own = [linear.weight.grad.chunk(world_size)[rank] for linear in ([gate, up] if gated else [gate])]
    pairs = [(y, expected), (mine.grad, theirs.grad), (layer.first.weight.grad, torch.cat(own))]
    assert max(gpt.relative_error(a, b) for a, b in pairs) < CLOSE


@pytest.mark.ranks(2)
def test_random_activations_of_a_ranks_own_columns_are_taken():
    layers = gpt.seeded(lambda: nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]))
    for activation in (lambda x: F.dropout(F.gelu(x), 0.5), nn.RReLU(), lambda x: F.rrelu(x, training=True)):
        layer, x = ParallelMLP(*layers, activation=activation), gpt.numbers(2, 16)
        assert not torch.equal(layer(x), layer(x))


# --- random numbers and norms over tokens that all ranks hold, or each a part of -------------------------------------


class DropPath(nn.Module):
    """Stochastic depth as in timm: a sample's path is dropped as a whole."""

    def forward(self, x):
        kept = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(0.9)
        return x * kept / 0.9 if self.training else x


class DroppingNorm(nn.LayerNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class OverChannels(nn.BatchNorm1d):
    """Batch norm takes [batch, channels, sequence]."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class OverTokens(nn.Module):
    """A group norm, in whose eyes the tokens are channels."""

    def forward(self, x):
        return F.layer_norm(x, x.shape[-2:])


def block(norm=None, wrap=lambda part: part, **options):
    layers = gpt.seeded(lambda: gpt.Block(8, 2))
    attention, mlp = gpt.parallel_attention(layers.attention, **options), gpt.parallel_mlp(layers.mlp, **options)
    return ParallelBlock(norm or layers.norm_1, attention, layers.norm_2, wrap(mlp), **options)


def step(net, in_sequence=False):
    x = gpt.numbers(BATCH, 8 // (dist.get_world_size() if in_sequence else 1), 8)
    net(x).square().sum().backward()


DRAWS = "draws random numbers (drop path, RReLU, F.dropout), and every rank would draw others for tokens that all hold"
PARTED = {
    "drop path": (
        lambda: step(block(wrap=lambda mlp: nn.Sequential(mlp, DropPath()))), f"mlp, a Sequential, {DRAWS}",
    ),
    "rrelu": (lambda: step(block(nn.Sequential(nn.LayerNorm(8), nn.RReLU()))), f"norm_1, a Sequential, {DRAWS}"),
    "dropout in a forward": (lambda: step(block(DroppingNorm(8))), f"norm_1, a DroppingNorm, {DRAWS}"),
    "batch norm": (
        lambda: block(OverChannels(8), sequence_parallel=True),
        "norm_1: OverChannels would take its statistics from this rank's tokens alone: use a norm of each token",
    ),
    "batch norm behind": (
        lambda: block(wrap=lambda mlp: nn.Sequential(mlp, OverChannels(8)), sequence_parallel=True),
        "mlp: OverChannels would take its statistics from this rank's tokens alone",
    ),
    "a norm over tokens": (
        lambda: block(OverTokens(), sequence_parallel=True),
        "norm_1, a OverTokens, gives a rank's tokens other results alone than among all: use a norm of each token",
    ),
    "drop path in a sequence": (
        lambda: block(wrap=lambda mlp: nn.Sequential(mlp, DropPath()), sequence_parallel=True),
        "mlp: DropPath would drop a sample's path for some of its tokens and keep it for others",
    ),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", PARTED)
def test_what_would_part_the_ranks_is_refused(case):
    text = complaint(PARTED[case][0])
    assert text.startswith("ValueError: "), text
    assert PARTED[case][1] in text, text
    assert "\n" not in text


@pytest.mark.ranks(2)
def test_draws_of_a_ranks_own_elements_are_taken():
    step(block(wrap=lambda mlp: nn.Sequential(mlp, DropPath())).eval())
    step(block(DroppingNorm(8), sequence_parallel=True), in_sequence=True)
    full = gpt.seeded(lambda: gpt.Block(8, 2))
    for recompute in (False, True):
        attention = ParallelAttention(
            full.attention.qkv, full.attention.out, 2, core=lambda q, k, v: F.dropout(v, 0.5), recompute_core=recompute
        )
        mlp = ParallelMLP(full.mlp.first, full.mlp.second, activation=nn.Sequential(nn.GELU(), nn.Dropout(0.5)))
        step(ParallelBlock(full.norm_1, attention, full.norm_2, mlp))


@pytest.mark.ranks(2)
def test_batch_norm_on_whole_sequences_equals_one_process():
    """Without sequence parallelism every rank has all tokens, and the same statistics."""
    full = gpt.seeded(lambda: gpt.Block(8, 2))
    full.norm_1 = gpt.seeded(lambda: OverChannels(8))
    net, x = gpt.parallel_block(full), gpt.numbers(BATCH, SEQUENCE, 8)
    errors = [gpt.relative_error(net(x), full(x)) for _ in range(2)]
    assert max(*errors, gpt.relative_error(net.norm_1.running_var, full.norm_1.running_var)) < CLOSE


# --- frozen on one rank ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "name"),
    [("norm", "norm_2.bias"), ("row bias", "mlp.second.bias"), ("column", "attention.qkv.weight"),
     ("norm in a sequence", "norm_2.bias")],
)  # fmt: skip
def test_a_parameter_frozen_on_one_rank_is_refused(rank, case, name):
    in_sequence = case == "norm in a sequence"
    net = block(sequence_parallel=in_sequence)
    of = {"norm": net.norm_2.bias, "row bias": net.mlp.second.bias, "column": net.attention.qkv.weight}
    of.get(case, net.norm_2.bias).requires_grad_(rank == 0)
    text = complaint(lambda: step(net, in_sequence))
    assert text.startswith("ValueError: the ranks are at different exchanges"), text
    assert f"in its block frozen: {name}" in text, text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["column", "row"])
def test_a_layers_bias_frozen_on_one_rank_is_refused(rank, case):
    full = gpt.seeded(lambda: nn.Linear(8, 8))
    layer = {"column": ColumnParallelLinear, "row": RowParallelLinear}[case](full)
    layer.bias.requires_grad_(rank == 0)
    x = gpt.numbers(2, 8 if case == "column" else 4).requires_grad_()
    text = complaint(lambda: layer(x).sum().backward())
    assert "weight trained, bias frozen" in text, text
