"""Chooses the parameter that shows a finding best, and says which part of it each rank holds."""

from collections.abc import Mapping
from dataclasses import dataclass

from pardemo.script.compare.comparison import LayoutComparison, holders_of
from pardemo.script.compare.differences import Finding
from pardemo.script.compare.reference import Reference
from pardemo.script.compare.runs import Run

#: By what a finding is about: the tensors of a parameter that show it. ``after`` is its change in the step.
SHOWN_BY = {
    "data": "gradient", "forward": "gradient", "gradients": "gradient", "parameters": "before", "clipping": "after",
    "learning rate": "after", "parameters after the step": "after",
}  # fmt: skip


@dataclass(frozen=True)
class HeldPart:
    """The part of a parameter that a rank holds: its name there, and of each axis its places, None for all of them."""

    name: str
    places: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """A parameter whose ``tensor``, a value of :data:`SHOWN_BY`, differs from the reference's in a step, from 1 on.

    ``parts``: which part of it each rank holds. ``off``: the largest difference, relative to the reference's.
    ``clips``: whether gradients are clipped behind it.
    """

    parameter: str
    tensor: str
    step: int
    parts: Mapping[int, HeldPart]
    off: float
    clips: bool = False


def evidence_of(finding: Finding, reference: Reference, other: Run, comparison: LayoutComparison) -> Evidence | None:
    """Returns what shows a finding best: of its parameters, or of all, the one that is farthest off.

    None where no parameter shows it, as of a loss that is printed, or where parameters were compared by sketches.
    """
    tensor, step = SHOWN_BY.get(finding.what, ""), finding.step - 1
    if not tensor or step >= min(reference.run.steps, other.steps):
        return None
    whole = reference.whole[step]
    wanted = {"gradient": whole.gradients, "before": whole.before, "after": whole.after}[tensor]
    farthest: tuple[float, str] = (0.0, "")
    for name, holders in holders_of(other, step, tensor, comparison.maps).items():
        asked = name in wanted and (not finding.parameters or name in finding.parameters)
        if not asked or not _held_parts(name, comparison):
            continue
        scale = wanted[name] - whole.before[name] if tensor == "after" else wanted[name]
        for _, part, candidate in holders:
            expected = part.cut_from(wanted[name], tuple(candidate.shape))
            off = float((candidate.double() - expected.double()).norm()) / (float(scale.double().norm()) or 1.0)
            farthest = max(farthest, (off, name))
    off, name = farthest
    clips = any(record.steps[step].clips for run in (reference.run, other) for record in run.records)
    return Evidence(name, tensor, finding.step, _held_parts(name, comparison), off, clips) if name else None


def _held_parts(name: str, comparison: LayoutComparison) -> dict[int, HeldPart]:
    """Returns which part of a parameter each rank holds; without ranks where it is a part of a fused one."""
    parts = {}
    for rank, pieces in comparison.maps.parts.items():
        fused = {strip.name_in(piece) for piece, strips in comparison.maps.strips[rank].items() for strip in strips}
        for piece, part in pieces.items():
            if part.name == name and piece not in fused:
                places = (None if index is None else tuple(index.tolist()) for index in part.index)
                parts[rank] = HeldPart(piece, tuple(places))
    return parts
