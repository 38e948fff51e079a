"""The exercises of this chapter, and what checks an answer to each."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import Mistake, compare_tensors, exercise, formula, fresh_seed, on_ranks
from pardemo.formulas import memory
from pardemo.meters import CallMeter
from pardemo.small_models import gpt

SHAPES = ((48,), (48,), (16, 3))  # of gradients that a few replicated parameters may have


def check_norm_gradients(function: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> str:
    """``function(gradients)`` is the sum of each gradient over the ranks, by one collective."""
    calls = max(on_ranks(2, _try_gradients, function, fresh_seed()))
    if calls > 1:
        raise Mistake(
            f"Right, in {calls} messages of a few kB each, which cost hardly more than their latency: pack them."
        )
    return "Right, and all of them in one message."


def _try_gradients(function: Callable, seed: int) -> str | int:
    """How many collectives this rank called."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [
        [gpt.numbers(*shape, seed=seed + 9 * owner + r) for owner in range(size)] for r, shape in enumerate(SHAPES)
    ]
    dist.barrier()
    with CallMeter() as calls:
        result = function([part[rank].clone() for part in parts])
    if not isinstance(result, list | tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in result):
        return f"it should return {len(SHAPES)} tensors, not {type(result).__name__}."
    shapes = [tuple(tensor.shape) for tensor in result]
    if shapes != list(SHAPES):
        return f"the shapes should be {list(SHAPES)}, as they came, not {shapes}."
    sums, mine = (torch.cat([g.flatten() for g in ones]) for ones in (map(sum, parts), [p[rank] for p in parts]))
    mistakes = [
        (mine, "these are the parts of this rank's own tokens."),
        (sums / size, "these are means. The ranks have parts of one sum here, and not replicas of it."),
    ]
    returned = torch.cat([tensor.flatten() for tensor in result])
    otherwise = "they are not the sums over the ranks, each in its place"
    return compare_tensors(returned, sums, mistakes, otherwise, atol=1e-4) or sum(calls.counts.values())


@formula(
    [
        (*sizes, *settings)
        for sizes in ((1, 2048, 12_288, 96, 8), (4, 4096, 5120, 40, 4))
        for settings in itertools.product((False, True), repeat=2)
    ],
    "Right: 10 + 24/t without, 34/t with sequence parallelism, and 5as/h over t where the scores are kept.",
    unit="bytes",
    rel=1e-3,
)
def check_activations(batch: int, sequence: int, hidden: int, heads: int, ranks: int, in_sequence: bool, flash: bool):
    """The bytes of activations that a rank keeps of a block."""
    unit, scores = batch * sequence * hidden, 5 * heads * sequence / hidden
    core = 0 if flash else scores
    recomputed = "selective" if flash else "none"
    right = memory.block_activation_bytes(sequence, batch, hidden, heads, ranks, in_sequence, recomputed)
    return right, [
        (unit * (34 + core) / ranks, "norms, dropout and the layers' inputs are whole on every rank there"),
        (unit * (10 + 24 / ranks + core), "heads are cut, so each rank has 1/t of the scores"),
        (right + unit * (scores - core) / ranks, "FlashAttention keeps no scores"),
        (unit * (10 + (24 + core) / ranks), "with sequence parallelism the 10 are cut, too"),
        (unit * (34 + core), "nothing is cut in that: where is t?"),
        (right / 2, "two bytes to a number, and one to a dropout's mask"),
    ]


@exercise("norm_gradients")
def my_sum(gradients):
    """Each rank's gradient comes from its own tokens, and the loss is a sum over all of them. Several small tensors
    become one if you flatten them and lay them side by side."""
    packed = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(packed)  # one message; several small ones would each cost a latency
    parts = packed.split([gradient.numel() for gradient in gradients])
    return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]


@exercise("activations")
def my_kept(batch, sequence, hidden, heads, ranks, in_sequence, flash):
    """Which of the 34 lie inside attention and MLP, where each rank has its heads and columns, and which outside?
    Sequence parallelism cuts those, too."""
    unit = batch * sequence * hidden
    core = 0 if flash else 5 * heads * sequence / hidden
    # Norms 4, masks 2, inputs of two layers cut by columns 4: whole, unless tokens are cut.
    outside = 10 / ranks if in_sequence else 10
    return unit * (outside + (24 + core) / ranks)
