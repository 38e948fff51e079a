"""Key/value heads that several ranks hold, and cores with parameters: several steps against one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import CallMeter, WireMeter
from pardemo.formulas import communication
from pardemo.small_models import gpt
from pardemo.tensor_parallel import ParallelAttention, gather_sequence, scatter_sequence

HIDDEN, HEADS, BATCH, SEQUENCE = 64, 8, 2, 16
#: fp32 sums in another order: some 1e-7 of a tensor's norm, a little more after several steps. A factor of 1.003 on a
#: gradient would be 3e-3, a rank's part of it alone a half.
CLOSE = 1e-5


class QKNorm(nn.Module):
    """As in Qwen3: a norm over head_dim of query and of key, its weights shared by all heads."""

    def __init__(self, head_dim):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True, enable_gqa=True)


class Plain(nn.Module):
    """The same attention in one process."""

    def __init__(self, full, core):
        super().__init__()
        self.full, self.core = full, core

    def forward(self, x):
        widths = [n * self.full.head_dim for n in (self.full.heads, self.full.kv_heads, self.full.kv_heads)]
        q, k, v = (
            t.unflatten(-1, (-1, self.full.head_dim)).transpose(1, 2) for t in self.full.qkv(x).split(widths, -1)
        )
        return self.full.out(self.core(q, k, v).transpose(1, 2).flatten(2))


def full_and_core(kv_heads, normed):
    full = gpt.seeded(lambda: gpt.Attention(HIDDEN, HEADS, kv_heads))
    core = QKNorm(HIDDEN // HEADS) if normed else None
    if normed:
        for norm, seed in ((core.q_norm, 5), (core.k_norm, 6)):
            norm.weight.data += 0.3 * gpt.numbers(HIDDEN // HEADS, seed=seed)
    return full, core


def plain_core(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def apart(full, kv_heads):
    """The fused projection as three layers."""
    head = HIDDEN // HEADS
    widths = [HEADS * head, kv_heads * head, kv_heads * head]
    layers = [nn.Linear(HIDDEN, width) for width in widths]
    for layer, weight, bias in zip(layers, full.qkv.weight.split(widths), full.qkv.bias.split(widths), strict=True):
        layer.weight.data, layer.bias.data = weight.detach().clone(), bias.detach().clone()
    return layers


def train(model, steps, enter=lambda x: x, leave=lambda y: y):
    """SGD with momentum, so that an error in a gradient stays; outputs and the input's gradients."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for step in range(steps):
        x = gpt.numbers(BATCH, SEQUENCE, HIDDEN, seed=step).requires_grad_()
        y = leave(model(enter(x)))
        optimizer.zero_grad()
        (y * gpt.numbers(BATCH, SEQUENCE, HIDDEN, seed=100 + step)).sum().div(BATCH).backward()
        optimizer.step()
        found += [y.detach(), x.grad]
    return found


