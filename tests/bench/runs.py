"""The speed table of several runs, since one run is an anecdote: medians, ranges, and in how many a target was met.

``bench_runs.json`` keeps every run: its date, the revision of the code, the machine as ``machine.json`` says it, and
the figures of its rows. What a row compares and how much is asked of it stands there once, as the newest run says it.
``bench.json``, the table that others read, is made from it by ``pardemo bench --add``.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from bench.table import BenchRow, as_text, is_met
from pardemo import project

RUNS, TABLE = "bench_runs.json", "bench.json"
FIGURES = ("ours", "peer", "ratio", "spread")  # of a run, with as many digits:
DIGITS = 6  # two runs differ in the second or third
ASKED = ("unit", "target", "within", "note")  # what a row is, the same for all runs
DAYS = 5  # on so many a row is measured before its target counts as met or missed: days differ more than runs do
#: What a file that holds something else than it should may raise.
WRONG = (TypeError, LookupError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True, kw_only=True)
class TableRow(BenchRow):
    """A row of several runs: ``ours``, ``peer``, ``ratio`` and both ends of ``spread`` are the medians of theirs.

    Args:
        range: the smallest and the largest ratio of a run.
        runs: how many runs have the row. days: on how many dates they were made.
        met_in: in how many runs the target was met, None where there is none. ``met`` is said of a target that is
            missed in no more than every fifth run, as in 4 of 5. With runs of fewer than five days it is None: open.
        newest: the ratio of the newest run, which has the newest code.
    """

    range: tuple[float, float]
    runs: int
    days: int
    met_in: int | None
    newest: float

    INTERVAL: ClassVar[str] = "range"

    def interval(self) -> tuple[float, float]:
        return self.range

    def verdict(self) -> str:
        if self.met_in is None:
            return ""
        text = f"in {self.met_in} of {self.runs}"
        if self.met is None:
            text = f"open: {text}, {self.days} of {DAYS} days"
        elif not self.met:
            text = f"NO, {text}"
        missed = not is_met(self.newest, self.target, self.within)
        return f"{text}, newest {self.newest:.2f}" if missed else text


def add(
    folder: Path, rows: Sequence[Mapping[str, Any]], date: str, revision: str, machine: Mapping[str, Any]
) -> list[TableRow]:
    """Adds a run to those in ``folder`` and makes its table anew, which is returned.

    Args:
        rows: as ``pardemo bench --json`` prints them; a run of a part of the benches is one, too.
        date: on which they were measured, as 2026-11-27. revision: of the code that was measured.
        machine: what ``machine.json`` says of the machine.

    Raises:
        ValueError: rows or a date that are none, a run that is there already, a row that had another unit: whatever
            is measured in another way needs another name, or its median is one of two things.
    """
    kept = read(folder / RUNS)
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        raise ValueError(f"a date looks like 2026-11-27, not {date!r}") from None
    run = {"date": date, "revision": revision, "machine": dict(machine), "figures": figures(rows)}
    if any(run["figures"] == other["figures"] for other in kept["runs"]):
        raise ValueError(f"this run is among those of {folder / RUNS} already")
    newest = all(other["date"] <= date for other in kept["runs"])
    names = _in_order(list(run["figures"]), list(kept["rows"]))
    for row in rows:
        before = kept["rows"].get(row["name"])
        if before is not None and before["unit"] != row["unit"]:
            raise ValueError(f"{row['name']} was in {before['unit']} and is in {row['unit']} now: give it another name")
        if before is None or newest:
            kept["rows"][row["name"]] = {key: row.get(key) for key in ASKED}
    kept["rows"] = {name: kept["rows"][name] for name in names}
    kept["runs"] = sorted([*kept["runs"], run], key=lambda each: each["date"])
    made = table(kept)
    lines = ",\n".join(_compact(asdict(row)) for row in made)
    for name, text in ((RUNS, _text(kept)), (TABLE, f"[\n{lines}\n]\n")):
        project.write_text(folder / name, text)
    return made


def table(kept: Mapping[str, Any]) -> list[TableRow]:
    """The rows of all runs that ``bench_runs.json`` keeps. A row that only some of them have is made of those.

    Every run is judged by the present target, also one that was measured when less or more was asked.
    """
    return [
        _row(name, what, [run for run in kept["runs"] if name in run["figures"]]) for name, what in kept["rows"].items()
    ]


def _row(name: str, what: Mapping[str, Any], having: list[dict[str, Any]]) -> TableRow:
    of_runs = {key: [run["figures"][name][key] for run in having] for key in FIGURES}
    ratios, runs, days = of_runs["ratio"], len(having), len({run["date"] for run in having})
    met_in = None
    if what["target"] is not None:
        met_in = sum(bool(is_met(ratio, what["target"], what["within"])) for ratio in ratios)
    low, high = (median(ends) for ends in zip(*of_runs["spread"], strict=True))
    return TableRow(
        name=name,
        ours=median(of_runs["ours"]),
        peer=median(of_runs["peer"]),
        ratio=median(ratios),
        spread=(low, high),
        met=None if met_in is None or days < DAYS else met_in >= runs - runs // 5,
        range=(min(ratios), max(ratios)),
        runs=runs,
        days=days,
        met_in=met_in,
        newest=ratios[-1],
        **what,
    )


def figures(rows: Any) -> dict[str, dict[str, Any]]:
    """Those of a run's rows, by name, as they are kept.

    Raises:
        ValueError: they are no rows as ``pardemo bench --json`` prints them.
    """
    try:
        made = {row["name"]: {key: _rounded(row[key]) for key in FIGURES} for row in rows}
        if not rows or len(made) != len(rows) or not all("unit" in row and "target" in row for row in rows):
            raise ValueError("no row, two of a name, or one without unit or target")
        asked_of = {row["name"]: {key: row.get(key) for key in ASKED} for row in rows}
        as_text(table({"rows": asked_of, "runs": [{"date": "", "figures": made}]}))
    except WRONG as error:
        raise ValueError(f"a run is a list of rows, as `pardemo bench --json` prints it: {_line(error)}") from None
    return made


def read(path: Path) -> dict[str, Any]:
    """The runs that a file keeps; none where there is no file.

    Raises:
        ValueError: it keeps something else.
    """
    if not path.exists():
        return {"rows": {}, "runs": []}
    kept = json_of(path)
    try:
        for run in kept["runs"]:
            datetime.date.fromisoformat(run["date"])
            if strange := set(run["figures"]) - set(kept["rows"]):
                raise ValueError(f"figures of rows that are not there: {sorted(strange)}")
        as_text(table(kept))
    except WRONG as error:
        raise ValueError(f"{path} does not keep runs of the speed table: {_line(error)}") from None
    return kept


def json_of(path: Path) -> Any:
    """What a JSON file says. Raises ValueError: it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _line(error: Exception) -> str:
    return project.one_line(repr(error), 200)


