"""Holds the result of a search, and writes its screen and its JSON."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pardemo.script.blocks import wrapped
from pardemo.script.compare.results import WIDTH, finding_head, finding_why
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.search.axes import Point, Space
from pardemo.script.search.coverage import PairCoverage, ValuePair
from pardemo.script.search.reproduction import Reproduction
from pardemo.script.search.verdicts import ALIKE, FAILED, PARTED, REFUSED, LayoutVerdict, SeenFinding, alike
from pardemo.script.words import count_text, first_of

#: Of a finding before it was reproduced.
NOT_TRIED = Reproduction(None, False, reason="it was not tried")


@dataclass(eq=False)
class SearchFinding:
    """A difference that a search has found, and the ``verdict`` on the smallest point so far that shows it.

    ``seen``: what it shows. ``layouts``: those that show it, by name, in the order in which they ran. ``smallest``:
    whether all that may go has been tried. ``right``: the layout that is nearest to it and trains alike. ``since``:
    which release or commit has it first, in a sentence. ``seconds``: when it was reproduced.
    """

    verdict: LayoutVerdict
    seen: SeenFinding
    layouts: list[str]
    smallest: bool = False
    right: RunLayout | None = None
    reproduction: Reproduction = NOT_TRIED
    since: str = ""
    seconds: float = 0.0

    @property
    def point(self) -> Point:
        """The smallest point so far that shows it."""
        return self.verdict.point

    def moves_to(self, verdict: LayoutVerdict) -> bool:
        """Goes on to another point, if that has a finding alike, with its cause where it has one; returns whether."""
        now = self.seen.finding
        for seen in verdict.findings:
            if alike(seen.finding, now) and now.cause in ("", seen.finding.cause):
                self.verdict, self.seen = verdict, seen
                return True
        return False


@dataclass
class FaultSearchResult:
    """The result of a search: a verdict on each layout that was run, and what was found.

    ``interrupted``: whether somebody ended it. ``seconds``: that it took in all.
    """

    space: Space
    coverage: PairCoverage
    verdicts: list[LayoutVerdict] = field(default_factory=list)
    findings: list[SearchFinding] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0

    def by_outcome(self, *outcomes: str) -> list[LayoutVerdict]:
        """Returns the verdicts of these outcomes."""
        return [verdict for verdict in self.verdicts if verdict.outcome in outcomes]

    @property
    def left_pairs(self) -> list[ValuePair]:
        """Pairs of values that no layout has covered."""
        return sorted(self.coverage.pairs - self.coverage.covered, key=str)

    def split(self) -> tuple[list[SearchFinding], list[SearchFinding]]:
        """Returns the findings that were reproduced, and those that were not."""
        shown = [finding for finding in self.findings if finding.reproduction.shown]
        return shown, [finding for finding in self.findings if not finding.reproduction.shown]

    def __str__(self) -> str:
        """Lists what was covered, what was found, and what is left."""
        coverage, (shown, rest) = self.coverage, self.split()
        lines = [
            f"{len(self.by_outcome(ALIKE, PARTED))} of {count_text(len(coverage.points), 'legal layout')} compared, "
            f"{len(coverage.covered)} of {count_text(len(coverage.pairs), 'pair')} of values covered, "
            f"in {self.seconds:.0f} s"
        ]
        for number, finding in enumerate([*shown, *rest], 1):
            lines += _finding_lines(number, finding)
        for outcome, head in ((REFUSED, "refused by the script"), (FAILED, "could not be compared")):
            lines += _reasons(head, self.by_outcome(outcome))
        if left := self.left_pairs:
            pairs = [" with ".join(f"{name}={value}" for name, value in pair) for pair in left]
            lines += wrapped(f"left: {count_text(len(left), 'pair')} of values: {first_of(pairs, 6)}", WIDTH, 0, 3)
        if self.interrupted:
            lines.append("interrupted before all that was asked for")
        counts = ((shown, ""), (rest, " not reproduced"))
        verdict = " and ".join(f"{count_text(len(some), 'finding')}{words}" for some, words in counts if some)
        nothing = "nothing found" if self.by_outcome(ALIKE) else "nothing compared"
        return "\n".join([*lines, verdict or nothing])

    def as_json(self) -> dict[str, Any]:
        """Returns what ``pardemo prove --search --json`` prints."""
        shown, rest = self.split()
        return {
            "equal": not self.findings,
            "interrupted": self.interrupted, "seconds": round(self.seconds, 1),
            "covered": {"layouts": [verdict.layout.name for verdict in self.by_outcome(ALIKE, PARTED)],
                        "pairs": len(self.coverage.covered)},
            "left": {"layouts": len(self.coverage.waiting), "pairs": [dict(pair) for pair in self.left_pairs]},
            "refused": _rows(self.by_outcome(REFUSED)), "failed": _rows(self.by_outcome(FAILED)),
            "findings": list(map(_finding_row, shown)), "not_reproduced": list(map(_finding_row, rest)),
        }  # fmt: skip


def _rows(verdicts: list[LayoutVerdict]) -> list[dict[str, str]]:
    return [{"layout": verdict.layout.name, "line": verdict.reason} for verdict in verdicts]


def _finding_row(finding: SearchFinding) -> dict[str, Any]:
    seen, made, verdict = finding.seen, finding.reproduction, finding.verdict
    return seen.finding.as_json() | {
        "layout": finding.layouts[0], "layouts": finding.layouts, "shrunk": verdict.layout.name,
        "smallest": finding.smallest, "reference": verdict.reference.name,
        "command": " ".join(verdict.layout.line), "line": seen.finding.line, "kind": seen.kind,
        "right": finding.right.name if finding.right else None, "since": finding.since,
        "reproduction": str(made.folder) if made.folder else None, "printed": made.output, "reason": made.reason,
        "seconds": round(finding.seconds, 1),
    }  # fmt: skip


def _finding_lines(number: int, finding: SearchFinding) -> list[str]:
    seen, made, verdict = finding.seen, finding.reproduction, finding.verdict
    more = len(finding.layouts) - 1
    lines = wrapped(f"✗ {number}  {verdict.layout.name}, beside {verdict.reference.name}", WIDTH, 0, 5)
    texts = [
        f"{finding_head(seen.finding)}{f' ({seen.kind})' if seen.kind else ''}",
        finding_why(seen.finding),
        f"parameters: {first_of(seen.finding.parameters, 4)}" if seen.finding.parameters else "",
        f"at {seen.finding.line}" if seen.finding.line else "",
        f"first in {finding.layouts[0]}{f', and in {more} more' if more else ''}"
        f"{'' if finding.smallest else '; it was not shrunk to the end'}",
        f"right: {finding.right.name}" if finding.right else "",
        f"reproduced: {made.folder}" if made.shown else f"not reproduced: {made.reason}",
        finding.since,
    ]
    return lines + [line for text in texts if text for line in wrapped(text, WIDTH, 5, 8)]


def _reasons(head: str, verdicts: list[LayoutVerdict]) -> list[str]:
    """Lists reasons, each once, with the number of layouts and the first of them."""
    counts = Counter(verdict.reason for verdict in verdicts)
    first = {verdict.reason: verdict.layout.name for verdict in reversed(verdicts)}
    lines = [f"{head}: {count_text(len(verdicts), 'layout')}"] if verdicts else []
    for reason, count in counts.most_common():
        lines += wrapped(f"{count} × {reason} ({first[reason]})", WIDTH, 3, 6)
    return lines
