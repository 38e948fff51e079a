"""The exercises of this chapter, and what checks an answer to each."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.book.page.exercises import Mistake, compare_tensors, exercise, formula, fresh_seed, on_ranks
from pardemo.formulas import communication
from pardemo.formulas import tensor_parallel as formulas
from pardemo.meters import CallMeter, WireMeter
from pardemo.small_models import gpt

RANKS = 2
TOKENS, VOCABULARY = 16384, 64


def check_vocabulary_loss(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    """``function(logits, targets)`` is each token's cross-entropy for 3 numbers per token, without overflow."""
    sent, calls = (max(of_ranks) for of_ranks in zip(*on_ranks(RANKS, _try_loss, function, fresh_seed()), strict=True))
    numbers = sent / communication.ring_all_reduce(4 * TOKENS, RANKS).sent
    best = formulas.loss_elements(1)
    if numbers > best * 1.1:
        hint = "the logits themselves travel." if numbers > VOCABULARY / 4 else "is one not needed, or sent in fp64?"
        raise Mistake(f"Right, but {numbers:.1f} fp32 numbers per token are all-reduced, {best} are enough: {hint}")
    if calls > 2:
        raise Mistake(f"Right, in {calls} collectives; 2 are enough. Which of the numbers could travel together?")
    return f"Right, with {numbers:.1f} numbers per token instead of {VOCABULARY}, and large logits do not overflow."


def _try_loss(function: Callable, seed: int) -> str | tuple[int, int]:
    """Bytes that this rank sent, and how many collectives it called."""
    rank, size = dist.get_rank(), dist.get_world_size()
    logits = gpt.numbers(TOKENS, VOCABULARY, seed=seed)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    right = F.cross_entropy(logits, targets, reduction="none")
    mine = logits.chunk(size, 1)[rank].contiguous()
    dist.barrier()
    with WireMeter() as wire, CallMeter() as calls:
        result = function(mine.clone(), targets.clone())
    local = F.cross_entropy(mine, (targets - rank * mine.shape[1]).clamp(0, mine.shape[1] - 1), reduction="none")
    mistakes = [
        (local, "that is the loss over this rank's part of the vocabulary alone."),
        (-right, "the sign is turned round: log Σexp minus the target's logit."),
    ]
    otherwise = "the losses are not those of the whole vocabulary"
    if problem := compare_tensors(result, right, mistakes, otherwise, atol=1e-4):
        return problem
    if not torch.allclose(function(1000 + mine, targets).to(right.dtype), right, atol=1e-2):
        return "logits around 1000 overflow exp: subtract the largest logit of all ranks first."
    return wire.sent_bytes, sum(calls.counts.values())


@formula(
    [(*sizes, tied) for sizes in ((50_257, 768, 8_192, 8), (128_256, 4_096, 4_096, 4)) for tied in (False, True)],
    "Right: the padded rows over the ranks, 16 bytes for each weight, 8 for each logit.",
    unit="bytes",
)
def check_vocabulary_bytes(words: int, hidden: int, tokens: int, ranks: int, tied: bool):
    """The bytes of a padded vocabulary on each rank."""
    rows = math.ceil(words / (128 * ranks)) * 128
    matrices = 1 if tied else 2
    weights, logits = 16 * matrices * hidden, 8 * tokens  # bytes for each row
    return rows * (weights + logits), [
        (words / ranks * (weights + logits), "the table is padded, to a multiple of 128 times the ranks"),
        (
            math.ceil(words / 128) * 128 / ranks * (weights + logits),
            "the 128 is multiplied by the number of ranks",
        ),
        (
            rows * (16 * (3 - matrices) * hidden + logits),
            "tied is one matrix for both ends, not tied is two",
        ),
        (rows * (weights + logits / 2), "the gradient of the logits is as large as the logits"),
        (rows * (weights + logits * ranks), "the logits are cut by words, too"),
        (rows * ranks * (weights + logits), "that is the whole vocabulary: each rank has its share"),
    ]


@exercise("vocabulary_loss")
def my_loss(logits, targets):
    """The log of a sum of exps, minus the target's own logit, and the largest logit so that exp stays small: which
    rank knows how much of each? Two of the three numbers are sums."""
    words = logits.shape[1]
    largest = logits.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[:, None]  # changes no loss, and exp never sees more than 0

    local = targets - dist.get_rank() * words
    mine = (local >= 0) & (local < words)
    target = logits.gather(1, local.clamp(0, words - 1)[:, None])[:, 0]

    # Who does not have the target adds 0; the sums of exps are added in the same call.
    sums = torch.stack([logits.exp().sum(1), target * mine])
    dist.all_reduce(sums)
    return sums[0].log() - sums[1]


@exercise("vocabulary_bytes")
def my_bytes(words, hidden, tokens, ranks, tied):
    """First find the number of rows: the next multiple of 128 times the ranks. Each rank has its share of them, with
    weights for each row, and with logits and their gradients for each token."""
    rows = -(-words // (128 * ranks)) * 128  # padded, then divided among the ranks
    weights = rows * hidden * (1 if tied else 2)
    return 16 * weights + 8 * tokens * rows  # fp32 logits, and their gradient
