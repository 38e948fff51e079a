"""Runs a script on warm ranks, watches it, and reports where it fails."""

import ast
import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pardemo import World
from pardemo.cluster import Cluster
from pardemo.project import first_line, one_line
from pardemo.script.hangs import journal, standstill
from pardemo.script.hangs.deadlock_watch import DeadlockWatch
from pardemo.script.hangs.journal import Log
from pardemo.script.hangs.standstill import Standstill
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.runtime.libraries import is_script
from pardemo.script.words import at_line, first_of, shortened
from pardemo.world.errors import STOPPED, RankDied, RankError, RankFailed, RankTimeout, exit_text, ranks_text

#: Libraries that take seconds to import: the ranks' fork server loads those that a script names, once for all of them.
HEAVY = ("transformers", "accelerate", "deepspeed", "megatron.core", "peft", "datasets", "torchvision")
#: Called in the fork server once all is loaded there.
READ_MODULES = "pardemo.script.runtime.stand_ins:read_modules"
#: What a rank takes before the script's own memory: 64 of them took 6.2 GB.
RANK_BYTES = 100e6
#: Characters of an exception's text that one line has room for.
LONGEST = 300


class ScriptError(ValueError):
    """Raised where the script could not be measured; says in one line what is wrong, ``details`` where.

    ``standstill``: of a run that began, which ranks waited for which others, and where they parted. ``timed_out``:
    whether its time was over, and not given up before. ``raised``: whether a rank raised or exited.
    """

    def __init__(self, message: str, details: str = "", still: Standstill | None = None):
        super().__init__(message)
        self.details, self.standstill = details, still
        self.timed_out = self.raised = False


def script_text(launch: Launch, folder: str) -> tuple[Launch, str]:
    """Returns the launch with an absolute path, and the script's text; a module's is empty.

    Raises:
        ScriptError: there is no such file.
    """
    if launch.module:
        return launch, ""
    source = Path(folder, launch.script)
    if source.is_dir():
        raise ScriptError(f"{launch.script} is a folder: name the script in it")
    if not source.is_file():
        raise ScriptError(f"there is no script {launch.script}")
    return replace(launch, script=str(source.resolve())), source.read_text(encoding="utf-8", errors="replace")


def run_on_ranks(
    function: Callable[[Any], Any],
    task: Any,
    text: str,
    *,
    name: str,
    ranks: int,
    journals: str,
    timeout_s: float,
    cluster: Cluster | None = None,
) -> list[Any]:
    """Runs ``function(task)`` on so many warm ranks, which have loaded what the script imports; returns the results.

    Args:
        text: the script's. name: what it is called in errors. journals: the folder of the ranks' logs, by which they
            are given up as soon as they can never go on.

    Raises:
        ScriptError: what happened to the ranks.
    """
    loaded = [function.__module__, READ_MODULES, *heavy_imports(text)]
    world = World(ranks, cluster=cluster, preload=loaded, timeout_s=timeout_s, backend="gloo")
    watch = DeadlockWatch(world, journals)
    try:
        with world, watch:
            return world.run(function, task)
    except RankError as error:
        failure = script_error(name, error, journal.read_logs(journals), watch.until_s or time.monotonic())
        failure.timed_out = isinstance(error, RankTimeout) and error.timeout_s >= timeout_s
        raise failure from None


