"""A script on warm ranks: started, watched, and told about where it fails."""

import ast
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from pardemo import World
from pardemo.cluster import Cluster
from pardemo.measure import findings, journal, program, standstill, summary
from pardemo.measure.journal import Log
from pardemo.measure.launch_lines import Launch
from pardemo.measure.libraries import is_script
from pardemo.measure.program import Program, Seen
from pardemo.measure.standstill import Standstill
from pardemo.measure.summary import Summary
from pardemo.measure.watch import Watch
from pardemo.world.errors import STOPPED, RankDied, RankError, RankFailed, RankTimeout, exit_text, ranks_text

#: Libraries that take seconds to import: the ranks' nursery loads those that a script names, once for all of them.
HEAVY = ("transformers", "accelerate", "deepspeed", "megatron.core", "peft", "datasets", "torchvision")
#: Called in the nursery once all is loaded there.
READ_MODULES = "pardemo.measure.stand_ins:read_modules"
#: What a rank takes before the script's own memory: 64 of them took 6.2 GB.
RANK_BYTES = 100e6
#: Characters of an exception's text that one line has room for.
LONGEST = 300


class ScriptError(ValueError):
    """The script could not be measured; the message says in one line what is wrong, ``details`` where.

    ``standstill``: of a run that began, which ranks waited for which others, and where they parted.
    """

    def __init__(self, message: str, details: str = "", still: Standstill | None = None):
        super().__init__(message)
        self.details, self.standstill = details, still


def script(
    path: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 4,
    cluster: Cluster | None = None,
    steps: int = 3,
    module: bool = False,
    folder: str | os.PathLike[str] | None = None,
    timeout_s: float = 600.0,
) -> Summary:
    """Runs a training script on ranks of this machine and says what its median step did.

    Args:
        path: the script, or with ``module`` a module's name, as of ``python -m``.
        arguments: the script's own.
        ranks: how many. cluster: hosts and links with limits, of as many ranks.
        steps: of the optimizer, that are measured, after three that warm up.
        folder: where the script runs; the present one by default. timeout_s: for the whole run.

    Raises:
        ScriptError: there is no such script; it raised, ended too early, hung, or its ranks parted.
    """
    launch = Launch(path, tuple(arguments), module)
    return measured(launch, ranks=ranks, cluster=cluster, steps=steps, folder=folder, timeout_s=timeout_s)[0]


def measured(
    launch: Launch,
    *,
    ranks: int,
    cluster: Cluster | None,
    steps: int,
    folder: str | os.PathLike[str] | None,
    timeout_s: float,
    work: bool = False,
    layer_s: float = 0.0,
    log: Path | None = None,
) -> tuple[Summary, list[Seen]]:
    """As :func:`script`, of what a launcher would start; also what each rank saw, for files.

    ``log``: a file for the table of all calls, which is written also of a run that failed, or was interrupted.
    """
    path = launch.script
    if steps < 1:
        raise ScriptError(f"steps must be at least 1, not {steps}")
    where = os.path.abspath(folder or os.getcwd())
    source = None if launch.module else Path(where, path)
    if source is not None and source.is_dir():
        raise ScriptError(f"{path} is a folder: name the script in it")
    if source is not None and not source.is_file():
        raise ScriptError(f"there is no script {path}")
    if (free := psutil.virtual_memory().available) < ranks * RANK_BYTES:
        needed = f"{ranks} ranks take {ranks * RANK_BYTES / 1e9:.1f} GB before the script has anything"
        raise ScriptError(f"{needed}, and {free / 1e9:.1f} GB are free: say fewer with --ranks")
    text = "" if source is None else source.read_text(encoding="utf-8", errors="replace")
    journals = tempfile.mkdtemp(prefix="pardemo-measure-")
    started = replace(launch, script=str(source.resolve())) if source else launch
    asked = Program(started, steps, where, journals, work, layer_s)
    watch = None
    try:
        loaded = [program.__name__, READ_MODULES, *heavy_imports(text)]
        world = World(ranks, cluster=cluster, preload=loaded, timeout_s=timeout_s, backend="gloo")
        with world, Watch(world, journals) as watch:
            seen = world.run(program.run, asked)
        found = summary.of(seen)
        found.hosts = cluster.hosts if cluster else 1
    except RankError as error:
        at_s = watch.until_s if watch else time.monotonic()
        raise script_error(_name(path), error, journal.read(journals), at_s) from None
    except ValueError as error:
        raise error if isinstance(error, ScriptError) else ScriptError(f"{_name(path)}: {error}") from None
    finally:
        if log is not None:
            journal.write_csv(journal.read(journals), log)
        shutil.rmtree(journals, ignore_errors=True)
    findings.explain(found)
    return found, seen


