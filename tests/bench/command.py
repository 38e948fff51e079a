"""``pardemo bench``: measures, or adds a run to the table of several."""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench import BENCHES, runs, table
from pardemo import machine, project
from pardemo.closed_pipe import work_goes_on


@work_goes_on()
def main(argv: Sequence[str]) -> int:
    """Returns 0; 1 where a row misses its target.

    Raises:
        ValueError, OSError: of bad input, for a line to the user.
    """
    parser = argparse.ArgumentParser(prog="pardemo bench", description="The speed table: ratios to a peer.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHES)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    several = parser.add_argument_group("the table of several runs: medians, ranges, in how many a target was met")
    several.add_argument("--add", metavar="RUN.json", help="a run's --json: add it to the runs, make the table anew")
    several.add_argument("--to", metavar="DIR", help="where bench_runs.json and bench.json are (outputs/reference)")
    several.add_argument("--date", metavar="YYYY-MM-DD", help="of the run (today)")
    several.add_argument("--revision", metavar="REV", help="of the code that was measured (git's HEAD)")
    several.add_argument("--machine", metavar="FILE", help="the machine.json of the run (this machine's profile)")
    arguments = parser.parse_args(argv)
    if arguments.add:
        rows = _added(arguments)
    elif given := [f"--{name}" for name in ("to", "date", "revision", "machine") if getattr(arguments, name)]:
        raise ValueError(f"{', '.join(given)} without --add: a run is measured, and written where its output goes")
    else:
        rows = table.run(arguments.names, lambda name: print(f"bench {name} …", file=sys.stderr, flush=True))
    print(json.dumps([asdict(row) for row in rows], indent=1) if arguments.json else table.as_text(rows))
    return 1 if any(row.met is False for row in rows) else 0


def _added(arguments: argparse.Namespace) -> list[runs.TableRow]:
    if arguments.names:
        raise ValueError(f"--add takes a file with a run's rows; {', '.join(arguments.names)} would be measured")
    folder = Path(arguments.to) if arguments.to else project.root() / "outputs" / "reference"
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: --to names the one whose {runs.RUNS} and {runs.TABLE} are written")
    rows = runs.json_of(Path(arguments.add))
    of_machine = runs.json_of(Path(arguments.machine)) if arguments.machine else asdict(machine.profile())
    date = arguments.date or datetime.date.today().isoformat()
    return runs.add(folder, rows, date, arguments.revision or _revision(), of_machine)


def _revision() -> str:
    try:
        asked_git = ["git", "-C", str(project.root()), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked_git, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        raise ValueError("git knows no revision here: say with --revision which code was measured") from None
