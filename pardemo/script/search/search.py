"""Searches a space of layouts within a time limit: runs them, shrinks those that part, reproduces what was found."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pardemo.script.compare import runs
from pardemo.script.compare.runs import ProveError, RunOptions
from pardemo.script.search.axes import Space
from pardemo.script.search.coverage import PairCoverage
from pardemo.script.search.issue import library_versions, title_of, write_issue
from pardemo.script.search.reproduction import SCRIPT, reproduce
from pardemo.script.search.search_results import NOT_TRIED, FaultSearchResult, SearchFinding
from pardemo.script.search.shrink import shrink
from pardemo.script.search.verdicts import ALIKE, PARTED, LayoutVerdict, OutOfTime, SeenFinding, Verdicts, alike
from pardemo.script.words import count_text, finding_text

#: Says of a reproduction and its numbers of ranks since when it shows a difference.
Since = Callable[[Path, tuple[int, int]], str]


def search(
    space: Space, options: RunOptions, *, minutes: float, out: Path, copied: bool = False,
    note: Callable[[str], None] = print, since: Since | None = None,
) -> FaultSearchResult:  # fmt: skip
    """Runs a script in as many layouts as there is time for, and says which do not train as their reference does.

    An interrupt ends it early; what has been found by then is in the result.

    Args:
        minutes: for layouts and shrinking; the last reproductions, and what ``since`` does, come on top.
        out: the folder of the reproductions, each in one of its own.
        copied: whether they get a copy of the script. note: gets a line on each layout when it is over.

    Raises:
        ValueError: the space has no layout beside the reference. ProveError: no reference could be run.
    """
    coverage = PairCoverage(space)
    if not coverage.points:
        raise ValueError("the axes allow no layout beside the reference: say more values, or more --ranks")
    result, begin_s = FaultSearchResult(space, coverage), time.monotonic()
    with runs.scratch_folder() as folder:
        verdicts = Verdicts(space, options, Path(folder), begin_s + 60 * minutes)
        searching = _Search(result, verdicts, begin_s, out, options.double, copied, note)
        try:
            try:
                searching.run()
            except OutOfTime:
                note(f"{minutes:g} minutes are over")
                searching.reproduce()
            if since is not None:
                _bisect(result, since)
        except KeyboardInterrupt:
            result.interrupted = True
            note("interrupted: what was found so far")
    result.seconds = time.monotonic() - begin_s
    if not result.by_outcome(ALIKE, PARTED) and verdicts.failed:
        raise ProveError(next(iter(verdicts.failed.values())))
    return result


@dataclass
class _Search:
    """A search that runs, with its result so far."""

    result: FaultSearchResult
    verdicts: Verdicts
    begin_s: float
    out: Path
    double: bool
    copied: bool
    note: Callable[[str], None]

    def run(self) -> None:
        """Runs layout after layout until none is left.

        Raises:
            OutOfTime: the minutes are over before.
        """
        space, coverage = self.result.space, self.result.coverage
        while coverage.waiting:
            point = coverage.next_point(space.marks(finding.point) for finding in self.result.findings)
            verdict = self.verdicts.verdict(point)
            self.result.verdicts.append(verdict)
            coverage.note(point, verdict.outcome in (ALIKE, PARTED))
            self._report(verdict)
            for seen in verdict.findings:
                if seen.finding.cause != "follows":
                    self._follow(seen, verdict)
            self.reproduce()

    def _follow(self, seen: SeenFinding, verdict: LayoutVerdict) -> None:
        """Shrinks a finding and adds it to the result, or its layout to a finding of which it is another sight."""
        space, findings = self.result.space, self.result.findings
        for known in findings:
            within = space.differing(known.point).items() <= verdict.point.items()
            if within and alike(known.seen.finding, seen.finding):
                known.layouts.append(verdict.layout.name)
                return
        new = SearchFinding(verdict, seen, [verdict.layout.name])
        findings.append(new)
        try:
            shrink(new, space, self.verdicts.verdict)
        finally:
            new.right = self.verdicts.nearest_right(new.point)
            same = [other for other in findings[:-1]
                    if other.point == new.point and alike(other.seen.finding, new.seen.finding)]  # fmt: skip
            if same:
                findings.remove(new)
                same[0].layouts += new.layouts
            else:
                self.note(f"    shrunk to {new.verdict.layout.name}")

    def _report(self, verdict: LayoutVerdict) -> None:
        done, coverage = len(self.result.verdicts), self.result.coverage
        text = verdict.outcome + f": {verdict.reason}" * bool(verdict.reason)
        if verdict.findings:
            first = verdict.findings[0].finding
            text = "parts in " + finding_text(first.step, first.what, first.factor, first.rest, first.module)
        seconds = time.monotonic() - self.begin_s
        so_far = f"  ({count_text(len(self.result.findings), 'finding')} so far)" * bool(self.result.findings)
        self.note(f"{seconds:4.0f} s  {done} of {len(coverage.points)}  {verdict.layout.name}  {text}{so_far}")

    def reproduce(self) -> None:
        """Reproduces the findings that were not yet, and writes their issues."""
        for number, finding in enumerate(self.result.findings, 1):
            if finding.reproduction is not NOT_TRIED:
                continue
            verdict, seen = finding.verdict, finding.seen
            finding.reproduction = reproduce(
                seen.evidence, verdict.layout, verdict.reference, self.out / str(number),
                title=title_of(finding, self.result.space), versions=library_versions(verdict.layout),
                missing=seen.finding.cause == "no-gradient", double=self.double, copied=self.copied,
            )  # fmt: skip
            finding.seconds = time.monotonic() - self.begin_s
            if finding.reproduction.shown:
                write_issue(finding, self.result.space)


def _bisect(result: FaultSearchResult, since: Since) -> None:
    """Finds out since when each reproduction shows its difference, and writes it into the issues."""
    for finding in result.split()[0]:
        assert finding.reproduction.folder is not None
        ranks = finding.verdict.reference.ranks, finding.verdict.layout.ranks
        try:
            finding.since = since(finding.reproduction.folder / SCRIPT, ranks)
        except ValueError as error:
            finding.since = f"Since when is not known: {error}."
        write_issue(finding, result.space)
