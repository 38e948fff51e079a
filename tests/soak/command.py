"""Injects faults at random into the project's own work, and says what does not survive them.

    pardemo soak --minutes 30 --seed 7
    pardemo soak --faults 1000 --json > soak.json
    pardemo soak --only world/killed --case 17 --seed 7         # one case, again
    pardemo soak --faults 1000 --write     # outputs/reference/soak.json, and the table of docs/records/soak-run.md

A case is a piece of work with one fault, drawn from the seed: a rank that is killed or stopped, an interrupt, a link
that goes away, a file that is cut off, a full disk. docs/soak.md says what is checked. Exit status 1 where anything
was wrong, or fewer faults took place than were asked for; 2 for bad input.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from pardemo import argument_checks
from pardemo.termination import ends_in_order
from soak.report import Report, Result

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("world", "ranks", "cluster", "checkpoints", "runner", "finetune", "measure")
MINUTES = 5.0
#: A kind whose fault did not take place so many times in a row is not drawn any more.
MISSES = 10
SUMMARY, PAGE = ROOT / "outputs" / "reference" / "soak.json", ROOT / "docs" / "records" / "soak-run.md"
BEGIN, END = "<!-- made by pardemo soak --write -->\n", "<!-- end of the table -->\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status.

    Raises:
        ValueError: an option's value is none.
    """
    parser = argparse.ArgumentParser(
        prog="pardemo soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="so long (5)")
    parser.add_argument("--faults", type=int, metavar="N", help="in place of minutes: so many faults")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="all cases are drawn from it (1)")
    parser.add_argument("--only", nargs="+", metavar="KIND", default=GROUPS, help="kinds, as world/killed, or groups")
    parser.add_argument("--case", type=int, nargs="+", metavar="N", help="these cases of each kind of --only")
    parser.add_argument("--list", action="store_true", help="list the kinds, and stop")
    parser.add_argument("--json", action="store_true", help="print one object; failures and progress go to stderr")
    parser.add_argument("--write", action="store_true", help="write the results to the committed run and its page")
    asked = parser.parse_args(arguments)
    with ends_in_order("soak"):
        return _run(asked)


def _run(asked: argparse.Namespace) -> int:
    argument_checks.at_least(asked, 0, "faults")
    if asked.minutes is not None and not 0 < asked.minutes < math.inf:
        raise ValueError(f"--minutes must be a number above 0, not {asked.minutes:g}")
    if asked.minutes is not None and asked.faults is not None:
        raise ValueError("--minutes limits the time, --faults the number of faults: give one of them")
    if asked.case and min(asked.case) < 0:
        raise ValueError(f"--case must be 0 or more, not {min(asked.case)}")
    if asked.case and asked.only is GROUPS:
        raise ValueError("--case needs --only, which says of which kind")
    groups = [name.partition("/")[0] for name in asked.only]
    if unknown := [name for name, group in zip(asked.only, groups, strict=True) if group not in GROUPS]:
        raise ValueError(f"--only: no kind {unknown[0]!r}; there are {', '.join(GROUPS)}")
    from soak.fork_server import ForkServer, load

    kinds, missing = load(dict.fromkeys(groups))
    if not kinds:
        raise ValueError("; ".join(missing.values()))
    weights = {name: kind.weight for name, kind in kinds.items() if {name, name.partition("/")[0]} & {*asked.only}}
    if unknown := [name for name in asked.only if "/" in name and name not in kinds]:
        raise ValueError(f"--only: no kind {unknown[0]!r}; there are {', '.join(kinds)}")
    if asked.list:
        print(json.dumps(sorted(weights)) if asked.json else "\n".join(sorted(weights)))
        return 0
    report = Report(asked.seed, sys.stderr if asked.json else sys.stdout)
    for group, reason in missing.items():
        report.add(Result(group, 0, skipped=reason))
    with ForkServer(kinds, asked.seed) as server:
        try:
            for name, number in _drawn(asked, weights, report.results):
                report.add(server.run(name, number))
        finally:  # an interrupt, too: what was run until then is told
            if report.results:
                print(json.dumps(report.as_json(), indent=1, ensure_ascii=False) if asked.json else report.as_text())
    if asked.write:
        SUMMARY.write_text(json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), report.as_json()), encoding="utf-8")
    reached = sum(result.reached for result in report.results)
    if asked.case is None and reached < (asked.faults or 0):
        print(f"{reached} of {asked.faults}: no kind is left of which one in {MISSES} was reached", file=report.out)
    failed = any(result.reasons for result in report.results)
    return int(failed or not reached or (asked.case is None and reached < (asked.faults or 0)))


def _drawn(asked: argparse.Namespace, weights: Mapping[str, int], results: list[Result]) -> Iterator[tuple[str, int]]:
    """The cases that the command line asks for; ``results`` has those of the cases drawn so far."""
    if asked.case is not None:
        yield from ((name, number) for name in weights for number in asked.case)
        return
    until = time.monotonic() + 60 * (asked.minutes or MINUTES)
    reached, misses = 0, dict.fromkeys(weights, 0)
    for name, number in endless(weights, asked.seed):
        if asked.faults is None and time.monotonic() >= until:
            return
        if asked.faults is not None and (reached >= asked.faults or min(misses.values()) >= MISSES):
            return
        if misses[name] < MISSES:
            yield name, number
            reached += results[-1].reached
            misses[name] = 0 if results[-1].reached else misses[name] + 1


def endless(weights: Mapping[str, int], seed: int) -> Iterator[tuple[str, int]]:
    """Cases without end: in each round every kind as often as its weight says, in an order drawn from the seed."""
    rng, numbers = Random(f"{seed} rounds"), Counter[str]()
    while True:
        names = [name for name, weight in weights.items() for _ in range(weight)]
        rng.shuffle(names)
        for name in names:
            yield name, numbers[name]
            numbers[name] += 1


def page(text: str, run: Mapping[str, Any]) -> str:
    """The page with a run's table: a row for each group, the sum, and a line for each failure."""
    counted = [name for name in next(iter(run["kinds"].values())) if name not in ("skipped", "seconds_each")]
    titles = " | ".join(name.replace("_", " ") for name in counted)
    lines = [f"| group | kinds | {titles} |", f"|---|{'---:|' * (len(counted) + 1)}"]
    groups: dict[str, list[Mapping[str, int]]] = {}
    for name, counts in run["kinds"].items():
        groups.setdefault(f"`{name.partition('/')[0]}`", []).append(counts)
    for group, kinds in (*groups.items(), ("all", list(run["kinds"].values()))):
        sums = " | ".join(f"{sum(counts[name] for counts in kinds):,}" for name in counted)
        lines.append(f"| {group} | {len(kinds)} | {sums} |")
    skipped = "; ".join(f"not played: {', '.join(kinds)} ({why})" for why, kinds in run["not_played"].items())
    minutes, skipped = f"{run['seconds'] / 60:.0f} minutes on two cores", skipped or "all kinds were played"
    lines += ["", f"Seed {run['seed']}, {minutes}; {skipped}.", ""]
    lines += [f"- failed: `{each['again']}`: {each['reasons']}" for each in run["failures"]]
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n".join(lines).rstrip() + "\n" + END + rest.partition(END)[2]
