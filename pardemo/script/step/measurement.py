"""A script, measured: run on ranks, summed up, explained."""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from pardemo import World
from pardemo.cluster import Cluster
from pardemo.script.hangs import journal
from pardemo.script.hangs.standstill import Watch
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.runtime.runner import RANK_BYTES, READ_MODULES, ScriptError, heavy_imports, script_error
from pardemo.script.step import findings, rank, summary
from pardemo.script.step.rank import Program, Seen
from pardemo.script.step.summary import Summary
from pardemo.world.errors import RankError


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
        loaded = [rank.__name__, READ_MODULES, *heavy_imports(text)]
        world = World(ranks, cluster=cluster, preload=loaded, timeout_s=timeout_s, backend="gloo")
        with world, Watch(world, journals) as watch:
            seen = world.run(rank.run, asked)
        found = summary.summarize(seen)
        found.hosts = cluster.hosts if cluster else 1
    except RankError as error:
        at_s = watch.until_s if watch else time.monotonic()
        raise script_error(os.path.basename(path), error, journal.read(journals), at_s) from None
    except ValueError as error:
        raise error if isinstance(error, ScriptError) else ScriptError(f"{os.path.basename(path)}: {error}") from None
    finally:
        if log is not None:
            journal.write_csv(journal.read(journals), log)
        shutil.rmtree(journals, ignore_errors=True)
    findings.explain(found)
    return found, seen
