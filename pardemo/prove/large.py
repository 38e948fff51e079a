"""Large models: parameters are compared by sketches first, and where a layout parts from the reference, in full."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from pardemo.prove import compare, runner
from pardemo.prove.reference import Reference
from pardemo.prove.runner import Options, Run

#: Elements of the parameters that are recorded in full where a layout parts.
IN_FULL = 50_000_000


def in_full(
    truth: Reference,
    other: Run,
    compared: compare.Compared,
    options: Options,
    folder: Path,
    plain: Callable[[Run], Reference],
) -> compare.Compared:
    """A layout compared by sketches, compared once more with the parameters that part recorded in full.

    Both are run again for it, up to the step in which they part. Where no parameters part, nothing is run. What
    sketches say of a part that does not begin at one of their blocks is not true, and does not come again.

    Args:
        plain: makes of the reference's run what layouts are held against.
    """
    parted = [name for finding in compared.findings for name in finding.parameters]
    unknown = sorted({name for own in compared.maps.unknown.values() for name in own})
    sizes = _sizes(truth.run) | {name: size for name, size in _sizes(other).items() if name in unknown}
    chosen = _chosen([*parted, *compared.maps.sharing(parted), *unknown], sizes)
    if not chosen:
        return compared
    own = {name for parts in compared.maps.parts.values() for name, part in parts.items() if part.name in chosen}
    # parameters that sketches have nothing of may part in any step
    steps = options.steps if compared.unmatched else max(finding.step for finding in compared.findings)
    options = replace(options, steps=steps, in_full=tuple(sorted(compared.maps.whole_names(own) | chosen)))
    again = [runner.ran(run.layout, options, folder / name) for run, name in ((truth.run, "first"), (other, "second"))]
    try:
        if any(run.error or not run.steps for run in again):
            return compared
        made = compare.layout(plain(again[0]), again[1])
    finally:
        runner.remove(str(folder))
    if not made.findings and not chosen.issuperset(parted):  # what parts is past the budget
        return compared
    elements = sum(sizes.get(name, 0) for name in chosen)
    many = f"{len(chosen)} parameter{'s' if len(chosen) > 1 else ''} of {elements:,} elements"
    made.notes.append(f"{other.layout.name}: {many}, compared in full")
    return made


def _chosen(names: Iterable[str], sizes: dict[str, int]) -> set[str]:
    """As many of the names, in their order, as the budget has room for."""
    chosen: set[str] = set()
    left = IN_FULL
    for name in dict.fromkeys(names):
        if 0 < sizes.get(name, 0) <= left:
            left -= sizes[name]
            chosen.add(name)
    return chosen


def _sizes(run: Run) -> dict[str, int]:
    return {
        piece.name: torch.Size(piece.whole or piece.shape).numel()
        for record in run.records
        for piece in record.steps[0].pieces
    }
