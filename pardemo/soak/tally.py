"""What became of the scenes: a line for each failure at once, a line every ten seconds, a table and JSON at the end."""

import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from pardemo.tables import text_table

EVERY_S = 10.0
#: What is counted, in all and of each kind.
COUNTED = (
    "injected", "survived", "not_reached", "failed", "wrong", "lost_work", "hangs", "orphans", "leaked_sockets",
    "leaked_namespaces", "leaked_folders", "skipped",
)  # fmt: skip
#: Those of them that the table has a column for: what was wrong with a failure stands in its own line.
COLUMNS = ("injected", "survived", "not_reached", "failed", "skipped")


@dataclass(frozen=True)
class Ending:
    """How a scene ended.

    ``wrong``: what it did in place of the right error or result, empty where it was right; ``lost``: the work that it
    lost; ``hang``: it was not over within its limit; ``not_reached``: why its fault did not take place; ``orphans``,
    ``sockets``, ``namespaces``, ``folders``: a line for each that was left; ``skipped``: why this machine cannot play
    it; ``told``: what its error said; ``seconds``: what it took.
    """

    kind: str
    number: int
    way: str = ""
    told: str = ""
    wrong: str = ""
    lost: str = ""
    hang: bool = False
    not_reached: str = ""
    orphans: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    skipped: str = ""
    seconds: float = 0.0

    @property
    def injected(self) -> bool:
        return not (self.skipped or self.not_reached)

    @property
    def survived(self) -> bool:
        return self.injected and not self.failed

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.lost or self.hang or self.left)

    @property
    def left(self) -> tuple[str, ...]:
        """A line for everything that was left behind."""
        return *self.orphans, *self.sockets, *self.namespaces, *self.folders

    @property
    def reasons(self) -> str:
        """What is wrong, in one line."""
        parts = ["it was not over within its limit"] * self.hang + [self.wrong] * bool(self.wrong)
        parts += [f"lost: {self.lost}"] * bool(self.lost) + [f"left behind: {line}" for line in self.left]
        return " ".join("; ".join(parts).split())

    def counts(self) -> dict[str, int]:
        """How much the scene adds to each of :data:`COUNTED`."""
        return {
            "injected": int(self.injected), "survived": int(self.survived), "not_reached": int(bool(self.not_reached)),
            "failed": int(self.failed), "wrong": int(bool(self.wrong)), "lost_work": int(bool(self.lost)),
            "hangs": int(self.hang), "orphans": len(self.orphans), "leaked_sockets": len(self.sockets),
            "leaked_namespaces": len(self.namespaces), "leaked_folders": len(self.folders),
            "skipped": int(bool(self.skipped)),
        }  # fmt: skip


@dataclass
class Tally:
    """All endings of a run; :meth:`note` prints as they come, to ``out``.

    ``missing``: of each group that cannot be played, a line that says why.
    """

    seed: int
    out: TextIO = field(default_factory=lambda: sys.stdout)
    missing: Mapping[str, str] = field(default_factory=dict)
    endings: list[Ending] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)
    said: float = field(default_factory=time.monotonic)

    @property
    def failures(self) -> list[Ending]:
        return [each for each in self.endings if each.failed]

    def note(self, ending: Ending) -> None:
        """Counts an ending; prints it where it is a failure, and every ten seconds how far the run is."""
        self.endings.append(ending)
        if ending.failed:
            way = f" ({ending.way})" * bool(ending.way)
            print(f"FAILED {ending.kind}, case {ending.number}{way}: {ending.reasons}", file=self.out)
            print(f"       {self.command(ending)}", file=self.out, flush=True)
        if (now := time.monotonic()) - self.said >= EVERY_S:
            self.said = now
            counts = sums(self.endings)
            told = ", ".join(f"{counts[name]} {_words(name)}" for name in COLUMNS[:4])
            print(f"{now - self.begin:6.0f} s: {told}", file=self.out, flush=True)

    def command(self, ending: Ending) -> str:
        """What plays a scene again, alone."""
        return f"pardemo soak --only {shlex.quote(ending.kind)} --case {ending.number} --seed {self.seed}"

    def as_text(self) -> str:
        """The table by kind, the reasons of what was skipped or not reached, and the sum of everything counted."""
        rows = [[kind, *(str(counts[n]) for n in COLUMNS), f"{s:.2f}"] for kind, counts, s in self._by_kind()]
        lines = [text_table([["kind", *map(_words, COLUMNS), "seconds each"], *rows])]
        for what, reasons in (("skipped", self._skips()), ("not reached", self._reasons("not_reached"))):
            lines += [f"{what} {', '.join(kinds)}: {reason}" for reason, kinds in reasons.items()]
        counts = sums(self.endings)
        lines.append(", ".join(f"{count} {_words(name)}" for name, count in counts.items())
                     + f"; {time.monotonic() - self.begin:.0f} s, seed {self.seed}")  # fmt: skip
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """One object: the counts in all and by kind, ``seconds``, ``seed``, and each failure with its command.

        ``not_played`` and ``why_not_reached``: the reasons, and the kinds that each holds for.
        """
        failures = [
            {"kind": each.kind, "case": each.number, "way": each.way, "reasons": each.reasons, "told": each.told,
             "again": self.command(each)}
            for each in self.failures
        ]  # fmt: skip
        kinds = {kind: counts | {"seconds_each": round(s, 3)} for kind, counts, s in self._by_kind()}
        return {
            **sums(self.endings), "seconds": round(time.monotonic() - self.begin, 1), "seed": self.seed,
            "kinds": kinds, "not_played": self._skips(), "why_not_reached": self._reasons("not_reached"),
            "failures": failures,
        }  # fmt: skip

    def _by_kind(self) -> list[tuple[str, dict[str, int], float]]:
        groups: dict[str, list[Ending]] = {}
        for each in self.endings:
            groups.setdefault(each.kind, []).append(each)
        return [(kind, sums(own), sum(e.seconds for e in own) / len(own)) for kind, own in sorted(groups.items())]

    def _skips(self) -> dict[str, list[str]]:
        groups: dict[str, list[str]] = {}
        for group, reason in self.missing.items():
            groups.setdefault(reason, []).append(group)
        return {reason: sorted(names) for reason, names in groups.items()} | self._reasons("skipped")

    def _reasons(self, why: str) -> dict[str, list[str]]:
        """What an ending's field ``why`` says, and of which kinds."""
        reasons: dict[str, set[str]] = {}
        for each in self.endings:
            if reason := getattr(each, why):
                reasons.setdefault(reason, set()).add(each.kind)
        return {reason: sorted(kinds) for reason, kinds in reasons.items()}


def _words(name: str) -> str:
    return name.replace("_", " ")


def sums(endings: Iterable[Ending]) -> dict[str, int]:
    """Each of :data:`COUNTED`, over all endings."""
    total = dict.fromkeys(COUNTED, 0)
    for ending in endings:
        counts: Mapping[str, int] = ending.counts()
        for name in COUNTED:
            total[name] += counts[name]
    return total
