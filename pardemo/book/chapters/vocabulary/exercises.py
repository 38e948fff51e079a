"""The exercises of this chapter, and what checks an answer to each."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed
from pardemo.formulas import communication
from pardemo.formulas import tensor_parallel as formulas
from pardemo.meters import CallMeter, WireMeter
from pardemo.small_models import gpt
from pardemo.world import World

EXERCISES = {
    "vocabulary_loss": Exercise(
        "my_loss",
        "The log of a sum of exps, minus the target's own logit, and the largest logit so that exp stays small: which "
        "rank knows how much of each? Two of the three numbers are sums.",
    ),
    "vocabulary_bytes": Exercise(
        "my_bytes",
        "First find the number of rows: the next multiple of 128 times the ranks. Each rank has its share of them, "
        "with weights for each row, and with logits and their gradients for each token.",
    ),
}

TIMEOUT_S = 30
RANKS = 2
TOKENS, VOCABULARY = 16384, 64


def check_vocabulary_loss(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    """``function(logits, targets)`` is each token's cross-entropy for 3 numbers per token, without overflow."""
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        results = world.run(_try_loss, function, fresh_seed())
    for rank, (problem, *_) in enumerate(results):
        if problem:
            raise Mistake(f"On rank {rank} {problem}")
    numbers = max(sent for _, sent, _ in results) / communication.ring_all_reduce(4 * TOKENS, RANKS).sent
    best = formulas.loss_elements(1)
    if numbers > best * 1.1:
        hint = "the logits themselves travel." if numbers > VOCABULARY / 4 else "is one not needed, or sent in fp64?"
        raise Mistake(f"Right, but {numbers:.1f} fp32 numbers per token are all-reduced, {best} are enough: {hint}")
    calls = max(calls for *_, calls in results)
    if calls > 2:
        raise Mistake(f"Right, in {calls} collectives; 2 are enough. Which of the numbers could travel together?")
    return f"Right, with {numbers:.1f} numbers per token instead of {VOCABULARY}, and large logits do not overflow."


def _try_loss(function: Callable, seed: int) -> tuple[str, int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = gpt.numbers(TOKENS, VOCABULARY, seed=seed)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed))
    expected = F.cross_entropy(whole, targets, reduction="none")
    mine = whole.chunk(size, 1)[rank].contiguous()
    dist.barrier()
    with WireMeter() as wire, CallMeter() as calls:
        result = function(mine.clone(), targets.clone())
    if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
        got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        return f"it should return one loss per token, shape {tuple(expected.shape)}, not {got}.", 0, 0
    result = result.detach().to(expected.dtype)
    if not torch.allclose(result, expected, atol=1e-4):
        local = F.cross_entropy(mine, (targets - rank * mine.shape[1]).clamp(0, mine.shape[1] - 1), reduction="none")
        if torch.allclose(result, local, atol=1e-4):
            return "that is the loss over this rank's part of the vocabulary alone.", 0, 0
        if torch.allclose(result, -expected, atol=1e-4):
            return "the sign is turned round: log Σexp minus the target's logit.", 0, 0
        return "the losses are not those of the whole vocabulary.", 0, 0
    large = function(1000 + mine, targets)
    if not torch.allclose(large.to(expected.dtype), expected, atol=1e-2):
        return "logits around 1000 overflow exp: subtract the largest logit of all ranks first.", 0, 0
    return "", wire.sent_bytes, sum(calls.counts.values())


def check_vocabulary_bytes(function: Callable[[int, int, int, int, bool], float]) -> str:
    """``function(words, hidden, tokens, ranks, tied)`` is the bytes of a padded vocabulary on each rank."""
    for words, hidden, tokens, ranks in ((50_257, 768, 8_192, 8), (128_256, 4_096, 4_096, 4)):
        for tied in (False, True):
            _check_bytes(call(function, words, hidden, tokens, ranks, tied), words, hidden, tokens, ranks, tied)
    return "Right: the padded rows over the ranks, 16 bytes for each weight, 8 for each logit."


def _check_bytes(answer: object, words: int, hidden: int, tokens: int, ranks: int, tied: bool) -> None:
    where = f"For {words:,} words, h = {hidden:,}, {tokens:,} tokens, {ranks} ranks, {'tied' if tied else 'not tied'},"
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        raise Mistake(f"{where} it returned {type(answer).__name__}, not a number of bytes.")

    def with_(rows: float, matrices: int = 1 if tied else 2, of_logit: int = 8, logits: float | None = None) -> float:
        return 16 * matrices * rows * hidden + of_logit * tokens * (rows if logits is None else logits)

    rows = math.ceil(words / (128 * ranks)) * 128
    expected = with_(rows)
    if abs(answer - expected) <= 1e-6 * expected:
        return
    for wrong, hint in (
        (with_(words / ranks), "the table is padded, to a multiple of 128 times the ranks"),
        (with_(math.ceil(words / 128) * 128 / ranks), "the 128 is multiplied by the number of ranks"),
        (with_(rows, 2 if tied else 1), "tied is one matrix for both ends, not tied is two"),
        (with_(rows, of_logit=4), "the gradient of the logits is as large as the logits"),
        (with_(rows, logits=rows * ranks), "the logits are cut by words, too"),
        (with_(rows * ranks), "that is the whole vocabulary: each rank has its share"),
    ):
        if abs(answer - wrong) <= 1e-6 * wrong:
            raise Mistake(f"{where} it is {expected:,.0f} bytes, not {answer:,.0f}: {hint}.")
    raise Mistake(f"{where} it is {expected:,.0f} bytes, not {answer:,.0f}.")


def my_loss(logits, targets):
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


def my_bytes(words, hidden, tokens, ranks, tied):
    rows = -(-words // (128 * ranks)) * 128  # padded, then divided among the ranks
    weights = rows * hidden * (1 if tied else 2)
    return 16 * weights + 8 * tokens * rows  # fp32 logits, and their gradient
