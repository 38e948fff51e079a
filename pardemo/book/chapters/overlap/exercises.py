"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import Exercise, Mistake, call, fresh_seed
from pardemo.formulas import overlap as formulas
from pardemo.small_models import gpt
from pardemo.world import World

EXERCISES = {
    "scatter": Exercise(
        "my_scatter",
        "A rank's own chunk is the last that it multiplies, since its sum ends here. Whose chunk has the longest way, "
        "and is therefore the first?",
    ),
    "pieces": Exercise(
        "my_pieces",
        "With equal pieces the first one computes alone, the last one sends alone, and between them the longer of "
        "the two sets the pace.",
    ),
}

TIMEOUT_S = 30
RANKS = 3
MOST = 64
NEAR = 1.001  # as good as the best
RIGHT_BUT = "the sums are right"


def check_scatter(function: Callable[[torch.Tensor, Callable], torch.Tensor]) -> str:
    """``function(x, multiply)`` is this rank's tokens of the sum over the ranks, in a ring beside the products."""
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        problems = world.run(_try_scatter, function, fresh_seed())
    wrong = [(problem.startswith(RIGHT_BUT), rank, problem) for rank, problem in enumerate(problems) if problem]
    if wrong:  # wrong sums on any rank come before how right ones were sent
        _, rank, problem = min(wrong)
        raise Mistake(f"On rank {rank} {problem}")
    return f"Right: {RANKS - 1} hops, and each travels while a chunk is multiplied."


class _Begun:
    """A message that has begun: notes when it is waited for."""

    def __init__(self, work, log: list[str]):
        self._work, self._log = work, log

    def wait(self, *arguments):
        self._log.append("wait")
        return self._work.wait(*arguments)

    def __getattr__(self, name: str):
        return getattr(self._work, name)


def _try_scatter(function: Callable, seed: int) -> str:
    """What is wrong with an answer on this rank; "" where nothing is."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = 2 * ranks
    xs = [gpt.numbers(tokens, 4, seed=seed + 2 * owner) for owner in range(ranks)]
    weights = [gpt.numbers(4, 5, seed=seed + 2 * owner + 1) for owner in range(ranks)]
    log: list[str] = []
    sizes: list[int] = []

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        log.append("multiply")
        sizes.append(len(rows))
        return rows @ weights[rank]

    plain = {name: getattr(dist, name) for name in ("isend", "irecv")}

    def noting(name: str) -> Callable:
        def begin(*arguments, **named):
            log.append(name)
            return _Begun(plain[name](*arguments, **named), log)

        return begin

    for name in plain:
        setattr(dist, name, noting(name))
    try:
        result = function(xs[rank].clone(), multiply)
    finally:
        for name, original in plain.items():
            setattr(dist, name, original)
    return _judged(result, sum(x @ w for x, w in zip(xs, weights, strict=True)), sizes, log)


def _judged(result: object, whole: torch.Tensor, sizes: list[int], log: list[str]) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    each = len(whole) // ranks
    if not isinstance(result, torch.Tensor):
        return f"it should return a tensor, not {type(result).__name__}."
    if result.shape == whole.shape:
        return "this is the sum for all tokens; each rank keeps only its own chunk of them."
    if result.shape != whole[:each].shape:
        return f"the shape should be {tuple(whole[:each].shape)}, not {tuple(result.shape)}."
    chunks = whole.chunk(ranks)
    if not torch.allclose(result, chunks[rank], atol=1e-4):
        others = [owner for owner in range(ranks) if torch.allclose(result, chunks[owner], atol=1e-4)]
        return f"this is rank {others[0]}'s chunk of the sum." if others else "these are not the sums over the ranks."
    if sizes != [each] * ranks:
        return f"multiply should see each of the {ranks} chunks once; it saw {sizes} tokens."
    if log.count("isend") != ranks - 1:
        return f"{RIGHT_BUT}, but it began {log.count('isend')} messages with dist.isend, not {ranks - 1}."
    if _hidden(log) < ranks - 1:
        return (
            f"{RIGHT_BUT}, but only {_hidden(log)} of {ranks - 1} hops travel beside a product: begin a hop, "
            "multiply the next chunk, and wait only then."
        )
    return ""


def _hidden(log: list[str]) -> int:
    """How many products stand between a message's begin and the next wait."""
    under_way, hidden = False, 0
    for event in log:
        if event == "isend":
            under_way = True
        elif event == "wait":
            under_way = False
        elif event == "multiply" and under_way:
            hidden += 1
    return hidden


def check_pieces(function: Callable[[float, float, float], int]) -> str:
    """``function(computing_s, sending_s, start_s)`` is the number of equal pieces, up to 64, that is quickest."""
    draw = random.Random(fresh_seed())
    # The last: where a message costs much to start, cutting does not pay at all.
    cases = [(0.16, 0.12, 0.0075), (0.1, 0.3, 0.002), (0.3, 0.1, 0.004), (0.01, 0.005, 0.02)]
    cases += [(draw.uniform(0.05, 0.4), draw.uniform(0.05, 0.4), draw.uniform(0.003, 0.01)) for _ in range(3)]
    for case in cases:
        _check_pieces(call(function, *case), *case)
    return "Right: more pieces hide more, until the starts take longer than the computation."


def _check_pieces(answer: object, computing: float, sending: float, start: float) -> None:
    where = f"For {computing:.3f} s of computing, {sending:.3f} s of sending and {start:.4f} s for each start"
    if isinstance(answer, bool) or not isinstance(answer, int):
        raise Mistake(f"{where} it returned {type(answer).__name__}, not a whole number.")
    if not 1 <= answer <= MOST:
        raise Mistake(f"{where} it returned {answer}; a number of pieces from 1 to {MOST} was asked for.")
    best = formulas.best_pieces(computing, sending, start, MOST)
    took, could = (formulas.pieces_s(computing, sending, start, pieces) for pieces in (answer, best))
    if took <= NEAR * could:
        return
    if answer == MOST:
        hint = "each piece pays for a start, and the starts alone take longer than the computation"
    elif answer == 1:
        hint = "in one piece nothing hides"
    elif answer > best:
        hint = "so many starts make the messages longer than the computation beside them"
    else:
        hint = "with so few pieces the last message is long, and it never hides"
    raise Mistake(f"{where}, {answer} pieces take {1e3 * took:.1f} ms and {best} take {1e3 * could:.1f}: {hint}.")


def my_scatter(x, multiply):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(ranks)
    total = multiply(chunks[(rank - 1) % ranks])  # the chunk with the longest way home
    for hop in range(2, ranks + 1):
        arriving = torch.empty_like(total)
        waits = dist.irecv(arriving, (rank - 1) % ranks), dist.isend(total, (rank + 1) % ranks)
        part = multiply(chunks[(rank - hop) % ranks])  # while the sums travel
        for wait in waits:
            wait.wait()
        total = arriving + part
    return total


def my_pieces(computing_s, sending_s, start_s):
    def seconds(pieces):
        compute, send = computing_s / pieces, sending_s / pieces + start_s
        # the first piece only computes, the last one only sends
        return compute + (pieces - 1) * max(compute, send) + send

    return min(range(1, 65), key=seconds)
