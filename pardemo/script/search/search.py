"""Searches a space of layouts within a time limit: runs them, shrinks those that part, reproduces what was found."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pardemo.script.compare import runs
from pardemo.script.compare.runs import ProveError, RunOptions
from pardemo.script.search.axes import Point, Space, as_text
from pardemo.script.search.coverage import Coverage
from pardemo.script.search.issue import issue_text, library_versions, title_of
from pardemo.script.search.reproduction import SCRIPT, reproduce
from pardemo.script.search.search_results import SearchFinding, SearchResult
from pardemo.script.search.shrink import Parting, shrink
from pardemo.script.search.verdicts import ALIKE, PARTED, OutOfTime, SeenFinding, Verdict, Verdicts, alike
from pardemo.script.words import count_text, finding_text


def search(
    space: Space, options: RunOptions, *, minutes: float, out: Path, copied: bool = False,
    note: Callable[[str], None] = print, since: Callable[[Path, tuple[int, int]], str] | None = None,
) -> SearchResult:  # fmt: skip
    """Runs a script in as many layouts as there is time for, and says which do not train as their reference does.

    An interrupt ends it early; what has been found by then is in the result.

    Args:
        minutes: for layouts and shrinking; the reproductions of what was found come on top.
        out: the folder of the reproductions, each in one of its own.
        copied: whether they get a copy of the script. note: gets a line on each layout when it is over.
        since: says of a reproduction and its numbers of ranks since when it shows a difference; after the minutes, too.

    Raises:
        ValueError: the space has no layout beside the reference. ProveError: no reference could be run.
    """
    coverage = Coverage(space)
    if not coverage.points:
        raise ValueError("the axes allow no layout beside the reference: say more values, or more --ranks")
    result, begin_s = SearchResult(space, coverage), time.monotonic()
    with runs.scratch_folder() as folder:
        searching = _Search(result, Verdicts(space, options, Path(folder)), begin_s, begin_s + 60 * minutes, note)
        write = partial(_reproduce, searching, out, options.double, copied)
        try:
            try:
                searching.run(write)
            except OutOfTime:
                note(f"{minutes:g} minutes are over")
                write()
            if since is not None:
                _bisect(result, since)
        except KeyboardInterrupt:
            result.interrupted = True
            note("interrupted: what was found so far")
    result.seconds = time.monotonic() - begin_s
    if not result.by_outcome(ALIKE, PARTED) and searching.verdicts.failed_reference:
        raise ProveError(searching.verdicts.failed_reference)
    return result


class _Search:
    """A search that runs, with its result so far."""

    def __init__(
        self, result: SearchResult, verdicts: Verdicts, begin_s: float, until_s: float, note: Callable[[str], None]
    ):
        self.result, self.verdicts, self.begin_s = result, verdicts, begin_s
        self._until_s, self._note = until_s, note

    def run(self, write: Callable[[], None]) -> None:
        """Runs layout after layout until none is left; ``write`` reproduces what is new.

        Raises:
            OutOfTime: the minutes are over before.
        """
        space, coverage = self.verdicts.space, self.result.coverage
        while coverage.waiting:
            point = coverage.take(space.marks(finding.parting.point) for finding in self.result.findings)
            verdict = self._judge(point)
            self.result.verdicts.append(verdict)
            (coverage.cover if verdict.outcome in (ALIKE, PARTED) else coverage.refuse)(point)
            self._report(verdict)
            for seen in verdict.findings:
                if seen.finding.cause != "follows":
                    self._follow(seen, verdict)
            write()

    def _judge(self, point: Point) -> Verdict:
        return self.verdicts.verdict(point, self._until_s)

    def _follow(self, seen: SeenFinding, verdict: Verdict) -> None:
        """Shrinks a finding and adds it to the result, or its layout to a finding of which it is another sight."""
        space, findings = self.verdicts.space, self.result.findings
        for known in findings:
            within = space.differing(known.parting.point).items() <= verdict.point.items()
            if within and alike(known.parting.seen.finding, seen.finding):
                known.layouts.append(verdict.layout.name)
                return
        parting = Parting(verdict.point, verdict, seen)
        new = SearchFinding([verdict.layout.name], parting, verdict.layout)
        findings.append(new)
        try:
            shrink(parting, space, self._judge)
        finally:
            new.reference = space.layout(space.reference_of(parting.point))
            new.right = self.verdicts.nearest_right(parting.point)
            same = [other for other in findings[:-1] if other.parting.point == parting.point
                    and alike(other.parting.seen.finding, parting.seen.finding)]  # fmt: skip
            if same:
                findings.remove(new)
                same[0].layouts += new.layouts
            else:
                self._note(f"    shrunk to {new.layout.name}")

    def _report(self, verdict: Verdict) -> None:
        done, coverage = len(self.result.verdicts), self.result.coverage
        text = verdict.outcome + f": {verdict.reason}" * bool(verdict.reason)
        if verdict.findings:
            first = verdict.findings[0].finding
            text = "parts in " + finding_text(first.step, first.what, first.factor, first.rest, first.module)
        seconds = time.monotonic() - self.begin_s
        so_far = f"  ({count_text(len(self.result.findings), 'finding')} so far)" * bool(self.result.findings)
        self._note(f"{seconds:4.0f} s  {done} of {len(coverage.points)}  {verdict.layout.name}  {text}{so_far}")


def _reproduce(searching: _Search, out: Path, double: bool, copied: bool) -> None:
    """Reproduces the findings that were not yet, and writes their issues."""
    space = searching.verdicts.space
    for number, finding in enumerate(searching.result.findings, 1):
        if finding.seconds:
            continue
        seen, layout = finding.parting.seen, finding.layout
        title = title_of(finding, as_text(space.marks(finding.parting.point)))
        versions, folder = library_versions(layout), out / str(number)
        finding.reproduction = reproduce(
            seen.evidence, layout, finding.reference, folder, title=title, versions=versions,
            missing=seen.finding.cause == "no-gradient", double=double, copied=copied,
        )  # fmt: skip
        finding.seconds = time.monotonic() - searching.begin_s
        if finding.reproduction.shown:
            _write_issue(space, finding)


def _bisect(result: SearchResult, since: Callable[[Path, tuple[int, int]], str]) -> None:
    """Finds out since when each reproduction shows its difference, and writes it into the issues."""
    for finding in result.split()[0]:
        assert finding.reproduction.folder is not None
        try:
            finding.since = since(finding.reproduction.folder / SCRIPT, (finding.reference.ranks, finding.layout.ranks))
        except ValueError as error:
            finding.since = f"Since when is not known: {error}."
        _write_issue(result.space, finding)


def _write_issue(space: Space, finding: SearchFinding) -> None:
    assert finding.reproduction.folder is not None
    title = title_of(finding, as_text(space.marks(finding.parting.point)))
    text = issue_text(finding, title, library_versions(finding.layout))
    (finding.reproduction.folder / "issue.md").write_text(text, "utf-8")
