"""The speed table of several runs, since one run is an anecdote: medians, ranges, and in how many a target was met.

``bench_runs.json`` keeps every run: its date, the revision of the code, the machine as ``machine.json`` says it, and
the figures of its rows. What a row compares and how much is asked of it stands there once, as the newest run says it.
``bench.json``, the table that others read, is made from it by ``pardemo bench --add``.
"""

import argparse
import datetime
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pardemo import project
from pardemo.bench import BenchRow, asked, is_met
from pardemo.tables import text_table

RUNS, TABLE = "bench_runs.json", "bench.json"
DIGITS = 6  # of the figures that are kept: two runs differ in the second or third
ASKED = ("unit", "target", "within", "note")  # what a row is, the same for all runs
DAYS = 5  # on so many a row is measured before its target counts as met or missed: days differ more than runs do


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
    project.write_atomically(folder / RUNS, lambda path: path.write_text(_text(kept), encoding="utf-8"))
    lines = ",\n".join(_compact(asdict(row)) for row in made)
    project.write_atomically(folder / TABLE, lambda path: path.write_text(f"[\n{lines}\n]\n", encoding="utf-8"))
    return made


def table(kept: Mapping[str, Any]) -> list[TableRow]:
    """The rows of all runs that ``bench_runs.json`` keeps. A row that only some of them have is made of those.

    Every run is judged by the present target, also one that was measured when less or more was asked.
    """
    return [
        _row(name, what, [run for run in kept["runs"] if name in run["figures"]]) for name, what in kept["rows"].items()
    ]


def _row(name: str, what: Mapping[str, Any], having: list[dict[str, Any]]) -> TableRow:
    figures = [run["figures"][name] for run in having]
    ratios = [each["ratio"] for each in figures]
    runs, days, target = len(having), len({run["date"] for run in having}), what["target"]
    met_in = None if target is None else sum(bool(is_met(ratio, target, what["within"])) for ratio in ratios)
    return TableRow(
        name=name,
        ours=median(each["ours"] for each in figures),
        peer=median(each["peer"] for each in figures),
        ratio=median(ratios),
        spread=(median(each["spread"][0] for each in figures), median(each["spread"][1] for each in figures)),
        met=None if met_in is None or days < DAYS else met_in >= runs - runs // 5,
        range=(min(ratios), max(ratios)),
        runs=runs,
        days=days,
        met_in=met_in,
        newest=ratios[-1],
        **what,
    )


def as_text(rows: Sequence[TableRow]) -> str:
    """The table of several runs for the terminal."""
    head = ("name", "ours", "peer", "unit", "ratio", "range", "target", "met", "peer is")
    return text_table([head, *map(_line, rows)])


def _line(row: TableRow) -> tuple[str, ...]:
    told = f"{'NO, ' if row.met is False else ''}in {row.met_in} of {row.runs}" if row.met_in is not None else ""
    if told and row.met is None:
        told = f"open: {told}, {row.days} of {DAYS} days"
    if told and not is_met(row.newest, row.target, row.within):
        told += f", newest {row.newest:.2f}"
    span = f"{row.range[0]:.2f} to {row.range[1]:.2f}"
    return (
        row.name,
        f"{row.ours:.4g}",
        f"{row.peer:.4g}",
        row.unit,
        f"{row.ratio:.2f}",
        span,
        asked(row),
        told,
        row.note,
    )


def command(arguments: argparse.Namespace) -> int:
    """``pardemo bench --add RUN.json``: status 1 where the table misses a target, as of a run."""
    from pardemo import machine

    if arguments.names:
        raise ValueError(f"--add takes a file with a run's rows; {', '.join(arguments.names)} would be measured")
    folder = Path(arguments.to) if arguments.to else project.root() / "outputs" / "reference"
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: --to names the one whose {RUNS} and {TABLE} are written")
    rows = json_of(Path(arguments.add))
    of_machine = json_of(Path(arguments.machine)) if arguments.machine else asdict(machine.profile())
    date = arguments.date or datetime.date.today().isoformat()
    made = add(folder, rows, date, arguments.revision or _revision(), of_machine)
    print(json.dumps([asdict(row) for row in made], indent=1) if arguments.json else as_text(made))
    return 1 if any(row.met is False for row in made) else 0


def _revision() -> str:
    try:
        asked_git = ["git", "-C", str(project.root()), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked_git, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        raise ValueError("git knows no revision here: say with --revision which code was measured") from None


def figures(rows: Any) -> dict[str, dict[str, Any]]:
    """Those of a run's rows, by name, as they are kept.

    Raises:
        ValueError: they are no rows as ``pardemo bench --json`` prints them.
    """
    try:
        made = {row["name"]: {key: _short(row[key]) for key in ("ours", "peer", "ratio", "spread")} for row in rows}
        if not rows or len(made) != len(rows) or not all("unit" in row and "target" in row for row in rows):
            raise ValueError("no row, two of a name, or one without unit or target")
        asked_of = {row["name"]: {key: row.get(key) for key in ASKED} for row in rows}
        as_text(table({"rows": asked_of, "runs": [{"date": "", "figures": made}]}))
    except (TypeError, LookupError, ValueError, AttributeError, OverflowError) as error:
        said = " ".join(repr(error).split())[:200]
        raise ValueError(f"a run is a list of rows, as `pardemo bench --json` prints it: {said}") from None
    return made


def _short(figure: Any) -> Any:
    return [_short(each) for each in figure] if isinstance(figure, (list, tuple)) else float(f"{figure:.{DIGITS}g}")


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


def read(path: Path) -> dict[str, Any]:
    """The runs that a file keeps; none where there is no file.

    Raises:
        ValueError: it keeps something else.
    """
    if not path.exists():
        return {"rows": {}, "runs": []}
    kept = json_of(path)
    try:
        dates = [datetime.date.fromisoformat(run["date"]) for run in kept["runs"]]
        made = table(kept)
        as_text(made)
        strange = {name for run in kept["runs"] for name in run["figures"]} - set(kept["rows"])
        if len(dates) != len(kept["runs"]) or strange:
            raise ValueError(f"figures of rows that are not there: {sorted(strange)}")
    except (TypeError, LookupError, ValueError, AttributeError, OverflowError) as error:
        said = " ".join(repr(error).split())[:200]
        raise ValueError(f"{path} does not keep runs of the speed table: {said}") from None
    return kept


def json_of(path: Path) -> Any:
    """What a JSON file says. Raises ValueError: it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
