"""A proof: all layouts run, each held against the first; whether they train alike, and where not."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pardemo.prove import causes, compare, large, runner
from pardemo.prove.facts import Finding
from pardemo.prove.layouts import Layout
from pardemo.prove.model_map import Map
from pardemo.prove.record import sketch
from pardemo.prove.record.rounding import SHORT
from pardemo.prove.reference import Reference, noise_between
from pardemo.prove.runner import Options, ProveError, Run
from pardemo.prove.unexplained import Kept


@dataclass
class Proof:
    """What came out.

    ``failed``: layouts that could not be run or compared, with one line each; ``details``: their ranks' tracebacks.
    ``maps``: of each layout its modules in the last step compared. ``kept``: tensors of findings that nobody explains;
    ``files``: where they were written, in the folder of ``--out``. ``asked``: how many steps were to be compared.
    ``rounded``: short types in which the reference computes, by whose rounding tolerances were found.
    """

    layouts: list[Layout]
    findings: list[Finding] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    parameters: int = 0
    modules: list[str] = field(default_factory=list)
    tolerance: float = 0.0
    maps: dict[str, Map] = field(default_factory=dict)
    kept: dict[Finding, Kept] = field(default_factory=dict)
    files: dict[Finding, str] = field(default_factory=dict)
    asked: int = 0
    rounded: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether all layouts were run, and train as the reference does."""
        return not self.findings and not self.failed

    def __str__(self) -> str:
        from pardemo.prove.text import screen

        return screen(self)

    def as_json(self) -> dict[str, Any]:
        """As ``pardemo prove --json`` prints it."""
        return {
            "equal": self.equal,
            "layouts": [
                {"layout": one.name, "ranks": one.ranks, "line": " ".join(one.line), "error": self.failed.get(one.name),
                 "equal": one.name not in self.failed and not any(f.layout == one.name for f in self.findings)}
                for one in self.layouts
            ],
            "findings": [
                plain(asdict(finding)) | {"tensors": self.files.get(finding)} for finding in self.findings
            ],
            "steps": self.steps, "asked": self.asked, "parameters": self.parameters, "tolerance": self.tolerance,
            "notes": self.notes,
        }  # fmt: skip


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """No infinities and no tuples, which JSON has not."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else list(value) if isinstance(value, tuple)
        else value for key, value in row.items()
    }  # fmt: skip


def scripts(layouts: Sequence[Layout], options: Options) -> Proof:
    """Runs a script in each layout, and holds all against the first.

    Raises:
        ProveError: the reference could not be run, took no step, or is not the same twice.
    """
    folder = runner.scratch()
    try:
        return _proof(layouts, options, folder)
    finally:
        runner.remove(folder)


def _proof(layouts: Sequence[Layout], options: Options, folder: str) -> Proof:
    reference, again, options = runner.reference(layouts[0], options, folder)
    tolerance = compare.tolerance_of(reference, options.double)
    hashed(reference)
    deterministic(reference, again, tolerance, options.sketched)
    truth = Reference(reference, tolerance)
    _trains(truth)
    short = _short_types(reference)
    if short:
        rounded = runner.ran(layouts[0], replace(options, rounded=True), Path(folder, "rounded"))
        runner.must(rounded)
        truth.noise = noise_between(truth, rounded)
    made = Proof(list(layouts), steps=reference.steps, asked=options.steps, tolerance=tolerance)
    made.parameters = len(truth.whole[0].before)
    made.modules = sorted(truth.order[0], key=truth.order[0].__getitem__)
    made.rounded = short
    made.notes += reference.records[0].notes
    if options.sketched:
        made.notes.append(f"{runner.elements(reference):,} elements: parameters are compared by sketches")
    left_open: dict[str, causes.Open] = {}
    for number, layout in enumerate(layouts[1:], 1):
        place = Path(folder, str(number))
        try:
            compared = _compared(truth, runner.ran(layout, options, place), options, place)
        except ProveError as error:
            made.failed[layout.name], made.details[layout.name] = str(error), error.details
            continue
        finally:
            runner.remove(str(place))
        if compared.unmatched and (compared.strange or not compared.findings):
            made.failed[layout.name] = compared.unmatched
            continue
        if compared.in_part and not compared.findings:
            made.failed[layout.name] = compared.in_part
        if compared.unmatched:
            made.notes.append(f"{layout.name}: {compared.unmatched}")
        made.findings += compared.findings
        made.kept |= compared.kept
        if compared.model is not None:
            made.maps[layout.name] = compared.model
        if compared.left_open:
            left_open[layout.name] = compared.left_open
        made.notes += [note for note in compared.notes if note not in made.notes]
    made.findings = causes.across(made.findings, left_open, layouts[1:], tuple(made.failed))
    made.kept = {
        finding: kept for finding, kept in made.kept.items() if finding in made.findings
    }  # others have a cause
    return made


def _compared(truth: Reference, other: Run, options: Options, place: Path) -> compare.Compared:
    """One layout beside the reference.

    Raises:
        ProveError: it could not be run, or not be compared.
    """
    if other.error:
        raise ProveError(other.error, other.details)
    if not other.steps:
        raise ProveError(f"{other.layout.name} took no step of an optimizer after a backward pass")
    hashed(other)
    compared = compare.layout(truth, other)
    compared.in_part = _in_part(truth.run, other)
    if options.sketched and (compared.findings or compared.unmatched):
        compared = large.in_full(
            truth, other, compared, options, place / "full", lambda run: Reference(run, truth.tolerance, truth.noise)
        )
    return compared


def _short_types(run: Run) -> list[str]:
    """Types of few bits that the script computes in or keeps parameters in."""
    return sorted({name for record in run.records for name in (*record.computed_in, *record.dtypes)} & SHORT.keys())


def _trains(truth: Reference) -> None:
    """Where nothing has a gradient, no layout could part from it."""
    gradients = [tensor for whole in truth.whole for tensor in whole.gradients.values()]
    if gradients and not any(bool(tensor.any()) for tensor in gradients):  # some engines show none
        raise ProveError(
            f"the reference, {truth.run.layout.name}, does not train: its gradients are zero in "
            f"{counted(truth.run.steps, 'step')}; look at what the loss is computed from"
        )


def _in_part(reference: Run, other: Run) -> str:
    """What of a layout was not there to be compared, though what was is equal; empty where all was."""
    steps = [min((len(record.steps) for record in run.records), default=0) for run in (reference, other)]
    if other.steps < reference.steps and steps[1] < steps[0]:
        return (
            f"it ended after {counted(other.steps, 'step')} of {reference.steps}: these are equal, and what would have "
            "come is not known"
        )
    if other.layout.ranks > 1 and all(record.alone for record in other.records):
        return (
            f"no collective is called: each of the {other.layout.ranks} ranks trains by itself, as if it were the only "
            "one; the script needs torch.distributed.init_process_group, and gradients that are summed"
        )
    return ""


def counted(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def hashed(run: Run) -> None:
    """What the model is called with has to be seen, or nobody knows which samples a rank had."""
    kinds = {kind for record in run.records for micro in record.steps[0].micro_batches for kind in micro.unseen}
    if kinds:
        raise ProveError(
            f"the samples of {run.layout.name} cannot be compared: the model is called with "
            f"{', '.join(sorted(kinds))}, of which nothing can be hashed; call it with tensors, in lists, dicts or "
            "dataclasses where you like"
        )


def deterministic(reference: Run, again: Run, tolerance: float, sketched: bool) -> None:
    """Two runs of the reference have to be the same, or nothing could be held against it.

    ``sketched``: whether the first kept sketches of parameters, as the second did.
    """
    name = reference.layout.name
    lines = [line for record in reference.records for line in record.unseeded]
    said = f": {lines[0]} draws without a seed" if lines else ""
    for step in range(min(reference.steps, again.steps)):
        for rank in range(reference.layout.ranks):
            for kind, what in (
                ("before", "parameters"), ("input", "samples"), ("output", "outputs"), ("gradient", "gradients"),
            ):  # fmt: skip
                first, second = reference.tensors(step, rank, kind), again.tensors(step, rank, kind)
                if kind in ("before", "gradient") and not sketched:
                    first = {name: sketch.of_parameter(tensor) for name, tensor in first.items()}
                if first.keys() != second.keys() or any(not alike(first[n], second[n], tolerance) for n in first):
                    raise ProveError(
                        f"the script is not the same twice: two runs of {name} have different {what} in step "
                        f"{step + 1}{said}; seed all that it draws from, and compare again"
                    )


def alike(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether tensors are the same to rounding, a part of the second's largest number, and NaN in the same places."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= tolerance * scale).all()) or bool(
        torch.equal(a.isnan(), b.isnan()) and a.isnan().any()
    )
