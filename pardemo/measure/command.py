"""``pardemo measure``: a training script on real ranks, and what its median step sends, holds and waits for."""

import argparse
import contextlib
import json
import os
import sys
from typing import Any

from pardemo import options, project
from pardemo.termination import ends_in_order


def add(commands: Any) -> None:
    """Adds the subcommand to the command line's parser."""
    measure = commands.add_parser(
        "measure",
        help="run a training script, unchanged, on real ranks; say what its step sends, holds and waits for",
        usage="pardemo measure [OPTIONS] -- SCRIPT [ARGS …]\n       pardemo measure [OPTIONS] -m MODULE [ARGS …]\n"
        "       pardemo measure [OPTIONS] -- torchrun … | accelerate launch … | deepspeed … | python …",
        description="Behind -- stands a script, or the line that starts your job: torchrun, accelerate launch, "
        "deepspeed or python, with their options. The number of ranks is that line's unless --ranks or --cluster say "
        "another.",
    )
    measure.add_argument("--ranks", type=int, metavar="N", help="number of ranks (the cluster's, the line's, or 4)")
    measure.add_argument("--cluster", metavar="HxR", help="nodes × ranks on each, with limited links: 2x2")
    measure.add_argument("--between", metavar="RATE", help="what a node's network card carries, as 1Gbit/s")
    measure.add_argument("--inside", metavar="RATE", help="what a rank's link inside its node carries")
    measure.add_argument(
        "--pace", metavar="TIME|GPU", help="a layer takes a given time, as 20ms; or what the step would take on H100"
    )
    measure.add_argument(
        "--full-size", metavar="MODEL", help="also what the planner says of the script's parallelism with llama3-8b, …"
    )
    measure.add_argument("--gpus", type=int, metavar="N", help="of --full-size (as many as ranks)")
    measure.add_argument("--sequence", type=int, metavar="N", help="tokens of a sample of --full-size (the script's)")
    measure.add_argument("--micro-batch", type=int, metavar="N", help="samples of --full-size (the script's)")
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
    options.at_least(arguments, 1, "ranks", "steps", "gpus", "sequence", "micro_batch")
    if not arguments.timeout > 0:
        raise ValueError(f"--timeout must be above 0, not {arguments.timeout:g}")
    from pardemo.measure import files, full_size, launch_lines, runner, text
    from pardemo.world import MAX_RANKS

    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    pace = _pace(arguments)
    full = full_size.question(arguments.full_size, arguments.gpus, arguments.sequence, arguments.micro_batch)
    cluster = pace.cluster if pace else _cluster(arguments)
    asked = cluster.size if cluster else arguments.ranks
    with ends_in_order("measure"):
        out = files.folder(arguments.out) if arguments.out is not None else None
        launch = launch_lines.read(["python", "-m", *program] if arguments.module and program else program, asked)
        ranks = asked if asked is not None else launch.ranks if launch.ranks is not None else launch_lines.RANKS
        if asked is None and not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"the line would start {ranks} ranks: say from 1 to {MAX_RANKS} with --ranks")
        if cluster is None and launch.hosts > 1:
            cluster = _hosts(launch.hosts, ranks)
        try:
            measured, seen = _measured(arguments, launch, ranks, cluster, pace, out)
        except runner.ScriptError as error:
            if error.standstill is None:
                raise
            return _failed(arguments, error, out)
        if launch.ranks not in (None, ranks):
            measured.notes.append(f"the line would start {launch.ranks} ranks; it ran on {ranks}, as you said")
        measured.notes += launch.notes
        if full is not None:
            measured.memory["full_size"] = full_size.answer(full, measured, seen)
        if out is not None:
            files.write(out, measured, seen, launch.script)
    print(json.dumps(measured.as_json(), indent=1) if arguments.json else text.screen(measured, launch.script))
    return 0


def _failed(arguments: argparse.Namespace, error: Any, out: Any) -> int:
    """Tells of a run that failed: in one line, and below it who waited for whom, where somebody did."""
    print(f"pardemo measure: {error}", file=sys.stderr)
    if error.standstill.waits or error.standstill.first:
        print(error.standstill.details, file=sys.stderr)
    told = json.dumps({"error": str(error), "standstill": error.standstill.as_json()}, indent=1)
    if arguments.json:
        print(told)
    if out is not None:
        project.write_atomically(out / "standstill.json", lambda temporary: temporary.write_text(told, "utf-8"))
    return 2


def _measured(
    arguments: argparse.Namespace, launch: Any, ranks: int, cluster: Any, pace: Any, out: Any
) -> tuple[Any, Any]:
    """The run; in a scratch copy, where one was asked for."""
    from pardemo.measure import files, runner

    with files.scratch(os.getcwd()) if arguments.copy else contextlib.nullcontext() as copy:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what the script prints: the summary has stdout for itself
                measured, seen = runner.measured(
                    launch, ranks=ranks, cluster=cluster, steps=arguments.steps,
                    folder=copy.folder if copy else None, timeout_s=arguments.timeout,
                    work=pace is not None, layer_s=pace.layer_s if pace else 0.0,
                    log=out / "calls.csv" if out is not None else None,
                )  # fmt: skip
        except runner.ScriptError as error:
            if error.details:
                print(error.details, file=sys.stderr)
            raise
        if copy:
            measured.notes.append(copy.told())
    if pace is not None:
        from pardemo.measure import pace as paces  # the planner's Transformers need not be the script's

        paces.tell(pace, measured, seen)
    return measured, seen


def _hosts(hosts: int, ranks: int) -> Any:
    """A line's machines, on this one, with links that nothing limits: a rank knows its node, and who is beside it."""
    from pardemo.cluster import Cluster

    if ranks % hosts:
        raise ValueError(f"the line starts ranks on {hosts} machines, among which {ranks} do not divide")
    return Cluster(hosts, ranks // hosts, tier="none")


def _cluster(arguments: argparse.Namespace) -> Any:
    if arguments.cluster is None:
        for name in ("between", "inside"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} limits the links of a cluster: say which, as --cluster 2x2")
        return None
    from pardemo.measure import pace_option

    return _of_size(pace_option.of(arguments.cluster, arguments.between, arguments.inside), arguments)


def _pace(arguments: argparse.Namespace) -> Any:
    if arguments.pace is None:
        return None
    from pardemo.measure import pace_option

    pace = pace_option.read(arguments.pace, arguments.cluster, arguments.between, arguments.inside)
    if pace.cluster is not None:
        _of_size(pace.cluster, arguments)
    return pace


def _of_size(cluster: Any, arguments: argparse.Namespace) -> Any:
    """The cluster, where --ranks says nothing else."""
    if arguments.ranks is not None and arguments.ranks != cluster.size:
        raise ValueError(f"--ranks {arguments.ranks} is not the {cluster.size} of --cluster {arguments.cluster}")
    return cluster