def _name(path: str) -> str:
    return os.path.basename(path)


def heavy_imports(text: str) -> list[str]:
    """Libraries of :data:`HEAVY` that the script imports; none where it cannot be read, which running it will say."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    named |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return [heavy for heavy in HEAVY if any(name == heavy or name.startswith(heavy + ".") for name in named)]


def script_error(name: str, error: RankError, logs: dict[int, Log], at_s: float) -> ScriptError:
    """One line for what happened to the ranks, with what is told of those that wait."""
    deaths = {rank: exit_text(code) for rank, code in error.deaths.items()} if isinstance(error, RankDied) else {}
    stacks = getattr(error, "stacks", {})
    lines = {rank: STOPPED if stack.startswith(STOPPED) else _here(stack) for rank, stack in stacks.items()}
    still = standstill.told(logs, at_s, lines, deaths)
    parted = still.first is not None and still.first.differ
    if isinstance(error, RankDied) and set(error.deaths.values()) == {0}:
        line = f"{ranks_text(list(error.deaths))} ended by os._exit(0), which leaves no report"
    elif isinstance(error, RankDied):
        then = still.line if parted else still.waited
        line = _line(str(error).partition("\n")[0]) + (f"; {then}" if then else "")
    elif parted or (isinstance(error, RankTimeout) and still.stuck):
        line = still.line
    elif isinstance(error, RankFailed):
        return ScriptError(_raised(name, error, still), str(error), still)
    elif isinstance(error, RankTimeout):
        line = "; ".join(filter(None, (f"not over after {error.timeout_s:g} s: {_waiting(error, logs)}", error.busy)))
    else:
        line = _line(str(error))
    return ScriptError(f"{name}: {line}", str(error), still)


def _raised(name: str, error: RankFailed, still: Standstill) -> str:
    rank, failure = error.first
    if failure.type == "Exited":
        ranks = [one for one, other in error.failures.items() if other.message == failure.message]
        alone = f" (on {ranks_text(ranks)})" if error.stopped or len(ranks) < len(error.failures) else ""
        return f"{name} ended by {_line(failure.message)}; what it printed says why{alone}"
    if failure.type == "OwnProcesses":
        return f"{name}: {failure.message}"
    asks = "EOF when reading a line" in failure.headline  # as input() says it
    hint = ": ranks have no standard input, so a script cannot ask" if asks else ""
    where = _at(failure.traceback)
    waited = f"; {still.waited}" if still.waits else ""
    return f"{name}: rank {rank} raised {_line(failure.headline)}{where}{hint}{waited}"


def _line(text: str) -> str:
    """A message of any length as a part of a line: its begin and its end."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def _waiting(error: RankTimeout, logs: dict[int, Log]) -> str:
    """What each rank is in: a collective, or a line after one; ranks that are in the same share a part."""
    alike: dict[str, list[int]] = {"finished": error.finished}
    for rank, stack in sorted(error.stacks.items()):
        calls = logs[rank].calls if rank in logs else []
        here = _here(stack)
        if stack.startswith(STOPPED):
            what = STOPPED
        elif not calls:
            what = f"at {here or 'a line that is not known'}, before any collective"
        elif here in ("", calls[-1].line):
            what = f"in {standstill.named(calls[-1])}"
        else:
            what = f"at {here}, after {standstill.named(calls[-1])}"
        alike.setdefault(what, []).append(rank)
    done = alike.pop("finished")
    parts = [f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} {what}" for what, ranks in alike.items()]
    return "; ".join([*parts, *([f"the script has ended on {ranks_text(done)}"] if done else [])])


def _here(stack: str) -> str:
    """The reader's line in a stack, of its main thread, which stands last."""
    own = _own_frames(stack.rpartition("most recent call first")[2])
    return f"{_name(own[0][0])}:{own[0][1]}" if own else ""


def _at(traceback: str) -> str:
    """Where in the reader's files an exception came from."""
    own = _own_frames(traceback)
    return f", at {_name(own[-1][0])}:{own[-1][1]}" if own else ""


def _own_frames(frames: str) -> list[tuple[str, str]]:
    """File and line of those frames that are no library's, Python's or pardemo's."""
    return [frame for frame in re.findall(r'File "([^<>"]+)", line (\d+)', frames) if is_script(frame[0])]
