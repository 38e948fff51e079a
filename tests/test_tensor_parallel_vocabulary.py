"""The loss over a divided vocabulary, reduction by reduction: it is computed in fp32 whatever the logits are."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import CallMeter, WireMeter
from pardemo.formulas import communication
from pardemo.small_models import gpt
from pardemo.tensor_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy, vocabulary

TOKENS, VOCABULARY = 96, 256
#: fp32: sums of 256 exponentials in another order. A sum of two parts in bf16 would be 2^-9 = 2e-3 off, and 3e-3 of a
#: loss of some 8 was not seen by a test that looked at the gradients in bf16.
CLOSE = 2e-6
LAYOUTS = {"all": [], "some ignored": [0, 3, 50], "all ignored": list(range(TOKENS))}


def logits_and_targets(dtype, targets_on):
    """Logits of some size whose largest is on another rank from token to token, with targets on one rank or on all."""
    logits = (4 * gpt.numbers(TOKENS, VOCABULARY)).to(dtype)
    targets = gpt.text(1, TOKENS, VOCABULARY, seed=3)[0]
    if targets_on == "the last rank":  # no other rank has the logit of a target
        targets = VOCABULARY - 1 - targets % (VOCABULARY // 4)
    return logits, targets


def losses(dtype, reduction, ignored, targets_on, index=-100):
    rank, n = dist.get_rank(), dist.get_world_size()
    logits, targets = logits_and_targets(dtype, targets_on)
    targets[LAYOUTS[ignored]] = index
    weight = gpt.numbers(TOKENS, seed=5) if reduction == "none" else torch.ones(())
    whole = logits.float().requires_grad_()
    expected = F.cross_entropy(whole, targets, ignore_index=index, reduction=reduction)
    (expected * weight).sum().backward()
    mine = logits.detach().chunk(n, 1)[rank].clone().requires_grad_()
    found = vocab_parallel_cross_entropy(mine, targets, ignore_index=index, reduction=reduction)
    (found * weight).sum().backward()
    assert torch.equal(mine, logits.chunk(n, 1)[rank]), "the logits were changed"
    assert found.dtype == torch.float32
    return found.detach(), expected.detach(), mine.grad, whole.grad.chunk(n, 1)[rank]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", ["all", "some ignored"])
@pytest.mark.parametrize("targets_on", ["every rank", "the last rank"])
def test_every_reduction_is_that_of_fp32(dtype, reduction, ignored, targets_on):
    rounding = {torch.float32: CLOSE, torch.bfloat16: 2**-8}[dtype]
    found, expected, gradient, whole = losses(dtype, reduction, ignored, targets_on)
    assert gpt.relative_error(found, expected) < CLOSE
    assert gradient.dtype == dtype
    assert gpt.relative_error(gradient, whole) < rounding, "rounded once, at the end"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_where_every_target_is_ignored_the_loss_and_its_gradient_are_zero(reduction):
    found, expected, gradient, whole = losses(torch.bfloat16, reduction, "all ignored", "all")
    assert torch.equal(found, expected)
    assert not gradient.any()
    assert not whole.any()


@pytest.mark.ranks(4)
def test_the_largest_logit_is_taken_off_exactly(rank, world_size):
    """Large logits that are alike but for a little: what counts is what is left when the largest is taken off."""
    logits = 1000 + gpt.numbers(TOKENS, VOCABULARY)
    _, targets = logits_and_targets(torch.float32, "every rank")
    found = vocab_parallel_cross_entropy(logits.chunk(world_size, 1)[rank], targets)
    assert gpt.relative_error(found, F.cross_entropy(logits.double(), targets)) < CLOSE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["other", "exchanged", "ignored"])
def test_ranks_with_different_targets_are_refused(rank, world_size, what):
    targets = gpt.text(1, TOKENS, VOCABULARY, seed=rank if what == "other" else 0)[0]
    if what == "exchanged" and rank:
        targets = targets.flip(0)
    if what == "ignored":
        targets[rank] = -100
    with pytest.raises(ValueError, match=r"different.*targets"):
        vocab_parallel_cross_entropy(torch.zeros(TOKENS, VOCABULARY // world_size), targets)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [1, 7, TOKENS - 1])
def test_logits_taken_in_blocks_are_all_taken(monkeypatch, rows):
    """One row, some that do not divide the tokens, and a last block of one row."""
    monkeypatch.setattr(vocabulary, "BLOCK_ELEMENTS", rows * VOCABULARY // 2)
    found, expected, gradient, whole = losses(torch.bfloat16, "none", "some ignored", "every rank")
    assert gpt.relative_error(found, expected) < CLOSE
    assert gpt.relative_error(gradient, whole) < 2**-8


@pytest.mark.ranks(2)
@pytest.mark.parametrize("index", [0, VOCABULARY - 1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_any_number_can_be_the_one_that_is_ignored(index, reduction):
    """A number of the vocabulary, such as that of a padding token, and targets of -100 nowhere."""
    found, expected, gradient, whole = losses(torch.float32, reduction, "some ignored", "every rank", index)
    assert gpt.relative_error(found, expected) < CLOSE
    assert gpt.relative_error(gradient, whole) < CLOSE


@pytest.mark.ranks(2)
def test_extreme_logits_do_not_overflow_and_no_label_at_all_is_nan_as_in_torch(rank, world_size):
    logits = torch.tensor([[1e4, 0.0, -1e4, 3.0], [-1e4, -1e4, -1e4, -1e4]])
    targets = torch.tensor([3, 0])
    plain, mine = logits.clone().requires_grad_(), logits.chunk(world_size, 1)[rank].clone().requires_grad_()
    expected = F.cross_entropy(plain, targets)
    found = vocab_parallel_cross_entropy(mine, targets)
    for loss in (expected, found):
        loss.backward()
    nothing = vocab_parallel_cross_entropy(mine, torch.full((2,), -100))
    assert gpt.relative_error(found, expected) < CLOSE
    assert gpt.relative_error(mine.grad, plain.grad.chunk(world_size, 1)[rank]) < CLOSE
    assert nothing.isnan()


@pytest.mark.ranks(2, 4)
def test_the_loss_moves_three_numbers_a_token(world_size):
    tokens = 1 << 17
    logits = torch.zeros(tokens, 2)
    targets = torch.zeros(tokens, dtype=torch.long)
    vocab_parallel_cross_entropy(logits, targets)
    with WireMeter() as wire, CallMeter() as calls:
        vocab_parallel_cross_entropy(logits, targets)
    assert wire.sent_bytes / communication.ring_all_reduce(4 * tokens, world_size).sent == pytest.approx(3, rel=0.01)
    assert calls.counts == {"all_reduce": 2}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("in_sequence", [False, True])
def test_a_table_that_is_cut_equals_the_plain_one(rank, world_size, padding, in_sequence):
    embedding = gpt.seeded(lambda: nn.Embedding(16, 4, padding_idx=padding))
    tokens, gradient = gpt.text(2, 8, 16), gpt.numbers(2, 8, 4)
    tokens[0, :3] = 0
    layer, expected = VocabParallelEmbedding(embedding, sequence_parallel=in_sequence), embedding(tokens)
    found = layer(tokens)
    expected.backward(gradient)
    found.backward(gradient.chunk(world_size, 1)[rank] if in_sequence else gradient)
    assert torch.equal(found, expected.chunk(world_size, 1)[rank] if in_sequence else expected)
    assert gpt.relative_error(layer.weight.grad, embedding.weight.grad.chunk(world_size)[rank]) < CLOSE
