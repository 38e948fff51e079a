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
COUNTED = ("injected", "survived", "wrong", "hangs", "orphans", "leaked", "skipped")


@dataclass(frozen=True)
class Ending:
    """How a scene ended.

    ``wrong``: what it did in place of the right error or result, empty where it was right; ``hang``: it was not over
    within its limit; ``orphans``, ``leaked``: a line for each process, and for everything else, that was left;
    ``skipped``: why this machine cannot play it; ``told``: what its error said; ``seconds``: what it took.
    """

    kind: str
    number: int
    way: str = ""
    told: str = ""
    wrong: str = ""
    hang: bool = False
    orphans: tuple[str, ...] = ()
    leaked: tuple[str, ...] = ()
    skipped: str = ""
    seconds: float = 0.0

    @property
    def survived(self) -> bool:
        return not (self.wrong or self.hang or self.orphans or self.leaked or self.skipped)

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.hang or self.orphans or self.leaked)

    @property
    def reasons(self) -> str:
        """What is wrong, in one line."""
        parts = ["it was not over within its limit"] * self.hang + [self.wrong] * bool(self.wrong)
        parts += [f"left behind: {line}" for line in (*self.orphans, *self.leaked)]
        return " ".join("; ".join(parts).split())

    def counts(self) -> dict[str, int]:
        """How much the scene adds to each of :data:`COUNTED`."""
        played = not self.skipped
        return {
            "injected": int(played), "survived": int(self.survived), "wrong": int(bool(self.wrong)),
            "hangs": int(self.hang), "orphans": len(self.orphans), "leaked": len(self.leaked),
            "skipped": int(not played),
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
            print(f"{now - self.begin:6.0f} s: {counts['injected']} injected, {counts['survived']} survived, "
                  f"{len(self.failures)} failed", file=self.out, flush=True)  # fmt: skip

    def command(self, ending: Ending) -> str:
        """What plays a scene again, alone."""
        return f"pardemo soak --only {shlex.quote(ending.kind)} --case {ending.number} --seed {self.seed}"

    def as_text(self) -> str:
        """The table by kind, the reasons of what was skipped, and the sum."""
        rows = [[kind, *map(str, counts.values()), f"{s:.2f}"] for kind, counts, s in self._by_kind()]
        lines = [text_table([["kind", *COUNTED, "seconds each"], *rows])]
        for reason, kinds in self._skips().items():
            lines.append(f"skipped {', '.join(kinds)}: {reason}")
        counts = sums(self.endings)
        lines.append(", ".join(f"{count} {name}" for name, count in counts.items())
                     + f"; {time.monotonic() - self.begin:.0f} s, seed {self.seed}")  # fmt: skip
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """One object: the counts in all and by kind, ``seconds``, ``seed``, and each failure with its command."""
        failures = [
            {"kind": each.kind, "case": each.number, "way": each.way, "reasons": each.reasons, "told": each.told,
             "again": self.command(each)}
            for each in self.failures
        ]  # fmt: skip
        kinds = {kind: counts | {"seconds_each": round(s, 3)} for kind, counts, s in self._by_kind()}
        return {
            **sums(self.endings), "seconds": round(time.monotonic() - self.begin, 1), "seed": self.seed,
            "kinds": kinds, "not_played": self._skips(), "failures": failures,
        }  # fmt: skip

    def _by_kind(self) -> list[tuple[str, dict[str, int], float]]:
        groups: dict[str, list[Ending]] = {}
        for each in self.endings:
            groups.setdefault(each.kind, []).append(each)
        return [(kind, sums(own), sum(e.seconds for e in own) / len(own)) for kind, own in sorted(groups.items())]

    def _skips(self) -> dict[str, list[str]]:
        reasons: dict[str, set[str]] = {}
        for group, reason in self.missing.items():
            reasons.setdefault(reason, set()).add(group)
        for each in self.endings:
            if each.skipped:
                reasons.setdefault(each.skipped, set()).add(each.kind)
        return {reason: sorted(kinds) for reason, kinds in reasons.items()}


def sums(endings: Iterable[Ending]) -> dict[str, int]:
    """Each of :data:`COUNTED`, over all endings."""
    total = dict.fromkeys(COUNTED, 0)
    for ending in endings:
        counts: Mapping[str, int] = ending.counts()
        for name in COUNTED:
            total[name] += counts[name]
    return total
