"""The buckets in which DeepSpeed's stage 0 sums gradients: full at 500 million elements, wherever a layer ends.

These buckets go by elements and not by layers, so that their sizes are computed. The dry runs of few layers must have
exactly the buckets that are computed for them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pardemo.planner.footprint import LINES, Footprint
from pardemo.planner.job import RankJob
from pardemo.planner.repeats import Irregular

BYTES = 2  # of a gradient
ELEMENTS = 500_000_000  # DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
#: The look of the first event of a row of buckets, which stands for all of them.
LOOK = ("sums",)


@dataclass
class Buckets:
    """``elements`` of the buckets of one exchange; ``places`` (first event, behind the last) of each exchange.

    ``kernels`` of one bucket besides those of its parameters. ``alone`` are buckets of one parameter, which need no
    tensor of their own.
    """

    elements: list[int]
    places: list[tuple[int, int]]
    kernels: int = 0
    alone: int = 0


def buckets_in(run: Footprint) -> Buckets:
    """The buckets of a dry run: tensors that are made and freed at once, one after the other, in a backward pass.

    Raises:
        Irregular: they are not the computed ones.
    """
    if run.job.engine != "zero-0":
        return Buckets([], [])
    who, nbytes = run.changes.T.tolist()
    bucket = LINES.index("buckets")
    starts = [n for n in range(len(who) - 1) if _is_bucket(run, n, who, nbytes, bucket)]
    rows: list[list[int]] = []
    for n in starts:
        if rows and rows[-1][-1] == n - 2:
            rows[-1].append(n)
        else:
            rows.append([n])
    groups, alone = _groups(run.sizes)
    expected = [sum(counts) for counts in groups]
    if any([nbytes[n] // BYTES for n in row] != expected for row in rows) or not rows:
        raise Irregular("other buckets than DeepSpeed's are known to be")
    each = {run.ticks[n + 1] - run.ticks[n] - len(counts) for n, counts in zip(rows[-1], groups, strict=True)}
    if len(each) != 1:
        raise Irregular("buckets that take different work")
    return Buckets(expected, [(row[0], row[-1] + 2) for row in rows], each.pop(), alone)


def _is_bucket(run: Footprint, n: int, who: list[int], nbytes: list[int], bucket: int) -> bool:
    life = run.lives[who[n]]
    return (
        nbytes[n] > 8 and who[n + 1] == who[n] and nbytes[n + 1] == -nbytes[n] and life.phase == "backward"
        and life.origin == "engine" and run.line_of[who[n]] == bucket
    )  # fmt: skip


def _groups(sizes: Mapping[str, tuple[int, bool]]) -> tuple[list[list[int]], int]:
    """Elements of the parameters of each bucket, in the model's order; how many more have but one parameter."""
    groups: list[list[int]] = [[]]
    for count, trained in sizes.values():
        if trained:
            if sum(groups[-1]) > ELEMENTS:
                groups.append([])
            groups[-1].append(count)
    several = [counts for counts in groups if len(counts) > 1]
    return several, len(groups) - len(several)


def of(job: RankJob, sizes: Mapping[str, tuple[int, bool]], in_runs: Iterable[Buckets]) -> list[int]:
    """Elements of each bucket of a model with such parameters."""
    if job.engine != "zero-0":
        return []
    groups, alone = _groups(sizes)
    if any(buckets.alone != alone for buckets in in_runs):
        raise Irregular("another number of buckets of one parameter")
    return [sum(counts) for counts in groups]


def kernels(
    affine: Mapping[str, tuple[int, int]], in_runs: list[Buckets], buckets: int, more: int
) -> dict[str, tuple[int, int]]:
    """Kernels by phase: those of buckets by how many there are, whatever the number of layers makes of it."""
    few, many = in_runs
    assumed = len(many.elements) + more * (len(many.elements) - len(few.elements))
    count, of_each = affine["backward"]
    return {**affine, "backward": (count + many.kernels * (buckets - assumed), of_each)}
