"""Runs the layouts of a search beside their references, and says of each whether it trains alike."""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from pardemo.script.compare import proof, runs
from pardemo.script.compare.differences import Finding
from pardemo.script.compare.reference import Reference
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.compare.runs import ProveError, RunOptions
from pardemo.script.search.axes import LAYOUT, Point, Space, Value
from pardemo.script.search.evidence import Evidence, evidence_of

#: Outcomes of a layout's run. The script refuses it where it raises or exits within its first step.
ALIKE, PARTED, REFUSED, FAILED = "alike", "parted", "refused", "failed"
#: References of which the tensors are kept at a time.
KEPT = 3


class OutOfTime(Exception):
    """Raised when the search's minutes are over before a layout has been compared."""


class SeenFinding(NamedTuple):
    """A finding, the class of its module as ``kind``, and what shows it."""

    finding: Finding
    kind: str
    evidence: Evidence | None


@dataclass
class LayoutVerdict:
    """The result of running a layout beside the reference. ``reason``: in one line, of one that was not compared."""

    point: Point
    layout: RunLayout
    reference: RunLayout
    outcome: str
    reason: str = ""
    findings: list[SeenFinding] = field(default_factory=list)


class _Prepared(NamedTuple):
    reference: Reference
    options: RunOptions
    folder: str


class Verdicts:
    """Runs points of a space, each once; a reference is run twice when the first layout beside it needs it.

    ``until_s``: when the search's minutes are over, by ``time.monotonic``.
    """

    def __init__(self, space: Space, options: RunOptions, folder: Path, until_s: float):
        self.known: dict[tuple[Value, ...], LayoutVerdict] = {}
        self.failed: dict[tuple[Value, ...], str] = {}  # references that could not be run, with the reason
        self._space, self._options, self._folder = space, replace(options, until_s=until_s), folder
        self._references: dict[tuple[Value, ...], _Prepared] = {}

    def verdict(self, point: Point) -> LayoutVerdict:
        """Returns the verdict on a legal point.

        Raises:
            OutOfTime: the minutes are over before it is known.
        """
        key = tuple(point.values())
        if key not in self.known:
            self._require_time()
            self.known[key] = self._run(point)
        return self.known[key]

    def nearest_right(self, point: Mapping[str, Value]) -> RunLayout | None:
        """Returns the layout that trains alike and differs from this one in the fewest values; None where none does."""
        right = [verdict for verdict in self.known.values() if verdict.outcome == ALIKE]
        along = {axis.name for axis in self._space.axes if axis.kind == LAYOUT}

        def distance(verdict: LayoutVerdict) -> tuple[int, int, int]:
            differing = [name for name, value in verdict.point.items() if value != point[name]]
            return sum(name not in along for name in differing), len(differing), -verdict.layout.ranks

        return min(right, key=distance).layout if right else None

    def _run(self, point: Point) -> LayoutVerdict:
        reference_point = self._space.reference_of(point)
        verdict = LayoutVerdict(point, self._space.layout(point), self._space.layout(reference_point), REFUSED)
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder, _output_discarded():
            try:
                reference, options, _ = self._reference(reference_point, verdict.reference)
            except ProveError as error:
                return replace(verdict, reason=str(error))
            run = runs.run_layout(verdict.layout, options, Path(folder))
            if run.timed_out:
                self._require_time()
            refused = run.raised and not any(Path(folder).glob("step*"))
            try:
                compared = proof.compare_run(reference, run, options, Path(folder))
            except ProveError as error:
                refused = refused or not (run.error or run.steps)
                return replace(verdict, outcome=REFUSED if refused else FAILED, reason=str(error))
            if compared.in_part and verdict.layout.ranks > 1 and all(record.alone for record in run.records):
                return replace(verdict, reason=compared.in_part)  # it is no parallel training
            result, _ = proof.result_of(run, compared, options)
            if result.error:
                return replace(verdict, outcome=FAILED, reason=result.error)
            kinds = {row.module: row.kind for row in compared.model.rows} if compared.model else {}
            seen = [
                SeenFinding(finding, kinds.get(finding.module, ""),
                            None if options.sketched else evidence_of(finding, reference, run, compared))
                for finding in result.findings
            ]  # fmt: skip
            return replace(verdict, outcome=PARTED if seen else ALIKE, findings=seen)

    def _reference(self, point: Point, layout: RunLayout) -> _Prepared:
        key = tuple(point.values())
        if key in self.failed:
            raise ProveError(self.failed[key])
        if key not in self._references:
            options, folder = replace(self._options, steps=int(point["steps"])), tempfile.mkdtemp(dir=self._folder)
            try:
                reference, options, _ = proof.prepare_reference(layout, options, Path(folder))
            except ProveError as error:
                shutil.rmtree(folder, ignore_errors=True)
                self._require_time()
                self.failed[key] = str(error)
                raise
            self._references[key] = _Prepared(reference, options, folder)
        prepared = self._references[key] = self._references.pop(key)  # the last one used stands last
        for old in [*self._references][:-KEPT]:
            shutil.rmtree(self._references.pop(old).folder, ignore_errors=True)
        return prepared

    def _require_time(self) -> None:
        if time.monotonic() >= self._options.until_s:
            raise OutOfTime


@contextlib.contextmanager
def _output_discarded() -> Iterator[None]:
    """Keeps what ranks print from the screen, where the search's progress stands."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        yield


def parameter_kinds(finding: Finding) -> set[str]:
    """Returns the names of a finding's parameters, or of its module, with ``N`` for numbers of layers."""
    return {re.sub(r"\b\d+\b", "N", name) for name in finding.parameters or (finding.module,)}


def alike(a: Finding, b: Finding) -> bool:
    """Whether two findings are of the same things and of parameters of the same kind, and of no two causes."""
    one_cause = a.cause == b.cause or not a.cause or not b.cause
    return one_cause and a.what == b.what and not parameter_kinds(a).isdisjoint(parameter_kinds(b))