def heavy_imports(text: str) -> list[str]:
    """Returns libraries of :data:`HEAVY` that the script imports; none where the script cannot be read."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return [heavy for heavy in HEAVY if any(name == heavy or name.startswith(heavy + ".") for name in named)]


def script_error(name: str, error: RankError, logs: dict[int, Log], at_s: float) -> ScriptError:
    """Makes one line of what happened to the ranks and of those that wait."""
    deaths = {rank: exit_text(code) for rank, code in error.deaths.items()} if isinstance(error, RankDied) else {}
    stacks = getattr(error, "stacks", {})
    lines = {rank: STOPPED if stack.startswith(STOPPED) else _script_line(stack) for rank, stack in stacks.items()}
    still = standstill.standstill_of(logs, at_s, lines, deaths)
    parted = still.first is not None and still.first.differ
    if isinstance(error, RankDied) and set(error.deaths.values()) == {0}:
        line = f"{ranks_text(list(error.deaths))} ended by os._exit(0), which leaves no report"
    elif isinstance(error, RankDied):
        then = still.line if parted else still.waited
        line = _as_part(first_line(error)) + (f"; {then}" if then else "")
    elif parted or (isinstance(error, RankTimeout) and still.stuck):
        line = still.line
    elif isinstance(error, RankFailed):
        failure = ScriptError(_raised_text(name, error, still), str(error), still)
        failure.raised = True
        return failure
    elif isinstance(error, RankTimeout):
        line = "; ".join(filter(None, (f"not over after {error.timeout_s:g} s: {still.whereabouts}", error.busy)))
    else:
        line = _as_part(error)
    return ScriptError(f"{name}: {line}", str(error), still)


def _raised_text(name: str, error: RankFailed, still: Standstill) -> str:
    rank, failure = error.first
    if failure.type == "Exited":
        ranks = [rank for rank, other in error.failures.items() if other.message == failure.message]
        alone = f" (on {ranks_text(ranks)})" if error.stopped or len(ranks) < len(error.failures) else ""
        return f"{name} ended by {_as_part(failure.message)}; what it printed says why{alone}"
    if failure.type == "OwnProcesses":
        return f"{name}: {failure.message}"
    asks = "EOF when reading a line" in failure.headline  # as input() says it
    hint = ": ranks have no standard input, so a script cannot ask" if asks else ""
    site = at_line("".join(_script_lines(failure.traceback)[-1:]))
    waited = f"; {still.waited}" if still.waits else ""
    return f"{name}: rank {rank} raised {_as_part(failure.headline)}{site}{hint}{waited}"


def _as_part(message: object) -> str:
    """Returns a message of any length as a part of a line."""
    return shortened(one_line(message), LONGEST)


def _script_line(stack: str) -> str:
    """Returns the script's line in a stack of its main thread, which stands last."""
    lines = _script_lines(stack.rpartition("most recent call first")[2])
    return lines[0] if lines else ""


def _script_lines(frames: str) -> list[str]:
    """``train.py:7`` of those frames that are no library's, Python's or pardemo's."""
    named = re.findall(r'File "([^<>"]+)", line (\d+)', frames)
    return [f"{os.path.basename(file)}:{line}" for file, line in named if is_script(file)]


#: Folders that a scratch copy leaves out: environments, histories, caches.
LEFT_OUT = (".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache")


#: A folder above this is no script's: it is refused before a copy fills the disk.
LARGEST_COPY = 2e9


@dataclass
class Scratch:
    """A copy of a folder, with the files that it had in the beginning and their times."""

    folder: str
    before: dict[str, int]

    @property
    def note(self) -> str:
        """Says which files the script wrote."""
        wrote = [name for name, when in _files_of(self.folder).items() if self.before.get(name) != when]
        return f"it ran in a scratch copy, which is removed; it wrote {first_of(sorted(wrote), 5) or 'no files'}"


@contextlib.contextmanager
def scratch(folder: str) -> Iterator[Scratch]:
    """Copies a folder until the block ends.

    Raises:
        ValueError: the folder has more than 2 GB.
    """
    size = sum(os.lstat(os.path.join(folder, name)).st_size for name in _files_of(folder))
    if size > LARGEST_COPY:
        raise ValueError(f"--copy would copy {size / 1e9:.1f} GB: run it where the script is, and little else")
    with tempfile.TemporaryDirectory(prefix="pardemo-copy-") as temporary:
        copy = os.path.join(temporary, "copy")
        shutil.copytree(folder, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield Scratch(copy, _files_of(copy))


def _files_of(folder: str) -> dict[str, int]:
    """Returns a folder's files and when they changed, in ns, without :data:`LEFT_OUT`."""
    times = {}
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(OSError):
                times[os.path.relpath(path, folder)] = os.lstat(path).st_mtime_ns
    return times
