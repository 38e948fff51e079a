"""Everything that takes too long for the gate, part by part: ``python .ci/nightly.py [PART …]``, or ``make nightly``.

Each part is a command; its output goes to outputs/nightly/PART.log. A part that fails does not stop the others. One
line for the run is added to docs/nightly.csv: date, commit, seconds, and which parts passed and failed. The exit status
is 0 only where all passed.
"""

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LOGS, TABLE = ROOT / "outputs" / "nightly", ROOT / "docs" / "nightly.csv"
COLUMNS = ("date", "commit", "seconds", "passed", "failed")
PYTHON = sys.executable
DAY = datetime.now(UTC).toordinal()
#: Environments of old releases: outside of the project, which the part's script insists on; made once, then used again.
RELEASES = Path(tempfile.gettempdir(), "pardemo-releases")
#: As a processor without AVX-512 computes: torch's kernels and oneDNN's.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


class Part(NamedTuple):
    """One part: its command, after how many minutes it is stopped, and what it adds to the environment."""

    command: tuple[str, ...]
    minutes: int
    environment: dict[str, str] | None = None


PARTS = {
    "lint": Part(("make", "lint"), 10),
    # the gate's and the others, notebooks with two ranks among them
    "tests": Part((PYTHON, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder",
                   "--costs", "tests/costs.csv"), 150),
    "notebooks": Part((PYTHON, ".ci/world_sizes.py", "--work", str(LOGS / "world_sizes")), 120),
    "avx2": Part((PYTHON, "-m", "pardemo", "run", "--out", str(LOGS / "avx2")), 40, AVX2),
    "zoo": Part((PYTHON, "tests/zoo/run.py"), 40),
    "layouts": Part((PYTHON, "tests/zoo/right/run.py", "--seed", str(DAY), "--count", "1000", "--jobs", "3"), 90),
    "soak": Part((PYTHON, "-m", "pardemo", "soak", "--minutes", "30", "--seed", str(DAY)), 50),
    "searched": Part((PYTHON, "tests/found/run.py"), 40),
    "releases": Part((PYTHON, "tests/releases/run.py", str(RELEASES)), 60),
    "environments": Part((PYTHON, "tests/fresh_environments.py"), 60),
    "newest": Part(("make", "newest"), 240),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    asked = parser.parse_args(argv).parts or list(PARTS)
    if unknown := [name for name in asked if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    begin, outcomes = time.monotonic(), {}
    for name in asked:
        since = time.monotonic()
        outcomes[name] = run(name, PARTS[name])
        print(f"{name:13} {time.monotonic() - since:6.0f} s  {outcomes[name]}", flush=True)
    add(outcomes, time.monotonic() - begin)
    return int(any(text != "passed" for text in outcomes.values()))


def run(name: str, part: Part) -> str:
    """``passed``, or in what way the part failed; a part that is stopped takes all that it started with it."""
    with (LOGS / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, **(part.environment or {})}, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(part.minutes * 60)
        except BaseException as error:  # its time is over, or somebody has had enough
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"not over after {part.minutes} minutes"
    return "passed" if status == 0 else f"exit status {status}"


def add(outcomes: dict[str, str], seconds: float) -> None:
    """Adds the run's line to the table."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    passed = [name for name, text in outcomes.items() if text == "passed"]
    failed = [f"{name} ({text})" for name, text in outcomes.items() if text != "passed"]
    new = not TABLE.exists()
    with TABLE.open("a", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        if new:
            table.writerow(COLUMNS)
        table.writerow(
            [f"{datetime.now(UTC):%Y-%m-%d}", commit.strip(), f"{seconds:.0f}", " ".join(passed), "; ".join(failed)]
        )


if __name__ == "__main__":
    shutil.rmtree(LOGS, ignore_errors=True)
    sys.exit(main())
