"""One way to solve each exercise of this chapter."""

from pardemo import pipeline_parallel as pp


def my_order(rank, ranks, micro_batches, most):
    # A rank holds one more than it is ahead. Rank 0 of four would be 3 ahead; with
    # memory for two it can be ahead by one only, and waits a little longer.
    ahead = min(ranks - 1 - rank, most - 1, micro_batches)
    for k in range(ahead):
        yield pp.Forward(rank, k)
    for k in range(ahead, micro_batches):
        yield pp.Forward(rank, k)
        yield pp.Backward(rank, k - ahead)
    for k in range(micro_batches - ahead, micro_batches):
        yield pp.Backward(rank, k)


def my_micro_batches(stages, share):
    # A rank works for m units and waits for stages − 1. To try one m after the other
    # is slower than a formula, and cannot be rounded the wrong way.
    m = 1
    while (stages - 1) / (m + stages - 1) > share:
        m += 1
    return m


def my_idle(spans):
    # Not from a rank's own first computation: it may begin late, and has to wait
    # before it. And not by adding up: two of a pair run at the same time.
    first = min(begin for _, begin, _ in spans)
    last = max(end for _, _, end in spans)
    idle = []
    for rank in sorted({rank for rank, _, _ in spans}):
        waited, until = 0, first
        for begin, end in sorted(span[1:] for span in spans if span[0] == rank):
            waited += max(0, begin - until)
            until = max(until, end)
        idle.append(waited + last - until)
    return idle
