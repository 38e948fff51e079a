"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.book.page.exercises import Mistake, compare_tensors, exercise, fresh_seed, on_ranks
from pardemo.collectives import ring_all_reduce
from pardemo.formulas import tensor_parallel as formulas
from pardemo.meters import WireMeter
from pardemo.small_models import gpt

RANKS = 2
BATCH, SEQUENCE, HIDDEN = 2, 512, 256


def check_f(function: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """``function(x)`` is x forward, and sums the ranks' gradients backward."""
    on_ranks(RANKS, _try_f, function, fresh_seed())
    return "Nothing forward, the sum of the ranks' gradients backward: that is f."


def _try_f(function: Callable, seed: int) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = (torch.arange(6.0).reshape(2, 3) + rank).requires_grad_()
    with WireMeter() as wire:
        y = function(x)
    if problem := compare_tensors(y, x.detach(), otherwise="forward it should return x as it is"):
        return problem
    if wire.sent_bytes > 1500:  # the meter's barrier alone is below
        return "forward it should send nothing: every rank has the whole x."
    if not y.requires_grad:
        return "the result carries no gradient: return what your Function's apply returns, not a detached copy."
    gradients = [gpt.numbers(2, 3, seed=seed + r) for r in range(size)]
    mine, total = gradients[rank], sum(gradients)
    handed = mine.clone()
    y.backward(handed)
    if not torch.equal(handed, mine):
        return "the gradient that autograd handed over was changed in place; sum a clone of it."
    if x.grad is None:
        return "x got no gradient."
    mistakes = [
        (mine, "x.grad is this rank's gradient alone: backward needs the all-reduce."),
        (total / size, "x.grad is the mean; f sums, since each rank's part of the layer adds its share."),
    ]
    if problem := compare_tensors(x.grad, total, mistakes, "x.grad is not the sum of the ranks' gradients"):
        return problem
    again = x.detach().requires_grad_()
    (again + function(again)).backward(mine)  # as in a block: the residual's gradient is not f's business
    if not torch.allclose(again.grad, mine + total, atol=1e-5):
        return "in x + f(x) the residual's gradient was summed over the ranks, too: only what goes through f is."
    return ""


def check_split(function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    """``function(x, w_1, w_2)`` is gelu(x @ w_1) @ w_2 on every rank; a rank sends 2φ and does half the arithmetic."""
    measured = on_ranks(RANKS, _try_split, function)
    phi = formulas.phi(BATCH, SEQUENCE, HIDDEN, RANKS)
    sent, flops = max(nbytes for nbytes, _ in measured) / phi, max(share for _, share in measured)
    best = formulas.half(backward=False)
    if sent < 0.1 * best:
        raise Mistake(
            "Right, but nothing was sent: every rank computed everything. Take only this rank's part of w_1 and w_2."
        )
    if flops > 0.51:
        raise Mistake(f"Right, but a rank does {flops:.0%} of the arithmetic; with {RANKS} ranks it should be half.")
    if sent < best * 0.98:
        raise Mistake(
            f"Right, but with {sent:.1f}φ the tokens were divided, not the layer: cut w_1 by columns, w_2 by rows."
        )
    if sent > best * 1.02:
        hint = "that is the all-reduce of the inner, four times wider activation" if sent > 7 else "one is enough"
        raise Mistake(
            f"Right, but a rank sends {sent:.1f}φ, and {best}φ is enough: {hint}. Cut w_1 by columns, w_2 by rows."
        )
    return f"Right, with {sent:.2f}φ sent by each rank and half the arithmetic on each."


def _try_split(function: Callable) -> str | tuple[int, float]:
    """Bytes that this rank sent, and the share of the arithmetic that it did."""
    from torch.utils.flop_counter import FlopCounterMode

    rank, size = dist.get_rank(), dist.get_world_size()
    x = gpt.numbers(BATCH, SEQUENCE, HIDDEN)
    w_1 = gpt.numbers(HIDDEN, 4 * HIDDEN, seed=1) / 16
    w_2 = gpt.numbers(4 * HIDDEN, HIDDEN, seed=2) / 32
    dist.barrier()
    with WireMeter() as wire, FlopCounterMode(display=False) as flops:
        result = function(x, w_1, w_2)
    parts = [F.gelu(i @ j) for i, j in zip(x.chunk(size, -1), w_1.chunk(size, 0), strict=True)]
    part = F.gelu(x @ w_1.chunk(size, 1)[rank]) @ w_2.chunk(size, 0)[rank]
    mistakes = [
        (sum(parts) @ w_2, "the GeLUs of the parts were added: GeLU(x + y) is not GeLU(x) + GeLU(y)."),
        (part, "this is this rank's part of the sum alone: the ranks' parts have to be added."),
    ]
    otherwise = "the result is not gelu(x @ w_1) @ w_2"
    if problem := compare_tensors(result, F.gelu(x @ w_1) @ w_2, mistakes, otherwise, atol=1e-4):
        return problem
    expected = 2 * 2 * x.shape[0] * x.shape[1] * w_1.numel()
    return wire.sent_bytes, flops.get_total_flops() / expected


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)  # a view: the same numbers, and a tensor that autograd can follow

    @staticmethod
    def backward(ctx, gradient):
        return ring_all_reduce(gradient.clone())  # the gradient itself belongs to autograd


@exercise("f")
def my_f(x):
    """Every rank has x already, so what is left to do forward? Backward, each rank is handed only its own share of
    the gradient."""
    return SumBackward.apply(x)


@exercise("split")
def my_mlp(x, w_1, w_2):
    """Cut w_1 so that each rank can take the GeLU of its part without asking anybody. Then look at which rows of w_2
    that part meets, and where the ranks' results still have to be added."""
    rank, t = dist.get_rank(), dist.get_world_size()
    w_1 = w_1.chunk(t, dim=1)[rank]  # columns: each inner feature is complete, and GeLU can follow
    w_2 = w_2.chunk(t, dim=0)[rank]  # the rows that meet these features
    return ring_all_reduce(F.gelu(x @ w_1) @ w_2)
