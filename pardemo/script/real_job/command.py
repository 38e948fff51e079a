"""Adds ``pardemo compare`` to the command line, and runs it."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pardemo import project


def add_compare(commands: Any) -> None:
    """Adds the subcommand to the command line's parser."""
    compare = commands.add_parser(
        "compare",
        help="a real job beside its rehearsal: the first call that differs, what nobody predicted, who waits for whom",
        usage="pardemo compare REHEARSAL FILES… [OPTIONS]",
        description="REHEARSAL is the folder of pardemo measure --out. FILES, or folders of them, are what a job "
        "writes: dumps of torch's flight recorder, traces of torch's profiler, memory snapshots, logs of torchtitan or "
        "Megatron-LM. Exit status: 0 as rehearsed, 1 different, 2 a file could not be read.",
    )
    compare.add_argument("rehearsal", metavar="REHEARSAL", help=argparse.SUPPRESS)
    compare.add_argument("files", nargs="+", metavar="FILES", help=argparse.SUPPRESS)
    compare.add_argument(
        "--same-size",
        action="store_true",
        help="the job has the rehearsal's model, batch and ranks: compare bytes, too",
    )
    compare.add_argument(
        "--profile", metavar="FILE", help="write the rates of the machine, for pardemo plan --gpu FILE"
    )
    compare.add_argument("--json", action="store_true", help="print the comparison as JSON")
    compare.set_defaults(action=run_compare)


def run_compare(arguments: argparse.Namespace) -> int:
    """Runs ``pardemo compare`` and returns its exit status: 0 as rehearsed, 1 different, 2 a file could not be read."""
    from pardemo.script.real_job import comparison, machine_profile, screen

    made = comparison.compare_job(Path(arguments.rehearsal), arguments.files, arguments.same_size)
    print(
        json.dumps(made.as_json(), indent=1) if arguments.json else screen.comparison_screen(made, arguments.rehearsal)
    )
    for line in made.job.refused:
        print(f"pardemo compare: {line}", file=sys.stderr)
    if arguments.profile is not None:
        project.write_json(Path(arguments.profile), machine_profile.profile_fields(made.job.traces))
    return 1 if made.differs else 2 if made.job.refused else 0


def profile_of_traces(paths: Sequence[str]) -> dict[str, Any]:
    """Reads a job's traces and returns the fields of a machine profile, for ``pardemo plan --measured``.

    Raises:
        ValueError: a file cannot be read, or the traces do not have what a profile needs.
    """
    from pardemo.script.job_files.reading import read_job
    from pardemo.script.real_job import machine_profile

    job = read_job(paths)
    if job.refused:
        raise ValueError("; ".join(job.refused))
    return machine_profile.profile_fields(job.traces)
