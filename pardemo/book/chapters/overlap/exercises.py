"""The exercises of this chapter, and what checks an answer to each."""

import random
from collections.abc import Callable

import torch
import torch.distributed as dist

from pardemo import compat
from pardemo.book.page.exercises import Mistake, call, compare_tensors, exercise, fresh_seed, on_ranks
from pardemo.formulas import overlap as formulas
from pardemo.small_models import gpt

RANKS = 3
MOST = 64


def check_scatter(function: Callable[[torch.Tensor, Callable], torch.Tensor]) -> str:
    """``function(x, multiply)`` is this rank's tokens of the sum over the ranks, round a ring while it multiplies."""
    for log in on_ranks(RANKS, _try_scatter, function, fresh_seed()):
        sizes = [event for event in log if isinstance(event, int)]
        begun, hidden = log.count("isend"), _hidden(log)
        if sizes != [2] * RANKS:
            raise Mistake(f"multiply should see each of the {RANKS} chunks once; it saw {sizes} tokens.")
        if begun != RANKS - 1:
            raise Mistake(f"The sums are right, but a rank began {begun} messages with dist.isend, not {RANKS - 1}.")
        if hidden < RANKS - 1:
            raise Mistake(
                f"The sums are right, but only {hidden} of {RANKS - 1} hops travel beside a multiplication: begin a "
                "hop, multiply the next chunk, and wait only then."
            )
    return f"Right: {RANKS - 1} hops, and each travels while a chunk is multiplied."


class _Begun:
    """A message that has begun: notes when it is waited for."""

    def __init__(self, work, log: list):
        self._work, self._log = work, log

    def wait(self, *arguments):
        self._log.append("wait")
        return self._work.wait(*arguments)

    def __getattr__(self, name: str):
        return getattr(self._work, name)


def _try_scatter(function: Callable, seed: int) -> str | list[str | int]:
    """What the answer did: ``isend``, ``irecv``, ``wait``, and of each multiplication how many tokens it had."""
    rank = dist.get_rank()
    xs = [gpt.numbers(2 * RANKS, 4, seed=seed + 2 * owner) for owner in range(RANKS)]
    weights = [gpt.numbers(4, 5, seed=seed + 2 * owner + 1) for owner in range(RANKS)]
    log: list[str | int] = []

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        log.append(len(rows))
        return rows @ weights[rank]

    def noting(name: str) -> Callable:
        plain = getattr(dist, name)

        def begin(*arguments, **named):
            log.append(name)
            return _Begun(plain(*arguments, **named), log)

        return begin

    with compat.replaced(dist, "isend", noting("isend")), compat.replaced(dist, "irecv", noting("irecv")):
        result = function(xs[rank].clone(), multiply)
    total = sum(x @ w for x, w in zip(xs, weights, strict=True))
    if isinstance(result, torch.Tensor) and result.shape == total.shape:
        return "this is the sum for all tokens; each rank keeps only its own chunk of them."
    chunks = total.chunk(RANKS)
    mistakes = [(chunk, f"this is rank {owner}'s chunk of the sum.") for owner, chunk in enumerate(chunks)]
    return compare_tensors(result, chunks[rank], mistakes, "these are not the sums over the ranks", atol=1e-4) or log


def _hidden(log: list[str | int]) -> int:
    """How many multiplications stand between a message's begin and the next wait."""
    under_way, hidden = False, 0
    for event in log:
        if event in ("isend", "wait"):
            under_way = event == "isend"
        elif event != "irecv":
            hidden += under_way
    return hidden


def check_pieces(function: Callable[[float, float, float], int]) -> str:
    """``function(computing_s, sending_s, start_s)`` is the number of equal pieces, up to 64, that is quickest."""
    draw = random.Random(fresh_seed())
    # The last: where a message costs much to start, cutting does not pay at all.
    cases = [(0.16, 0.12, 0.0075), (0.1, 0.3, 0.002), (0.3, 0.1, 0.004), (0.01, 0.005, 0.02)]
    cases += [(draw.uniform(0.05, 0.4), draw.uniform(0.05, 0.4), draw.uniform(0.003, 0.01)) for _ in range(3)]
    for computing, sending, start in cases:
        answer = call(function, computing, sending, start)
        where = f"For {computing:.3f} s of computing, {sending:.3f} s of sending and {start:.4f} s for each start"
        if isinstance(answer, bool) or not isinstance(answer, int) or not 1 <= answer <= MOST:
            raise Mistake(f"{where} it returned {answer!r}; a whole number from 1 to {MOST} is asked for.")
        best = formulas.best_pieces(computing, sending, start, MOST)
        took, could = (formulas.pieces_s(computing, sending, start, pieces) for pieces in (answer, best))
        if took <= 1.001 * could:  # as good as the best
            continue
        if answer == MOST:
            hint = "each piece pays for a start, and the starts alone take longer than the computation"
        elif answer == 1:
            hint = "in one piece nothing hides"
        elif answer > best:
            hint = "so many starts make the messages longer than the computation beside them"
        else:
            hint = "with so few pieces the last message is long, and it never hides"
        raise Mistake(f"{where}, {answer} pieces take {1e3 * took:.1f} ms and {best} take {1e3 * could:.1f}: {hint}.")
    return "Right: more pieces hide more, until the starts take longer than the computation."


@exercise("scatter")
def my_scatter(x, multiply):
    """A rank's own chunk is the last that it multiplies, since its sum ends here. Whose chunk has the longest way,
    and is therefore the first?"""
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


@exercise("pieces")
def my_pieces(computing_s, sending_s, start_s):
    """With equal pieces the first one computes alone, the last one sends alone, and between them the longer of the
    two sets the pace."""

    def seconds(pieces):
        compute, send = computing_s / pieces, sending_s / pieces + start_s
        # the first piece only computes, the last one only sends
        return compute + (pieces - 1) * max(compute, send) + send

    return min(range(1, 65), key=seconds)
