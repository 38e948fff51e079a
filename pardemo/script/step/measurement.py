"""Measures a script: runs it on ranks, sums up its median step, and explains it."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from pardemo import argument_checks
from pardemo.cluster import Cluster
from pardemo.script.hangs import journal
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.runtime.runner import RANK_BYTES, ScriptError, run_on_ranks, script_text
from pardemo.script.step import findings, rank_trace, summary
from pardemo.script.step.pace import PaceSettings
from pardemo.script.step.rank_trace import RankTrace, RecordedProgram
from pardemo.script.step.summary import Summary


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
    return measure_launch(launch, ranks=ranks, cluster=cluster, steps=steps, folder=folder, timeout_s=timeout_s)[0]


def measure_launch(
    launch: Launch,
    *,
    ranks: int,
    cluster: Cluster | None,
    steps: int,
    folder: str | os.PathLike[str] | None,
    timeout_s: float,
    pace: PaceSettings | None = None,
    log: Path | None = None,
) -> tuple[Summary, list[RankTrace]]:
    """Measures what a launcher would start, as :func:`script` does; also returns what each rank saw, for files.

    Args:
        pace: whose step is predicted: its operations are recorded, and layers take the time that it says.
        log: a file for the table of all calls, which is written also of a run that failed, or was interrupted.
    """
    argument_checks.whole_number(steps, "steps")
    working_folder = os.path.abspath(folder or os.getcwd())
    started, text = script_text(launch, working_folder)
    if (free := psutil.virtual_memory().available) < ranks * RANK_BYTES:
        needed = f"{ranks} ranks take {ranks * RANK_BYTES / 1e9:.1f} GB before the script has anything"
        raise ScriptError(f"{needed}, and {free / 1e9:.1f} GB are free: say fewer with --ranks")
    name = os.path.basename(launch.script)
    journals = tempfile.mkdtemp(prefix="pardemo-measure-")
    layer_s = pace.layer_s if pace else 0.0
    program = RecordedProgram(started, steps, working_folder, journals, work=pace is not None, layer_s=layer_s)
    try:
        traces = run_on_ranks(
            rank_trace.follow_script,
            program,
            text,
            name=name,
            ranks=ranks,
            journals=journals,
            timeout_s=timeout_s,
            cluster=cluster,
        )
        step_summary = summary.summarize(traces)
        step_summary.hosts = cluster.hosts if cluster else 1
    except ValueError as error:
        raise error if isinstance(error, ScriptError) else ScriptError(f"{name}: {error}") from None
    finally:
        if log is not None:
            journal.write_csv(journal.read_logs(journals), log)
        shutil.rmtree(journals, ignore_errors=True)
    findings.explain(step_summary)
    return step_summary, traces
