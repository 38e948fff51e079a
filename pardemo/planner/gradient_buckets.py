"""What DeepSpeed's stage 0 sums over the ranks at a time: gradients until they are 500 million, wherever a layer ends.

These buckets go by elements and not by layers, so that their sizes are computed. The dry runs of few layers have to
have exactly those that are computed for them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pardemo.planner.footprint import LINES, Footprint
from pardemo.planner.job import RankJob
from pardemo.planner.repeats import Irregular

BYTES = 2  # of a gradient
ELEMENTS = 500_000_000  # DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
#: How the first event of a row of buckets looks, which stands for all of them.
LOOK = ("sums",)


@dataclass
class Sums:
    """``elements`` of the buckets of one exchange; ``places`` (first event, behind the last) of each exchange.

    ``kernels`` of one bucket besides those of its parameters. ``alone`` are buckets of one parameter, which need no
    tensor of their own.
    """

    elements: list[int]
    places: list[tuple[int, int]]
    kernels: int = 0
    alone: int = 0


def found(run: Footprint) -> Sums:
    """In a dry run: tensors that come and go at once, one after the other, in a backward pass.

    Raises:
        Irregular: other ones than are computed.
    """
    if run.job.engine != "zero-0":
        return Sums([], [])
    who, nbytes = run.changes.T.tolist()
    bucket = LINES.index("buckets")
    starts = [n for n in range(len(who) - 1) if _is_sum(run, n, who, nbytes, bucket)]
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
    return Sums(expected, [(row[0], row[-1] + 2) for row in rows], each.pop(), alone)


def _is_sum(run: Footprint, n: int, who: list[int], nbytes: list[int], bucket: int) -> bool:
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


def of(job: RankJob, sizes: Mapping[str, tuple[int, bool]], seen: Iterable[Sums]) -> list[int]:
    """Elements of each bucket of a model with such parameters."""
    if job.engine != "zero-0":
        return []
    groups, alone = _groups(sizes)
    if any(one.alone != alone for one in seen):
        raise Irregular("another number of buckets of one parameter")
    return [sum(counts) for counts in groups]


def kernels(
    affine: Mapping[str, tuple[int, int]], seen: list[Sums], buckets: int, more: int
) -> dict[str, tuple[int, int]]:
    """Kernels by phase: those of buckets by how many there are, whatever the number of layers makes of it."""
    few, many = seen
    told = len(many.elements) + more * (len(many.elements) - len(few.elements))
    count, of_each = affine["backward"]
    return {**affine, "backward": (count + many.kernels * (buckets - told), of_each)}
