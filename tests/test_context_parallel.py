"""Ring and Ulysses attention against plain attention of the whole sequence in the same test."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from pardemo import WireMeter
from pardemo.context_parallel import (
    cut,
    join,
    mean_over_tokens,
    pieces_of,
    positions,
    ring_attention,
    ulysses_attention,
)
from pardemo.context_parallel.blocks import attend, attend_backward, merge
from pardemo.formulas import context_parallel as formulas
from pardemo.small_models import gpt

B, H, D = 2, 4, 8
TOLERANCE = 1e-5  # relative, in fp32: the issue's own


def numbers(tokens, groups=H, width=D, values=D, dtype=torch.float32):
    """The whole sequence's queries, keys, values, and the gradient of their output: the same on every rank."""
    shapes = ((B, H, tokens, width), (B, groups, tokens, width), (B, groups, tokens, values), (B, H, tokens, values))
    return [gpt.numbers(*shape, seed=10 + place).to(dtype) for place, shape in enumerate(shapes)]


def plain(q, k, v, gradient, causal=True, documents=None):
    """Output, and gradients of q, k, v, of one process in fp64; all [b, h, s, d], ``gradient`` of the output.

    ``documents``: of each token its document [b, s]; tokens see those of their own alone.
    """
    q, k, v = (each.double().requires_grad_() for each in (q, k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    seen = (seen.tril() if causal else seen).expand(q.shape[0], 1, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    wide_k, wide_v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=seen)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient.double())]


def off(found, expected):
    """The largest relative error of output and gradients."""
    return max(gpt.relative_error(ours.double(), theirs) for ours, theirs in zip(found, expected, strict=True))


def on_ranks(attention, whole, **how):
    """Output and gradients, joined again."""
    order = "plain" if attention is ulysses_attention else how.get("order", "zigzag")
    here = [cut(each, dim=2, order=order) for each in whole]
    inputs = [each.requires_grad_() for each in here[:3]]
    out = attention(*inputs, **how)
    found = [out.detach(), *torch.autograd.grad(out, inputs, here[3])]
    return [join(each, dim=2, order=order) for each in found]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["zigzag", "plain"])
@pytest.mark.parametrize("groups", [H, 2, 1])
def test_ring_attention_is_plain_attention(rank, world_size, causal, order, groups):
    whole = numbers(8 * 2 * world_size, groups)
    found = on_ranks(ring_attention, whole, causal=causal, order=order)
    assert off(found, plain(*whole, causal=causal)) < TOLERANCE


