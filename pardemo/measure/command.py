"""``pardemo measure``: a training script on real ranks, and what its median step sends, holds and waits for."""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from pardemo import options


def add(commands: Any) -> None:
    """Adds the subcommand to the command line's parser."""
    measure = commands.add_parser(
        "measure",
        help="run a training script, unchanged, on real ranks; say what its step sends, holds and waits for",
        usage="pardemo measure [OPTIONS] -- SCRIPT [ARGS …]\n       pardemo measure [OPTIONS] -m MODULE [ARGS …]",
    )
    measure.add_argument("--ranks", type=int, metavar="N", help="number of ranks (4, or as many as the cluster has)")
    measure.add_argument("--cluster", metavar="HxR", help="hosts × ranks on each, with limited links: 2x2")
    measure.add_argument("--between", metavar="RATE", help="what a host's network card carries, as 1Gbit/s")
    measure.add_argument("--inside", metavar="RATE", help="what a rank's link inside its host carries")
    measure.add_argument("--steps", type=int, default=3, metavar="K", help="steps to measure, after three (3)")
    measure.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for the whole run (600)")
    measure.add_argument("--copy", action="store_true", help="run in a scratch copy of this folder, removed at the end")
    measure.add_argument("--out", metavar="DIR", help="also write a page, a trace, memory snapshots, CSV, JSON")
    measure.add_argument("--json", action="store_true", help="print the summary as JSON")
    measure.add_argument("-m", dest="module", action="store_true", help="the script is a module, as of python -m")
    measure.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    measure.set_defaults(action=command)


def command(arguments: argparse.Namespace) -> int:
    """The exit status: 0 where the script was measured, 2 where it could not be."""
    options.at_least(arguments, 1, "ranks", "steps")
    if not arguments.timeout > 0:
        raise ValueError(f"--timeout must be above 0, not {arguments.timeout:g}")
    from pardemo.measure import files, runner, text

    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise ValueError(
            "name a script: pardemo measure -- train.py ARGS; or a module: pardemo measure -m package.train"
        )
    cluster = _cluster(arguments)
    ranks = arguments.ranks if arguments.ranks is not None else cluster.size if cluster else 4
    if arguments.out is not None:
        Path(arguments.out).mkdir(parents=True, exist_ok=True)
    script, *own = program
    with files.scratch(os.getcwd()) if arguments.copy else contextlib.nullcontext() as copy:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what the script prints: the summary has stdout for itself
                measured, seen = runner.measured(
                    script, own, ranks=ranks, cluster=cluster, steps=arguments.steps, module=arguments.module,
                    folder=copy.folder if copy else None, timeout_s=arguments.timeout,
                )  # fmt: skip
        except runner.ScriptError as error:
            if error.details:
                print(error.details, file=sys.stderr)
            raise
        if copy:
            measured.notes.append(copy.told())
    if arguments.out is not None:
        files.write(Path(arguments.out), measured, seen, script)
    print(json.dumps(measured.as_json(), indent=1) if arguments.json else text.screen(measured, script))
    return 0


def _cluster(arguments: argparse.Namespace) -> Any:
    if arguments.cluster is None:
        for name in ("between", "inside"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} limits the links of a cluster: say which, as --cluster 2x2")
        return None
    from pardemo.cluster import Cluster

    hosts, x, beside = arguments.cluster.lower().replace("×", "x").partition("x")
    if not (hosts.isdigit() and x and beside.isdigit()):
        raise ValueError(f"--cluster is hosts × ranks on each, as 2x2, not {arguments.cluster!r}")
    cluster = Cluster(int(hosts), int(beside), between=arguments.between, inside=arguments.inside)
    if arguments.ranks is not None and arguments.ranks != cluster.size:
        raise ValueError(f"--ranks {arguments.ranks} is not the {cluster.size} of --cluster {arguments.cluster}")
    return cluster