def _rounded(figure: Any) -> Any:
    return [_rounded(each) for each in figure] if isinstance(figure, (list, tuple)) else float(f"{figure:.{DIGITS}g}")


def _in_order(new: list[str], before: list[str]) -> list[str]:
    """All names: those of the new run in their order, each other one behind the name that it followed before."""
    names, at = list(new), 0
    for name in before:
        if name not in names:
            names.insert(at, name)
        at = names.index(name) + 1
    return names


def _text(kept: Mapping[str, Any]) -> str:
    """JSON with a line for each row, so that what another run adds can be read as a difference."""
    rows = ",\n".join(f"  {json.dumps(name)}: {_compact(what)}" for name, what in kept["rows"].items())
    runs = ",\n".join(_run_text(run) for run in kept["runs"])
    return f'{{"rows": {{\n{rows}\n }},\n "runs": [\n{runs}\n ]}}\n'


def _run_text(run: Mapping[str, Any]) -> str:
    head = ",\n".join(f"  {json.dumps(key)}: {_compact(run[key])}" for key in ("date", "revision", "machine"))
    figures = ",\n".join(f"   {json.dumps(name)}: {_compact(each)}" for name, each in run["figures"].items())
    return f' {{\n{head},\n  "figures": {{\n{figures}\n  }}\n }}'


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