@pytest.mark.ranks(2, 4)
def test_values_of_another_width_than_keys(rank, world_size):
    """Latent attention's; torch's fused kernel has none."""
    whole = numbers(4 * world_size, values=2 * D)
    assert off(on_ranks(ring_attention, whole), plain(*whole)) < TOLERANCE


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_do_not_see_each_other(rank, world_size, causal):
    tokens = 8 * world_size
    whole = numbers(tokens, groups=2)
    ends = torch.tensor([[tokens // 3, tokens // 2 + 1], [1, tokens - 1]])
    documents = (torch.arange(tokens)[None, :, None] >= ends[:, None, :]).sum(-1)  # [b, S]: 0, 1, 2
    expected = plain(*whole, causal=causal, documents=documents)
    for order in ("zigzag", "plain"):
        own = cut(documents, order=order)
        found = on_ranks(ring_attention, whole, causal=causal, order=order, documents=own)
        assert off(found, expected) < TOLERANCE
    assert off(plain(*whole, causal=causal), expected) > 0.1, "without documents it is something else"


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
def test_other_dtypes(rank, world_size, dtype, near):
    whole = numbers(8 * world_size, dtype=dtype)
    expected = plain(*whole)
    found = on_ranks(ring_attention, whole)
    assert {each.dtype for each in found} == {dtype}
    assert off(found, expected) < near
    one = [each.to(dtype) for each in whole[:3]]
    alone = F.scaled_dot_product_attention(*one, is_causal=True)
    assert off(found[:1], expected[:1]) < 2 * gpt.relative_error(alone.double(), expected[0]) + 1e-15


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [H, 2, 1])
def test_ulysses_is_plain_attention(rank, world_size, causal, groups):
    whole = numbers(6 * world_size, groups)
    assert off(on_ranks(ulysses_attention, whole, causal=causal), plain(*whole, causal=causal)) < TOLERANCE


@pytest.mark.ranks(2, 4)
def test_a_rank_sends_what_the_formulas_say(rank, world_size):
    n, tokens, groups = world_size, 256 * world_size, 2
    here = [cut(each, dim=2).requires_grad_() for each in numbers(tokens, groups, 32, 32)[:3]]
    forth = WireMeter()
    with forth:
        out = ring_attention(*here)
    back = WireMeter()
    with back:
        out.sum().backward()
    kv = 2 * B * tokens // n * groups * 32 * 4
    assert forth.sent_bytes == pytest.approx((n - 1) * kv, rel=0.02)
    assert back.sent_bytes == pytest.approx(2 * (n - 1) * kv, rel=0.02)  # keys and values, and their gradients
    ulysses = WireMeter()
    with ulysses:
        ulysses_attention(*here)
    groups = max(groups, n)
    assert ulysses.sent_bytes == pytest.approx((n - 1) / n * 2 * B * tokens // n * (H + groups) * 32 * 4, rel=0.02)


def test_zigzag_gives_all_ranks_the_same_products():
    for ranks in (1, 2, 3, 8):
        tokens = 4 * ranks
        products = [int((positions(tokens, rank, ranks) + 1).sum()) for rank in range(ranks)]
        assert len(set(products)) == 1
        uneven = [int((positions(tokens, rank, ranks, "plain") + 1).sum()) for rank in range(ranks)]
        assert ranks == 1 or uneven[-1] > uneven[0]
        assert sorted(piece for rank in range(ranks) for piece in pieces_of(rank, ranks)) == [*range(2 * ranks)]


@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4), queries=st.integers(1, 4),
    groups=st.sampled_from([1, 2]), seed=st.integers(0, 99), masked=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_blocks_are_merged_in_any_cut(lengths, queries, groups, seed, masked):
    """Also where some queries see no key of a block, or none at all."""
    torch.manual_seed(seed)
    q, k, v = (
        torch.randn(1, 2, queries, 4),
        torch.randn(1, groups, sum(lengths), 4),
        torch.randn(1, groups, sum(lengths), 4),
    )
    mask = torch.rand(1, queries, sum(lengths)) < 0.5 if masked else None
    gradient = torch.randn(1, 2, queries, 4)
    whole = attend(q, k, v, mask=mask)
    masks = [None] * len(lengths) if mask is None else mask.split(lengths, 2)
    blocks = list(zip(k.split(lengths, 2), v.split(lengths, 2), masks, strict=True))
    out, log_sum = attend(q, *blocks[0][:2], mask=blocks[0][2])
    for keys, values, seen in blocks[1:]:
        out, log_sum = merge(out, log_sum, *attend(q, keys, values, mask=seen))
    torch.testing.assert_close((out, log_sum), whole)
    assert not out.isnan().any()
    parts = [attend_backward(gradient, q, *block[:2], out, log_sum, mask=block[2]) for block in blocks]
    together = attend_backward(gradient, q, k, v, *whole, mask=mask)
    of_q, of_k, of_v = zip(*parts, strict=True)
    torch.testing.assert_close((sum(of_q), torch.cat(of_k, 2), torch.cat(of_v, 2)), together)


@pytest.mark.ranks(1, 2, 4)
def test_a_mean_over_all_ranks_tokens(rank, world_size):
    tokens = 4 * world_size
    losses = gpt.numbers(3, tokens, seed=3).abs()
    counted = gpt.numbers(3, tokens, seed=4) > 0
    counted[:, -3:] = False  # the last rank counts fewest
    whole = losses.clone().requires_grad_()
    expected = whole[counted].mean()
    expected.backward()
    own = cut(torch.where(counted, losses, torch.nan), order="plain").requires_grad_()
    mean = mean_over_tokens(own, cut(counted, order="plain"))
    mean.backward()
    assert mean.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(own.grad, cut(whole.grad, order="plain"), rtol=1e-6)
    with pytest.raises(ValueError, match=r"counts.*token"):
        mean_over_tokens(own, torch.zeros_like(own, dtype=torch.bool))


@pytest.mark.ranks(2)
def test_what_cannot_be_is_one_line(rank, world_size):
    def some(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype)

    q, k = some(1, 4, 6, 8), some(1, 2, 6, 8)
    for message, call in (
        ("5 tokens of a rank do not divide into the two", lambda: ring_attention(*[some(1, 4, 5, 8)] * 3)),
        ("order must be one of zigzag, plain, not 'random'", lambda: ring_attention(q, q, q, order="random")),
        ("do not fit: they are .batch, heads", lambda: ring_attention(q, *[some(1, 3, 6, 8)] * 2)),
        ("do not fit: they are .batch, heads", lambda: ring_attention(q, k, some(1, 2, 7, 8))),
        (r"do not fit: they are \[batch, heads, tokens, width\]", lambda: ring_attention(q[0], k[0], k[0])),
        ("documents are whole numbers", lambda: ring_attention(q, k, k, documents=some(1, 6))),
        ("3 heads do not divide by the 2 ranks of the group; 1, 3 would do, or a ring",
         lambda: ulysses_attention(*[some(1, 3, 6, 8)] * 3)),
        ("a sequence of 10 tokens does not divide into the 4 pieces of the zigzag order",
         lambda: cut(some(1, 10))),
        (r"at different exchanges \(.*rank 1: ring attention .* of \(1, 4, 8, 8\)",
         lambda: ring_attention(*[some(1, 4, 6 + 2 * rank, 8)] * 3)),
        ("the ranks are at different exchanges", lambda: ring_attention(q, q, q, causal=bool(rank))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    for message, tensors in (
        ("one floating-point dtype", (q, q.double(), q)),
        ("one floating-point dtype", [some(1, 4, 6, 8, dtype=torch.int32)] * 3),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=message):
            ring_attention(*tensors)
    x = q.clone().requires_grad_()
    once = ring_attention(x, x, x).sum()
    with pytest.raises(RuntimeError, match=r"exchange.*derivative"):
        torch.autograd.grad(once, x, create_graph=True)


@pytest.mark.ranks(2)
def test_an_empty_batch_and_no_number(rank, world_size):
    empty = torch.zeros(0, 2, 4, 8, requires_grad=True)
    out = ring_attention(empty, empty, empty)
    out.sum().backward()
    assert out.shape == (0, 2, 4, 8)
    x = torch.zeros(1, 2, 4, 8)
    if rank == 1:
        x[0, 0, -1] = math.nan  # pieces 1 and 2 of 4: what sees it is no number anywhere, and nothing else
    out = join(ring_attention(x, x, x), dim=2)
    assert out[0, 0].isnan().any()
    assert not out[0, 1].isnan().any()
    assert dist.get_world_size() == 2


@pytest.mark.ranks(2, 4)
def test_deepspeeds_is_ours_to_the_last_bit(rank, world_size):
    from pardemo.peers.deepspeed import ulysses as of_deepspeed

    here = [cut(each, dim=2, order="plain").requires_grad_() for each in numbers(64 * world_size, 4, 32, 32)[:3]]
    with WireMeter() as ours:
        out = ulysses_attention(*here)
    gradients = torch.autograd.grad(out.sum(), here)
    with WireMeter() as theirs:
        its = of_deepspeed.attention(*here)
    assert torch.equal(its, out)
    assert all(
        torch.equal(one, other) for one, other in zip(torch.autograd.grad(its.sum(), here), gradients, strict=True)
    )
    assert theirs.sent_bytes == pytest.approx(ours.sent_bytes, rel=0.02)


@pytest.mark.ranks(2, 4)
def test_megatrons_exchange_is_ours_to_the_last_bit(rank, world_size):
    from pardemo.peers import megatron_context

    here = [cut(each[:1], dim=2, order="plain").requires_grad_() for each in numbers(64 * world_size, 4, 32, 32)[:3]]
    out = ulysses_attention(*here)
    its = megatron_context.attention(*here)
    assert torch.equal(its, out)
    pairs = zip(torch.autograd.grad(its.sum(), here), torch.autograd.grad(out.sum(), here), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert "only supported by TEDotProductAttention" in megatron_context.refusal(64, 4)


@pytest.mark.ranks(2, 4)
def test_megatron_and_torch_cut_in_zigzag(rank, world_size):
    from pardemo.peers import megatron_context
    from pardemo.peers.pytorch import context

    tokens = torch.arange(2 * 8 * world_size).view(2, -1)
    for peer in (megatron_context, context):
        assert torch.equal(peer.own_tokens(tokens), cut(tokens))
        assert not torch.equal(peer.own_tokens(tokens), cut(tokens, order="plain"))


@pytest.mark.ranks(2)
def test_torchs_ring_refuses_a_cpu(rank, world_size):
    from pardemo.peers.pytorch import context

    with pytest.raises(NotImplementedError, match=r"sharding.*strategy"):
        context.attention(*[torch.randn(1, 4, 16, 8)] * 3)


def test_deepspeeds_tiles_have_the_loss_and_the_gradients_of_all_tokens():
    from pardemo.peers.deepspeed import tiled_loss

    x, head, labels = gpt.numbers(12, 8), gpt.numbers(40, 8, seed=1), gpt.text(1, 12, 40)[0]
    x, head = x.requires_grad_(), head.requires_grad_()
    expected = F.cross_entropy(x @ head.T, labels)
    right = torch.autograd.grad(expected, (x, head))
    loss = tiled_loss.loss(x, head, labels, 3)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert off((x.grad, head.grad), [each.double() for each in right]) < TOLERANCE


def test_causal_attention_catches_up_with_a_layer_s_matrices_at_twelve_times_its_width():
    width = 64
    tokens = 12 * width
    of_matrices = 24 * tokens * width**2  # forward: four of [h, h], two of [h, 4h]
    assert formulas.attention_flops(1, tokens, width, 1, passes=1) == of_matrices
