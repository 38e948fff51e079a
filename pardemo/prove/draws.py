"""Dropout's masks: equal on ranks where their inputs are, others where they are not, and the same when recomputed."""

from collections import Counter

from pardemo.prove.data import Data
from pardemo.prove.facts import Finding
from pardemo.prove.record.facts import Mask
from pardemo.prove.runner import Run
from pardemo.world.errors import ranks_text

#: A mask of fewer elements may be the same by chance.
LEAST = 32


def findings(other: Run, step: int, data: Data) -> list[Finding]:
    """What is wrong with a step's masks."""
    by_rank = {rank: record.steps[step].masks for rank, record in enumerate(other.records)}
    samples = [[micro.samples for micro in record.steps[step].micro_batches] for record in other.records]
    made = []
    for masks in by_rank.values():
        if finding := _recomputed(other, step, masks):
            made.append(finding)
            break
    forward = {rank: _numbered(masks) for rank, masks in by_rank.items()}
    alike: list[set[int]] = []
    unlike: list[set[int]] = []
    first: dict[str, Mask] = {}
    for rank, own in forward.items():
        for other_rank, its in forward.items():
            if other_rank <= rank:
                continue
            for place, a in own.items():
                b = its.get(place, a)
                if a.elements < LEAST or a.elements != b.elements:
                    continue
                if a.input != b.input and a.dropped == b.dropped:
                    _join(alike, {rank, other_rank})
                    first.setdefault("alike", a)
                elif a.input == b.input and a.dropped != b.dropped and samples[rank] == samples[other_rank]:
                    # replicas may have one input by chance, as memory that a pipeline's first call has not written
                    _join(unlike, {rank, other_rank})
                    first.setdefault("unlike", a)
    if alike:
        made.append(
            Finding(
                other.layout.name, step + 1, "random numbers", "same-random-numbers",
                f"{_groups(alike)} draw the same dropout mask for different inputs, at "
                f"{first['alike'].line}: seed each rank by its own number where its part is its own",
                module=first["alike"].module,
            )
        )  # fmt: skip
    if unlike:
        made.append(
            Finding(
                other.layout.name, step + 1, "random numbers", "different-random-numbers",
                f"{_groups(unlike)} draw different dropout masks for the same input, at "
                f"{first['unlike'].line}: what they hold alike has to be drawn alike",
                module=first["unlike"].module,
            )
        )  # fmt: skip
    return made


def _join(groups: list[set[int]], ranks: set[int]) -> None:
    """Adds ranks that belong together to the groups that they belong to."""
    together = ranks.union(*(group for group in groups if group & ranks))
    groups[:] = [*(group for group in groups if not group & ranks), together]


def _groups(groups: list[set[int]]) -> str:
    """``ranks 0, 1 and ranks 2, 3``: those of a group among themselves."""
    return " and ".join(ranks_text(sorted(group)) for group in sorted(groups, key=min))


def _numbered(masks: list[Mask]) -> dict[tuple[str, int], Mask]:
    """Forward passes' masks by module and how often it drew before."""
    counts: Counter[str] = Counter()
    found = {}
    for mask in masks:
        if not mask.repeated:
            found[mask.module, counts[mask.module]] = mask
            counts[mask.module] += 1
    return found


def _recomputed(other: Run, step: int, masks: list[Mask]) -> Finding | None:
    """A mask that a recomputation draws anew for the same input."""
    for mask in masks:
        if mask.repeated:
            before = [one for one in masks if not one.repeated and one.input == mask.input and one.line == mask.line]
            if before and all(one.dropped != mask.dropped for one in before):
                return Finding(
                    other.layout.name, step + 1, "random numbers", "recomputed-differently",
                    f"the forward pass is computed again with another dropout mask, at {mask.line}: the gradient is "
                    "that of a network which nobody ran",
                    module=mask.module,
                )  # fmt: skip
    return None
