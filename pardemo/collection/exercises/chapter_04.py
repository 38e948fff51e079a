"""Checkers of notebook 04."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.collection.exercises import Mistake, call, fresh_seed
from pardemo.formulas import communication
from pardemo.formulas import tensor_parallel as formulas
from pardemo.meters import WireMeter
from pardemo.peers import gpt
from pardemo.world import World

RANKS = 2
TIMEOUT_S = 30
TOKENS, VOCABULARY = 16384, 64


def check_qkv_rows(function: Callable[[torch.Tensor, int, int, int], torch.Tensor]) -> str:
    """``function(weight, heads, rank, ranks)`` is the rank's third of each third."""
    for heads, ranks in ((4, 2), (8, 4), (6, 1)):
        weight = torch.arange(3.0 * heads * 2)[:, None].expand(-1, heads * 2).contiguous()  # row i holds i; heads of 2
        for rank in range(ranks):
            expected = torch.cat([third.chunk(ranks, 0)[rank] for third in weight.chunk(3, 0)])
            found = call(function, weight.clone(), heads, rank, ranks)
            if not isinstance(found, torch.Tensor) or found.dim() != 2:
                got = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
                raise Mistake(f"It returned {got}; it should return rows of the weight.")
            if found.shape == expected.shape and torch.equal(found, expected):
                continue
            if found.shape == expected.shape and torch.equal(found, weight.chunk(ranks, 0)[rank]):
                raise Mistake(
                    f"That is the matrix in {ranks} equal pieces: with {heads} heads rank 0 gets queries whose keys "
                    "are elsewhere. Cut query, key and value each."
                )
            if found.shape == expected.shape and torch.equal(found.sort(0).values, expected.sort(0).values):
                raise Mistake("The right rows in another order: query first, then key, then value.")
            raise Mistake(
                f"For rank {rank} of {ranks} with {heads} heads, rows {expected[:, 0].int().tolist()} are needed, "
                f"not {found[:24, :1].flatten().int().tolist()}."
            )
    return "Each rank has whole heads: their queries, their keys, their values."


def check_vocabulary_loss(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    """``function(logits, targets)`` is each token's cross-entropy for 3 numbers per token, without overflow."""
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        results = world.run(_try_loss, function, fresh_seed())
    for rank, (problem, _) in enumerate(results):
        if problem:
            raise Mistake(f"On rank {rank} {problem}")
    numbers = max(sent for _, sent in results) / communication.ring_all_reduce(4 * TOKENS, RANKS).sent
    best = formulas.loss_elements(1)
    if numbers > best * 1.1:
        hint = "the logits themselves travel." if numbers > VOCABULARY / 4 else "is one not needed, or sent in fp64?"
        raise Mistake(f"Right, but {numbers:.1f} fp32 numbers per token are all-reduced, {best} are enough: {hint}")
    return f"Right, with {numbers:.1f} numbers per token instead of {VOCABULARY}, and large logits do not overflow."


def _try_loss(function: Callable, seed: int) -> tuple[str, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = gpt.numbers(TOKENS, VOCABULARY, seed=seed)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    expected = F.cross_entropy(whole, targets, reduction="none")
    mine = whole.chunk(size, 1)[rank].contiguous()
    dist.barrier()
    with WireMeter() as wire:
        found = function(mine.clone(), targets.clone())
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        return f"it should return one loss per token, shape {tuple(expected.shape)}, not {got}.", 0
    found = found.detach().to(expected.dtype)
    if not torch.allclose(found, expected, atol=1e-4):
        local = F.cross_entropy(mine, (targets - rank * mine.shape[1]).clamp(0, mine.shape[1] - 1), reduction="none")
        if torch.allclose(found, local, atol=1e-4):
            return "that is the loss over this rank's part of the vocabulary alone.", 0
        if torch.allclose(found, -expected, atol=1e-4):
            return "the sign is turned round: log Σexp minus the target's logit.", 0
        return "the losses are not those of the whole vocabulary.", 0
    large = function(1000 + mine, targets)
    if not torch.allclose(large.to(expected.dtype), expected, atol=1e-2):
        return "logits around 1000 overflow exp: subtract the largest logit of all ranks first.", 0
    return "", wire.sent_bytes