def part(whole, kv_heads, n):
    """This rank's rows of a fused projection: its query heads and the key/value heads that they attend to."""
    rank, head = dist.get_rank(), HIDDEN // HEADS
    q, k, v = whole.split([HEADS * head, kv_heads * head, kv_heads * head])
    kv = [t.chunk(min(n, kv_heads))[rank * kv_heads // n if kv_heads < n else rank] for t in (k, v)]
    return torch.cat([q.chunk(n)[rank], *kv])


def trained_beside_one_process(kv_heads, normed, separate, mode, steps=4):
    n, rank = dist.get_world_size(), dist.get_rank()
    full, core = full_and_core(kv_heads, normed)
    sequence = mode == "sequence"
    layer = ParallelAttention(
        apart(full, kv_heads) if separate else full.qkv,
        full.out,
        HEADS,
        kv_heads,
        core=core,
        sequence_parallel=sequence,
    )
    start = [p.detach().clone() for p in layer.parameters()]
    enter = scatter_sequence if sequence else (lambda x: x)
    leave = (lambda y: gather_sequence(y, whole_gradient=True)) if sequence else (lambda y: y)
    found = train(layer, steps, enter, leave)
    plain = Plain(full, core or plain_core)
    expected = train(plain, steps)
    ends = {
        "qkv.weight": part(full.qkv.weight, kv_heads, n),
        "qkv.bias": part(full.qkv.bias, kv_heads, n),
        "out.weight": full.out.weight.chunk(n, 1)[rank],
        "out.bias": full.out.bias,
    }
    if normed:
        ends |= {f"core.{name}": p for name, p in core.named_parameters()}
    assert ends.keys() == dict(layer.named_parameters()).keys()
    errors = [gpt.relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    for (name, p), was in zip(layer.named_parameters(), start, strict=True):
        errors.append(gpt.relative_error(p - was, ends[name] - was))
    return max(errors), {name: p.detach() for name, p in layer.named_parameters()}


def assert_holders_agree(results, kv_heads):
    """Who holds the same key/value head, or a norm, holds the same bits."""
    n, head = len(results), HIDDEN // HEADS
    for rank, (_, mine) in enumerate(results):
        first = results[rank * kv_heads // n * n // kv_heads if kv_heads < n else rank][1]
        rows = 2 * head if kv_heads < n else 0
        for name in ("qkv.weight", "qkv.bias"):
            assert torch.equal(mine[name][len(mine[name]) - rows :], first[name][len(mine[name]) - rows :])
        for name in mine:
            if name.startswith("core"):
                assert torch.equal(mine[name], results[0][1][name]), f"{name} drifted apart"


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("n", "kv_heads"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_fewer_key_value_heads_than_ranks_equal_one_process(world_of, n, kv_heads, separate):
    results = world_of(n).run(trained_beside_one_process, kv_heads, False, separate, "")
    assert max(error for error, _ in results) < CLOSE
    assert_holders_agree(results, kv_heads)


@pytest.mark.parametrize("mode", ["", "sequence"])
@pytest.mark.parametrize(("n", "kv_heads"), [(2, 8), (4, 2)])
def test_a_norm_of_queries_and_keys_equals_one_process(world_of, n, kv_heads, mode):
    results = world_of(n).run(trained_beside_one_process, kv_heads, True, False, mode)
    assert max(error for error, _ in results) < CLOSE
    assert_holders_agree(results, kv_heads)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_that_is_not_causal_equals_one_process(kv_heads):
    """Every token sees every other, as in an encoder."""
    full = gpt.seeded(lambda: gpt.Attention(HIDDEN, HEADS, kv_heads))
    layer = ParallelAttention(full.qkv, full.out, HEADS, kv_heads, causal=False)
    plain = Plain(full, partial(F.scaled_dot_product_attention, enable_gqa=True))
    found, expected = (train(model, 2) for model in (layer, plain))
    assert max(gpt.relative_error(a, b) for a, b in zip(found, expected, strict=True)) < CLOSE


def slopes(heads):
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


def alibi(q, k, v, of_head):
    """A head's bias grows with the distance."""
    place = torch.arange(q.shape[-2])
    bias = -(place[:, None] - place[None]).abs() * of_head[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.ranks(2, 4)
def test_a_core_with_the_slopes_of_a_ranks_own_heads_equals_one_process(rank, world_size):
    full = gpt.seeded(lambda: gpt.Attention(HIDDEN, HEADS))
    own = partial(alibi, of_head=slopes(HEADS).chunk(world_size)[rank])
    layer = ParallelAttention(full.qkv, full.out, HEADS, core=own)
    found, expected = (train(model, 2) for model in (layer, Plain(full, partial(alibi, of_head=slopes(HEADS)))))
    assert max(gpt.relative_error(a, b) for a, b in zip(found, expected, strict=True)) < CLOSE


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_shared_heads_cost_an_all_reduce_of_their_whole_gradient(kv_heads):
    """Beyond the input's gradient, which is not asked for here."""
    hidden, heads = 1024, 8
    full = gpt.seeded(lambda: gpt.Attention(hidden, heads, kv_heads))
    layer = ParallelAttention(full.qkv, full.out, heads, kv_heads)
    x = gpt.numbers(1, 16, hidden)
    layer(x).sum().backward()
    y = layer(x).sum()
    with WireMeter() as wire, CallMeter() as calls:
        y.backward()
    if kv_heads == 4:  # each rank has its own
        assert calls.counts == {}
        return
    numbers = 2 * 2 * (hidden // heads) * (hidden + 1)  # key and value, two heads, weight and bias
    assert wire.sent_bytes == pytest.approx(communication.ring_all_reduce(4 * numbers, 4).sent, rel=0.01)
    assert calls.counts == {"all_reduce": 1}


@pytest.mark.ranks(4)
def test_a_shared_head_whose_weight_is_frozen_sums_its_bias_alone(world_size):
    full = gpt.seeded(lambda: gpt.Attention(HIDDEN, HEADS, 1))
    full.qkv.weight.requires_grad_(False)
    layer = ParallelAttention(full.qkv, full.out, HEADS, 1)
    x = gpt.numbers(BATCH, SEQUENCE, HIDDEN)
    layer(x).square().sum().backward()
    full(x).square().sum().backward()
    assert layer.qkv.weight.grad is None
    assert gpt.relative_error(layer.qkv.bias.grad, part(full.qkv.bias.grad, 1, world_size)) < CLOSE
