"""What the tests cost in CPU seconds, by file and by group: each run prints it beside the budgets of costs.toml.

A file's CPU seconds are those of the process that runs its tests and of all that descend from it, ranks and kernels
too, as ``/proc`` counts them. The clock says less: two workers share two cores with all that they start.

    pytest -n 3 --costs tests/costs.csv      # the table of all files, which is committed
"""

import csv
import fnmatch
import os
import time
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
HERE = Path(__file__).parent
#: How often the processes are looked at within a file, at most: a look takes some milliseconds.
EVERY_S = 0.5
START = "imports"  # what a worker spends before its first test


def cpu_seconds(root):
    """User and system seconds of this process, its living descendants, and all that they have waited for."""
    children, spent = defaultdict(list), {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended since: its parent has its seconds, or will
            continue
        children[int(fields[1])].append(int(entry.name))
        spent[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS
    total, todo = 0.0, [root]
    while todo:
        pid = todo.pop()
        total += spent.get(pid, 0.0)
        todo += children[pid]
    return total


def groups():
    """The groups of costs.toml: by name the patterns of their files, and their budget in CPU seconds."""
    return tomllib.loads((HERE / "costs.toml").read_text(encoding="utf-8"))


def group_of(file, known):
    """The group of a test file, by its path below tests/; None where no pattern has it."""
    return next((name for name, row in known.items() if any(fnmatch.fnmatch(file, p) for p in row["files"])), None)


class Costs:
    """A plug-in that adds up what each file costs, on the workers of pytest-xdist too, and tells it at the end."""

    def __init__(self, config):
        self.config = config
        self.cpu_s, self.wall_s, self.tests = Counter(), Counter(), Counter()
        self.looked_s = self.at_s = 0.0

    def _look(self, file):
        now, spent = time.monotonic(), cpu_seconds(os.getpid())
        self.cpu_s[file] += max(0.0, spent - self.looked_s)
        self.looked_s, self.at_s = spent, now

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self):
        begin = time.monotonic()
        result = yield
        self.wall_s[START] += time.monotonic() - begin
        self._look(START)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        begin = time.monotonic()
        result = yield
        file = item.path.relative_to(HERE).as_posix()
        self.tests[file] += 1
        self.wall_s[file] += time.monotonic() - begin
        if nextitem is None or nextitem.path != item.path or time.monotonic() - self.at_s > EVERY_S:
            self._look(file)
        return result

    def pytest_sessionfinish(self):
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["costs"] = [dict(self.cpu_s), dict(self.wall_s), dict(self.tests)]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        for mine, theirs in zip(
            (self.cpu_s, self.wall_s, self.tests), node.workeroutput.get("costs", ()), strict=False
        ):
            mine.update(theirs)

    def pytest_terminal_summary(self, terminalreporter):
        if hasattr(self.config, "workeroutput"):
            return
        known = groups()
        if target := self.config.option.costs:
            self._write(Path(target), known)
        if len(self.tests) < 20:  # somebody tries a few files
            return
        by_group = Counter()
        for file, cpu_s in self.cpu_s.items():
            by_group[group_of(file, known) or file] += cpu_s
        terminalreporter.section(f"{sum(by_group.values()):.0f} CPU seconds")
        for name, cpu_s in by_group.most_common():
            budget = known.get(name, {}).get("cpu_s")
            over = "  has outgrown it" if budget is not None and cpu_s > budget else ""
            terminalreporter.write_line(f"{name:28} {cpu_s:7.0f}" + (f" of {budget}{over}" if budget else ""))

    def _write(self, path, known):
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["file", "group", "tests", "cpu_s", "wall_s"])
            for name, cpu_s in self.cpu_s.most_common():
                table.writerow(
                    [name, group_of(name, known), self.tests[name], f"{cpu_s:.1f}", f"{self.wall_s[name]:.1f}"]
                )
