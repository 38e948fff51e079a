"""What became of the cases: a line for each failure, one every ten seconds, a table and JSON at the end."""

import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from pardemo.tables import text_table
from soak.leftovers import COUNTERS

EVERY_S = 10.0
#: What is counted, in all and of each kind.
COUNTED = ("injected", "survived", "not_reached", "failed", "wrong", "lost_work", "hangs", *COUNTERS, "skipped")
#: Those of them that the table has a column for: what was wrong with a failure stands in its own line.
COLUMNS = ("injected", "survived", "not_reached", "failed", "skipped")


@dataclass(frozen=True)
class Result:
    """How a case ended.

    ``told``: what its error said; ``wrong``: what it did in place of the right error or result; ``lost``: the work that
    it lost; ``hang``: it was not over within its limit; ``not_reached``: why its fault did not take place; ``skipped``:
    why this machine cannot run it; ``left``: by counter, a line for each thing that it left; ``seconds``: what it took.
    """

    kind: str
    number: int
    way: str = ""
    told: str = ""
    wrong: str = ""
    lost: str = ""
    hang: bool = False
    not_reached: str = ""
    skipped: str = ""
    left: Mapping[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def reached(self) -> bool:
        return not (self.skipped or self.not_reached)

    @property
    def reasons(self) -> str:
        """What is wrong, in one line; empty where nothing is."""
        parts = ["it was not over within its limit"] * self.hang + [self.wrong] * bool(self.wrong)
        parts += [f"lost: {self.lost}"] * bool(self.lost)
        parts += [f"left behind: {line}" for lines in self.left.values() for line in lines]
        return " ".join("; ".join(parts).split())

    def counts(self) -> dict[str, int]:
        """How much the case adds to each of ``COUNTED``."""
        failed = bool(self.reasons)
        counts = {
            "injected": self.reached, "survived": self.reached and not failed, "not_reached": bool(self.not_reached),
            "failed": failed, "wrong": bool(self.wrong), "lost_work": bool(self.lost), "hangs": self.hang,
            "skipped": bool(self.skipped), **{name: len(self.left.get(name, ())) for name in COUNTERS},
        }  # fmt: skip
        return {name: int(counts[name]) for name in COUNTED}


@dataclass
class Report:
    """All results of a run; :meth:`add` prints to ``out`` as they come."""

    seed: int
    out: TextIO = field(default_factory=lambda: sys.stdout)
    results: list[Result] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    def add(self, result: Result) -> None:
        """Counts a result; prints it where it is a failure, and every ten seconds how far the run is."""
        self.results.append(result)
        if result.reasons:
            way = f" ({result.way})" * bool(result.way)
            print(f"FAILED {result.kind}, case {result.number}{way}: {result.reasons}", file=self.out)
            print(f"       {self.again(result)}", file=self.out, flush=True)
        if (now := time.monotonic()) - self.said >= EVERY_S:
            self.said, counts = now, summed(self.results)
            told = ", ".join(f"{counts[name]} {_words(name)}" for name in COLUMNS[:4])
            print(f"{now - self.begin:6.0f} s: {told}", file=self.out, flush=True)

    def again(self, result: Result) -> str:
        """The command that runs a case again, alone."""
        only = f"--only {shlex.quote(result.kind)} --case {result.number} --seed {self.seed}"
        return f"pardemo soak {only}"

    def as_text(self) -> str:
        """The table by kind, the reasons of what was skipped or not reached, and the sum of everything counted."""
        run = self.as_json()
        rows = [
            [kind, *(str(of[name]) for name in COLUMNS), f"{of['seconds_each']:.2f}"]
            for kind, of in run["kinds"].items()
        ]
        lines = [text_table([["kind", *map(_words, COLUMNS), "seconds each"], *rows])]
        for what, reasons in (("skipped", run["not_played"]), ("not reached", run["why_not_reached"])):
            lines += [f"{what} {', '.join(kinds)}: {reason}" for reason, kinds in reasons.items()]
        counts = ", ".join(f"{run[name]} {_words(name)}" for name in COUNTED)
        return "\n".join([*lines, f"{counts}; {run['seconds']:.0f} s, seed {self.seed}"])

    def as_json(self) -> dict[str, Any]:
        """One object: the counts in all and by kind, ``seconds``, ``seed``, and each failure with its command.

        ``not_played`` and ``why_not_reached``: the reasons, and the kinds that each holds for.
        """
        failures = [
            {"kind": each.kind, "case": each.number, "way": each.way, "reasons": each.reasons, "told": each.told,
             "again": self.again(each)}
            for each in self.results if each.reasons
        ]  # fmt: skip
        kinds = {}
        for kind in sorted({each.kind for each in self.results}):
            own = [each for each in self.results if each.kind == kind]
            kinds[kind] = {**summed(own), "seconds_each": round(sum(each.seconds for each in own) / len(own), 3)}
        return {
            **summed(self.results), "seconds": round(time.monotonic() - self.begin, 1), "seed": self.seed,
            "kinds": kinds, "not_played": self._why("skipped"), "why_not_reached": self._why("not_reached"),
            "failures": failures,
        }  # fmt: skip

    def _why(self, name: str) -> dict[str, list[str]]:
        """What a field of the results says, and of which kinds."""
        reasons: dict[str, set[str]] = {}
        for each in self.results:
            if reason := getattr(each, name):
                reasons.setdefault(reason, set()).add(each.kind)
        return {reason: sorted(kinds) for reason, kinds in reasons.items()}


def summed(results: Iterable[Result]) -> dict[str, int]:
    """Each of ``COUNTED``, over all results."""
    counts = [each.counts() for each in results]
    return {name: sum(each[name] for each in counts) for name in COUNTED}


def _words(name: str) -> str:
    return name.replace("_", " ")
