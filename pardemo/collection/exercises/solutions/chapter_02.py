"""Solutions of notebook 02."""

from pardemo import pipeline_parallel as pp


def my_1f1b(rank, ranks, micro_batches):
    # As many ahead as there are stages after this one; the last has none, and can
    # go back at once.
    ahead = min(ranks - 1 - rank, micro_batches)
    for k in range(ahead):
        yield pp.Forward(rank, k)
    for k in range(micro_batches - ahead):
        yield pp.Forward(rank, ahead + k)
        yield pp.Backward(rank, k)
    for k in range(micro_batches - ahead, micro_batches):
        yield pp.Backward(rank, k)


def my_micro_batches(stages, share):
    # A rank works for m units and waits for stages − 1. To try one m after the other
    # is slower than a formula, and cannot be rounded the wrong way.
    m = 1
    while (stages - 1) / (m + stages - 1) > share:
        m += 1
    return m
