"""The loss over a divided vocabulary, reduction by reduction: it is computed in fp32 whatever the logits are."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.peers import gpt
from pardemo.tensor_parallel import vocab_parallel_cross_entropy, vocabulary

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


def losses(dtype, reduction, ignored, targets_on):
    rank, n = dist.get_rank(), dist.get_world_size()
    logits, targets = logits_and_targets(dtype, targets_on)
    targets[LAYOUTS[ignored]] = -100
    weight = gpt.numbers(TOKENS, seed=5) if reduction == "none" else torch.ones(())
    whole = logits.float().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction=reduction)
    (expected * weight).sum().backward()
    mine = logits.detach().chunk(n, 1)[rank].clone().requires_grad_()
    found = vocab_parallel_cross_entropy(mine, targets, reduction=reduction)
    (found * weight).sum().backward()
    assert found.dtype == torch.float32
    return found.detach(), expected.detach(), mine.grad, whole.grad.chunk(n, 1)[rank]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", ["all", "some ignored"])
@pytest.mark.parametrize("targets_on", ["every rank", "the last rank"])
def test_every_reduction_is_that_of_fp32(world_of, n, dtype, reduction, ignored, targets_on):
    rounding = {torch.float32: CLOSE, torch.bfloat16: 2**-8}[dtype]
    for found, expected, gradient, whole in world_of(n).run(losses, dtype, reduction, ignored, targets_on):
        assert gpt.relative_error(found, expected) < CLOSE
        assert gradient.dtype == dtype
        assert gpt.relative_error(gradient, whole) < rounding, "rounded once, at the end"


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_where_every_target_is_ignored_the_loss_and_its_gradient_are_zero(world_of, reduction):
    for found, expected, gradient, whole in world_of(2).run(losses, torch.bfloat16, reduction, "all ignored", "all"):
        assert torch.equal(found, expected)
        assert not gradient.any()
        assert not whole.any()


def shifted():
    """Large logits that are alike but for a little: what counts is what is left when the largest is taken off."""
    rank, n = dist.get_rank(), dist.get_world_size()
    logits = 1000 + gpt.numbers(TOKENS, VOCABULARY)
    _, targets = logits_and_targets(torch.float32, "every rank")
    found = vocab_parallel_cross_entropy(logits.chunk(n, 1)[rank], targets)
    return gpt.relative_error(found, F.cross_entropy(logits.double(), targets))


def test_the_largest_logit_is_taken_off_exactly(world_of):
    assert max(world_of(4).run(shifted)) < CLOSE


def unlike(what):
    targets = gpt.text(1, TOKENS, VOCABULARY, seed=dist.get_rank() if what == "other" else 0)[0]
    if what == "exchanged" and dist.get_rank():
        targets = targets.flip(0)
    if what == "ignored":
        targets[dist.get_rank()] = -100
    with pytest.raises(ValueError, match="the ranks have different targets: tensor-parallel ranks compute the loss of"):
        vocab_parallel_cross_entropy(torch.zeros(TOKENS, VOCABULARY // dist.get_world_size()), targets)


@pytest.mark.parametrize("what", ["other", "exchanged", "ignored"])
def test_ranks_with_different_targets_are_refused(world_of, what):
    world_of(2).run(unlike, what)


def in_blocks(block, ignored):
    """``losses`` anew, so many logits at a time."""
    before, vocabulary.BLOCK_ELEMENTS = vocabulary.BLOCK_ELEMENTS, block
    try:
        return losses(torch.bfloat16, "none", ignored, "every rank")
    finally:
        vocabulary.BLOCK_ELEMENTS = before


@pytest.mark.parametrize("rows", [1, 7, TOKENS - 1])
def test_logits_taken_in_blocks_are_all_taken(world_of, rows):
    """One row, some that do not divide the tokens, and a last block of one row."""
    for found, expected, gradient, whole in world_of(2).run(in_blocks, rows * VOCABULARY // 2, "some ignored"):
        assert gpt.relative_error(found, expected) < CLOSE
        assert gpt.relative_error(gradient, whole) < 2**-8


def ignoring(index, reduction):
    """A number of the vocabulary, such as that of a padding token, and targets of -100 nowhere."""
    rank, n = dist.get_rank(), dist.get_world_size()
    logits, targets = logits_and_targets(torch.float32, "every rank")
    targets[:10] = index
    whole, mine = logits.clone().requires_grad_(), logits.chunk(n, 1)[rank].clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, ignore_index=index, reduction=reduction)
    found = vocab_parallel_cross_entropy(mine, targets, ignore_index=index, reduction=reduction)
    expected.sum().backward()
    found.sum().backward()
    return gpt.relative_error(found, expected), gpt.relative_error(mine.grad, whole.grad.chunk(n, 1)[rank])


@pytest.mark.parametrize("index", [0, VOCABULARY - 1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_any_number_can_be_the_one_that_is_ignored(world_of, index, reduction):
    for errors in world_of(2).run(ignoring, index, reduction):
        assert max(errors) < CLOSE
