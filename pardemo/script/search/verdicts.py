"""Runs the layouts of a search beside their references, and says of each whether it trains alike."""

import contextlib
import os
import re
import shutil
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
class Verdict:
    """The result of running a layout beside the reference. ``reason``: in one line, of one that was not compared."""

    point: Point
    layout: RunLayout
    outcome: str
    reason: str = ""
    findings: list[SeenFinding] = field(default_factory=list)


class _Prepared(NamedTuple):
    truth: Reference
    options: RunOptions
    folder: Path


class Verdicts:
    """Runs points of a space, each once; a reference is run twice when the first layout beside it needs it."""

    def __init__(self, space: Space, options: RunOptions, folder: Path):
        self.space, self._options, self._folder = space, options, folder
        self.known: dict[tuple[Value, ...], Verdict] = {}
        self._references: dict[tuple[Value, ...], _Prepared | str] = {}
        self._number = 0
        self.failed_reference = ""  # why a reference could not be run: the first that could not

    def verdict(self, point: Point, until_s: float) -> Verdict:
        """Returns the verdict on a legal point.

        Args:
            until_s: when the search's minutes are over, by ``time.monotonic``.

        Raises:
            OutOfTime: they are over before it is known.
        """
        key = tuple(point.values())
        if key not in self.known:
            self.known[key] = self._run(point, until_s)
        return self.known[key]

    def nearest_right(self, point: Mapping[str, Value]) -> RunLayout | None:
        """Returns the layout that trains alike and differs from this one in the fewest values; None where none does."""
        right = [verdict for verdict in self.known.values() if verdict.outcome == ALIKE]

        def distance(verdict: Verdict) -> tuple[int, int, int]:
            differing = verdict.point.items() - point.items()
            shared = sum(axis.kind != LAYOUT for axis in self.space.axes if axis.name in dict(differing))
            return shared, len(differing), -verdict.layout.ranks

        return min(right, key=distance).layout if right else None

    def _run(self, point: Point, until_s: float) -> Verdict:
        layout = self.space.layout(point)
        try:
            prepared = self._reference(self.space.reference_of(point), until_s)
        except ProveError as error:
            self.failed_reference = self.failed_reference or str(error)
            return Verdict(point, layout, REFUSED, str(error))
        folder = self._next_folder()
        try:
            with _quiet():
                return _verdict(point, layout, prepared, folder, until_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _reference(self, point: Point, until_s: float) -> _Prepared:
        key = tuple(point.values())
        if key not in self._references:
            folder, options = self._next_folder(), replace(self._options, steps=int(point["steps"]))
            try:
                with _quiet():
                    truth, options, _ = proof.prepare_reference(
                        self.space.layout(point), _limited(options, until_s), folder
                    )
                self._references[key] = _Prepared(truth, replace(options, timeout_s=self._options.timeout_s), folder)
            except ProveError as error:
                shutil.rmtree(folder, ignore_errors=True)
                if time.monotonic() >= until_s:
                    raise OutOfTime from None
                self._references[key] = str(error)
        prepared = self._references.pop(key)
        self._references[key] = prepared  # the last one used stands last
        if isinstance(prepared, str):
            raise ProveError(prepared)
        kept = [key for key, value in self._references.items() if not isinstance(value, str)]
        for old in kept[:-KEPT]:
            dropped = self._references.pop(old)
            shutil.rmtree(dropped.folder if isinstance(dropped, _Prepared) else "", ignore_errors=True)
        return prepared

    def _next_folder(self) -> Path:
        self._number += 1
        return self._folder / str(self._number)


def _limited(options: RunOptions, until_s: float) -> RunOptions:
    """Returns the options with a time limit that the search's end cuts short.

    Raises:
        OutOfTime: it is over.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise OutOfTime
    return replace(options, timeout_s=min(options.timeout_s, left_s))


def _verdict(point: Point, layout: RunLayout, prepared: _Prepared, folder: Path, until_s: float) -> Verdict:
    truth, options = prepared.truth, _limited(prepared.options, until_s)
    run = runs.run_layout(layout, options, folder)
    if run.timed_out and time.monotonic() >= until_s:
        raise OutOfTime
    refused = run.raised and not any(folder.glob("step*"))
    try:
        compared = proof.compare_run(truth, run, options, folder)
    except ProveError as error:
        return Verdict(point, layout, REFUSED if refused or not (run.error or run.steps) else FAILED, str(error))
    if compared.in_part and layout.ranks > 1 and all(record.alone for record in run.records):
        return Verdict(point, layout, REFUSED, compared.in_part)  # it is no parallel training
    result, _ = proof.result_of(run, compared, options)
    if result.error:
        return Verdict(point, layout, FAILED, result.error)
    kinds = {row.module: row.kind for row in compared.model.rows} if compared.model else {}
    seen = [
        SeenFinding(finding, kinds.get(finding.module, ""),
                    None if options.sketched else evidence_of(finding, truth, run, compared))
        for finding in result.findings
    ]  # fmt: skip
    return Verdict(point, layout, PARTED if seen else ALIKE, "", seen)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
