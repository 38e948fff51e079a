"""Draws mutants of the core, runs the tests of their package on each, and writes a table of those that no test kills.

    PYTHONPATH=$PWD python tests/mutants.py --count 100 --seed 1 --gate     # the table: tests/mutants.json
    PYTHONPATH=$PWD python tests/mutants.py --check                         # the same tests on the tree as it is

A line of code is drawn first, each as likely as any other, then one of its mutants (mutations.py). Each is applied in a
scratch copy of the tree, one at a time; the tests of its part (mutants.toml) run there in one call that ends at the
first failure, the cheapest files first. A test that takes more than TEST_S CPU seconds in its own process fails; where
all of them take more than ``--limit``, the mutant has survived those that ran (``unfinished``). With ``--gate``, tests
that are marked ``nightly`` run only on what the others leave alive.

A table that is there is continued: what has an outcome is not run again, but for survivors with ``--survivors``. Who
looks at a survivor that computes the same writes the reason into its ``equivalent``.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mutations import mutants_of

HERE = Path(__file__).resolve().parent.parent
NO_NUMBERS = {"charts.py", "drawings.py", "map_drawing.py"}
TEST_S = 60

#: Parts of the package, and their files of tests.
TESTS: dict[str, str] = tomllib.loads((HERE / "tests" / "mutants.toml").read_text())


def tests_of(file: str) -> list[str]:
    """The files of tests for a module, from its own part of the package to its package."""
    parts = sorted((part for part in TESTS if file.startswith(f"pardemo/{part}")), key=len, reverse=True)
    names = dict.fromkeys(name for part in parts for name in TESTS[part].split())
    return [f"tests/test_{name}.py" for name in names]


def draw(seed: int, count: int) -> list[dict]:
    """So many different mutants, the same for the same seed and tree."""
    found = {str(path.relative_to(HERE)): path for path in sorted(HERE.glob("pardemo/**/*.py"))}
    sources = {name: path.read_text() for name, path in found.items() if tests_of(name) and path.name not in NO_NUMBERS}
    lines = [(file, line, each) for file, text in sources.items() for line, each in sorted(mutants_of(text).items())]
    drawn: dict[tuple, dict] = {}
    chance = random.Random(seed)
    while len(drawn) < count:
        file, line, each = chance.choice(lines)
        before, after, module = chance.choice(each)
        drawn[file, line, before, after] = {"file": file, "line": line, "before": before, "after": after, "as": module}
    return list(drawn.values())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of this file as a plug-in of pytest: the files' tests in the order of the command, not the longest first."""
    order = {name: place for place, name in enumerate(os.environ["MUTANTS_ORDER"].split())}
    items.sort(key=lambda item: order[item.path.name])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A loop without an end ends here: with the signal's default action pytest itself would."""

    def over(*_: object) -> None:
        raise TimeoutError(f"more than {TEST_S} CPU seconds")

    signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, TEST_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def run_tests(tree: Path, files: list[str], marked: str, limit_s: float) -> tuple[str | None, float]:
    """The first test that fails in the scratch tree, None where none does, and the CPU seconds of all processes.

    Past the limit they are ended, and ``used`` is above it.
    """
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-p", "mutants", "--tb=no", "-rfE"]
    order = " ".join(Path(file).name for file in files)
    env = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'tests'}", "MUTANTS_ORDER": order}
    with tempfile.TemporaryFile("w+") as shown:
        tests = subprocess.Popen([*command, "-m", marked, *files], cwd=tree, env=env, stdout=shown, stderr=shown)
        used, until = 0.0, time.monotonic() + 20 * limit_s  # a hang takes no CPU seconds
        while tests.poll() is None and used < limit_s and time.monotonic() < until:
            time.sleep(0.5)
            family: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                family = [psutil.Process(tests.pid), *psutil.Process(tests.pid).children(recursive=True)]
            with contextlib.suppress(psutil.NoSuchProcess):
                used = max(used, sum(sum(process.cpu_times()[:4]) for process in family))
        if tests.poll() is None:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            tests.wait()
            return None, max(used, limit_s)
        shown.seek(0)
        text = shown.read()
    if tests.returncode in (0, 5):  # passed, or nothing to run
        return None, used
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return failed[1] if failed else f"(no test began: {text.strip().splitlines()[-1][:120]})", used


def try_one(tree: Path, mutant: dict, gate: bool, limit_s: float) -> None:
    """Writes into a mutant's row which test kills it, and of which part: ``gate``, ``nightly`` or ``all``."""
    path, files = tree / mutant["file"], tests_of(mutant["file"])
    original, times = path.read_text(), path.stat()
    path.write_text(mutant["as"])
    mutant.update(killed_by=None, of=None, cpu_s=0.0)
    try:
        for part, marked in {"gate": "not nightly", "nightly": "nightly"}.items() if gate else [("all", "")]:
            killed_by, used = run_tests(tree, files, marked, limit_s)
            mutant["cpu_s"] = round(mutant["cpu_s"] + used, 1)
            mutant["unfinished"] = used >= limit_s
            if killed_by is not None:
                mutant.update(killed_by=killed_by, of=part)
                return
    finally:
        path.write_text(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # Python's own copy is by time and size


def written(table: Path, seed: int, mutants: list[dict]) -> dict[str, int]:
    """Writes the table, a line for each mutant, and returns its counts."""
    done = [{name: value for name, value in m.items() if name != "as"} for m in mutants if "killed_by" in m]
    outcomes = [m["of"] or ("equivalent" if m.get("equivalent") else "survived") for m in done]
    counts = {"mutants": len(done), **{f"killed, {k}" if k in ("gate", "nightly", "all") else k: v
                                       for k, v in sorted(collections.Counter(outcomes).items())}}  # fmt: skip
    rows = ",\n  ".join(json.dumps(m, ensure_ascii=False) for m in done)
    table.write_text(f'{{\n "seed": {seed},\n "counts": {json.dumps(counts)},\n "mutants": [\n  {rows}\n ]\n}}\n')
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, metavar="CPU_SECONDS", help="of one mutant (60)")
    parser.add_argument("--gate", action="store_true", help='run -m "not nightly", and the others on survivors alone')
    parser.add_argument("--survivors", action="store_true", help="run those again that are not marked as equivalent")
    parser.add_argument("--check", action="store_true", help="run the tests of every part on the tree as it is")
    parser.add_argument("--table", type=Path, default=HERE / "tests" / "mutants.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=HERE, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HERE / name, tree / name)
        if arguments.check:
            for file in sorted({file for part in TESTS for file in tests_of(f"pardemo/{part}")}):
                print(file, *run_tests(tree, [file], "", arguments.limit), flush=True)
            return
        known = json.loads(arguments.table.read_text())["mutants"] if arguments.table.exists() else []
        rows = {(m["file"], m["line"], m["before"], m["after"]): m for m in known}
        mutants = draw(arguments.seed, arguments.count)
        for mutant in mutants:
            mutant.update(rows.get((mutant["file"], mutant["line"], mutant["before"], mutant["after"]), {}))
        for mutant in mutants:
            survived = mutant.get("killed_by") is None and not mutant.get("equivalent")
            if "killed_by" not in mutant or (arguments.survivors and survived):
                try_one(tree, mutant, arguments.gate, arguments.limit)
                print("{file}:{line}  {before}  →  {after}  {killed_by}  {cpu_s} s".format(**mutant), flush=True)
            print(*(f"{k}: {v}" for k, v in written(arguments.table, arguments.seed, mutants).items()), sep=", ")


if __name__ == "__main__":
    main()
