"""``pardemo measure``, ``pardemo prove`` and ``pardemo prove --stop``: their options, and what they print."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pardemo import argument_checks, project
from pardemo.script.search import command as search_command
from pardemo.termination import ends_in_order

if TYPE_CHECKING:
    from pardemo.cluster import Cluster
    from pardemo.script.compare.run_layouts import RunLayout
    from pardemo.script.record.recorded_inputs import RecordedInputs
    from pardemo.script.runtime.runner import ScriptError
    from pardemo.script.step.pace import PaceSettings


class JsonResult(Protocol):
    """A result that is printed as a screen, or as JSON."""

    def as_json(self) -> dict[str, Any]: ...


def add_measure(commands: Any) -> None:
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
    measure.set_defaults(action=run_measure)


def run_measure(arguments: argparse.Namespace) -> int:
    """Runs ``pardemo measure``; returns 0 where the script was measured, 2 where it could not be."""
    argument_checks.at_least(arguments, 1, "ranks", "steps", "gpus", "sequence", "micro_batch")
    argument_checks.above_zero(arguments.timeout, "--timeout")
    from pardemo.cluster import MAX_RANKS
    from pardemo.script.report import files, sections
    from pardemo.script.runtime import launch_lines, runner
    from pardemo.script.step import full_size, measurement, paced_step

    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    pace, cluster = _pace_and_cluster(arguments)
    full = full_size.full_size_question(arguments.full_size, arguments.gpus, arguments.sequence, arguments.micro_batch)
    asked = cluster.size if cluster else arguments.ranks
    with ends_in_order("measure"):
        out = project.writable_folder(arguments.out, "--out") if arguments.out is not None else None
        launch = launch_lines.read_launch(
            ["python", "-m", *program] if arguments.module and program else program, asked
        )
        ranks = asked if asked is not None else launch.ranks if launch.ranks is not None else launch_lines.RANKS
        if asked is None and not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"the line would start {ranks} ranks: say from 1 to {MAX_RANKS} with --ranks")
        if cluster is None and launch.hosts > 1:
            cluster = _hosts(launch.hosts, ranks)
        if out is not None:
            files.clear_reports(out)
        try:
            with runner.scratch(os.getcwd()) if arguments.copy else contextlib.nullcontext() as copy, _beside_stdout():
                summary, traces = measurement.measure_launch(
                    launch, ranks=ranks, cluster=cluster, steps=arguments.steps,
                    folder=copy.folder if copy else None, timeout_s=arguments.timeout,
                    pace=pace, log=out / "calls.csv" if out is not None else None,
                )  # fmt: skip
                summary.notes += [copy.note] if copy else []
            if pace is not None:
                paced_step.add_paced_step(pace, summary, traces)
        except runner.ScriptError as error:
            if error.standstill is None:
                raise
            return _print_failure(arguments, error, out)
        if launch.ranks not in (None, ranks):
            summary.notes.append(f"the line would start {launch.ranks} ranks; it ran on {ranks}, as you said")
        summary.notes += launch.notes
        if full is not None:
            summary.memory["full_size"] = full_size.answer(full, summary, traces)
        if out is not None:
            files.write_report(out, summary, traces, launch.script)
    _print_result(arguments, summary, sections.summary_screen(summary, launch.script))
    return 0


def _print_result(arguments: argparse.Namespace, result: "JsonResult", screen: str) -> None:
    """Prints a result as JSON where that was asked for, else its screen."""
    print(json.dumps(result.as_json(), indent=1) if arguments.json else screen)


@contextlib.contextmanager
def _beside_stdout() -> Iterator[None]:
    """Within the block what scripts print goes to stderr, since a report has stdout for itself, and an error's details.

    They are those of a run that failed: the ranks' tracebacks.
    """
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except ValueError as error:
            if details := getattr(error, "details", ""):
                print(details)
            raise


def _print_failure(arguments: argparse.Namespace, error: "ScriptError", out: Path | None) -> int:
    """Prints the error of a run in one line, and below it who waited for whom, where somebody did; returns 2."""
    still = error.standstill
    assert still is not None
    print(f"pardemo measure: {error}", file=sys.stderr)
    if still.waits or still.first:
        print(still.details, file=sys.stderr)
    report = json.dumps({"error": str(error), "standstill": still.as_json()}, indent=1)
    if arguments.json:
        print(report)
    if out is not None:
        project.write_text(out / "standstill.json", report)
    return 2


def _hosts(hosts: int, ranks: int) -> "Cluster":
    """Makes a cluster of the line's machines, on this one, without limits; ranks know their node, and who is on it."""
    from pardemo.cluster import Cluster

    if ranks % hosts:
        raise ValueError(f"the line starts ranks on {hosts} machines, among which {ranks} do not divide")
    return Cluster(hosts, ranks // hosts, tier="none")


def _pace_and_cluster(arguments: argparse.Namespace) -> "tuple[PaceSettings | None, Cluster | None]":
    """Reads what ``--pace`` asks for, and the cluster of the run; None where there is none."""
    from pardemo.script.step.pace import cluster_of, read_pace

    pace = cluster = None
    if arguments.pace is not None:
        pace = read_pace(arguments.pace, arguments.cluster, arguments.between, arguments.inside)
        cluster = pace.cluster
    elif arguments.cluster is not None:
        cluster = cluster_of(arguments.cluster, arguments.between, arguments.inside)
    elif limited := [name for name in ("between", "inside") if getattr(arguments, name) is not None]:
        raise ValueError(f"--{limited[0]} limits the links of a cluster: say which, as --cluster 2x2")
    if cluster is not None and arguments.ranks not in (None, cluster.size):
        raise ValueError(f"--ranks {arguments.ranks} is not the {cluster.size} of --cluster {arguments.cluster}")
    return pace, cluster


def add_prove(commands: Any) -> None:
    """Adds the subcommand to the command line's parser."""
    prove = commands.add_parser(
        "prove",
        help="run a training script in several layouts; say where they do not train alike, by which factor, and why",
        usage='pardemo prove [prove.toml] [OPTIONS]\n       pardemo prove --layout "ranks=1 batch=8" '
        '--layout "ranks=4 batch=2" [OPTIONS] -- SCRIPT --batch {batch}\n'
        '       pardemo prove --search [--axis "tp=1,2"] [OPTIONS] -- SCRIPT\n'
        '       pardemo prove --stop --layout "ranks=2" [OPTIONS] -- SCRIPT --out {folder}\n'
        '       pardemo prove --record DIR --layout "ranks=1" [OPTIONS] -- SCRIPT\n'
        '       pardemo prove --replay DIR --layout "ranks=4" [OPTIONS] -- SCRIPT',
        description="The first layout is the reference. Exit status: 0 all train alike, 1 they do not, 2 one could not "
        "be run.",
    )
    prove.add_argument(
        "words", nargs="*", metavar="prove.toml", help="the script and its layouts; behind -- the script itself"
    )
    prove.add_argument("--layout", action="append", metavar="TEXT", help='a layout, as "ranks=4 batch=8"; repeat it')
    prove.add_argument("--steps", type=int, metavar="K", help="first steps to compare (3; with --stop 8)")
    stop = prove.add_argument_group("--stop", "stop the script at random steps, resume it, and say what was lost")
    stop.add_argument("--stop", action="store_true", help="{folder} in the script's line is where it saves; "
                      "further layouts are resumed in")  # fmt: skip
    stop.add_argument("--resume", metavar="LINE", help="the script's line that goes on (the same line)")
    stop.add_argument("--stops", metavar="KINDS", help="which of rank, all, launcher, save, term, with commas (all)")
    stop.add_argument("--seed", type=int, metavar="N", help="of the moments that are drawn (0)")
    stop.add_argument("--grace", type=float, metavar="S", help="seconds between SIGTERM and SIGKILL (10)")
    replay = prove.add_argument_group("--record, --replay", "compare layouts whose samples are drawn on each rank")
    replay.add_argument("--record", metavar="DIR", help="run one layout, and write what its steps train on")
    replay.add_argument("--replay", metavar="DIR", help="feed that to each layout; the reference is the recorded one")
    replay.add_argument("--outputs", action="store_true", help="with --replay: the script calls another model with "
                        "{samples}; compare log-probabilities of tokens")  # fmt: skip
    prove.add_argument("--double", action="store_true", help="run the script in fp64: a difference is a difference")
    prove.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for each layout (600)")
    prove.add_argument(
        "--out", metavar="DIR", help="also write a page with a map of the model, JSON, tensors of what nobody explains"
    )
    prove.add_argument("--json", action="store_true", help="print the verdict as JSON")
    search_command.add_search(prove)
    prove.set_defaults(action=run_prove)


def run_prove(arguments: argparse.Namespace) -> int:
    """Runs ``pardemo prove``; returns 0 for equal, 1 for different, 2 where a layout could not be run."""
    argument_checks.at_least(arguments, 1, "steps")
    argument_checks.above_zero(arguments.timeout, "--timeout")
    if arguments.search:
        return search_command.run_search(arguments)
    for name in search_command.OPTIONS:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} says something about a search: say --search, too")
    if arguments.stop:
        return run_stop(arguments)
    for name in ("resume", "stops", "seed", "grace"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} says something about a stop: say --stop, too")
    if arguments.record is not None:
        return run_record(arguments)
    if arguments.outputs:
        return run_outputs(arguments)
    from pardemo.script.runtime import launch_lines, runner

    layouts, settings, recorded = _asked_layouts(arguments)
    launches = [launch_lines.read_launch(list(layout.line), layout.ranks) for layout in layouts]
    for launch in launches:
        runner.script_text(launch, os.getcwd())  # before torch is loaded: it refuses a script that is not there
    from pardemo.script.compare import proof, replayed_inputs, runs
    from pardemo.script.report import proof_page

    asked = runs.RunOptions(
        steps=arguments.steps or settings.get("steps", 3), double=arguments.double or settings.get("double", False),
        timeout_s=arguments.timeout,
    )  # fmt: skip
    if recorded is not None:
        asked = replayed_inputs.on_recorded_inputs(asked, recorded)
    out = proof_page.proof_folder(arguments.out) if arguments.out is not None else None
    with ends_in_order("prove"), _beside_stdout():
        compared = proof.compare_layouts(layouts, asked)
        for result in compared.layouts:
            if result.details:
                print(result.details)  # with what the ranks print
    if out is not None:
        proof_page.write_proof(out, compared, os.path.basename(launches[0].script))
    _print_result(arguments, compared, str(compared))
    for hint in proof_page.hints(compared):
        print(hint, file=sys.stderr)
    return 2 if compared.failed and not compared.findings else 1 if compared.findings else 0


def _asked_layouts(
    arguments: argparse.Namespace,
) -> "tuple[list[RunLayout], dict[str, Any], RecordedInputs | None]":
    """Reads the layouts, the reference first, what a file says beside them, and the inputs that they are fed."""
    from pardemo.script.compare import run_layouts

    if arguments.replay is not None:
        if not arguments.layout:
            raise ValueError('say the layouts that are fed, as --layout "ranks=4 batch=2", and the script behind --')
        _refuse_no_script(arguments, "train.py --batch {batch}")
        from pardemo.script.compare import replayed_inputs
        from pardemo.script.record import recorded_inputs

        recorded = recorded_inputs.read_recorded_inputs(arguments.replay)
        return replayed_inputs.replayed_layouts(recorded, arguments.layout, arguments.words), {}, recorded
    if arguments.layout:
        _refuse_no_script(arguments, "train.py --batch {batch}")
        return run_layouts.from_texts(arguments.layout, arguments.words), {}, None
    if len(arguments.words) > 1:
        raise ValueError('say the layouts, as --layout "ranks=1 batch=8" --layout "ranks=4 batch=2"')
    return *run_layouts.from_file(arguments.words[0] if arguments.words else "prove.toml"), None


def _refuse_no_script(arguments: argparse.Namespace, example: str) -> None:
    if not arguments.words:
        raise ValueError(f"say the script behind --, as -- {example}")


def run_record(arguments: argparse.Namespace) -> int:
    """Runs ``pardemo prove --record``; returns 0 where a layout's inputs were recorded."""
    if arguments.replay is not None or arguments.out is not None:
        raise ValueError(f"--record alone runs one layout: leave {'--replay' if arguments.replay else '--out'} away")
    if len(arguments.layout or ()) != 1 or not arguments.words:
        raise ValueError('say one layout to record, as --layout "ranks=1 batch=8", and the script behind --')
    from pardemo.script.compare import replayed_inputs, run_layouts, runs

    (layout,) = run_layouts.from_texts(arguments.layout, arguments.words, alone=True)
    runs.launch_of(layout)
    folder = replayed_inputs.recording_folder(arguments.record)
    asked = runs.RunOptions(steps=arguments.steps or 3, double=arguments.double, timeout_s=arguments.timeout)
    with ends_in_order("prove"), _beside_stdout():
        recorded = replayed_inputs.record_inputs(layout, asked, folder)
    _print_result(arguments, recorded, replayed_inputs.recorded_text(recorded))
    return 0


def run_outputs(arguments: argparse.Namespace) -> int:
    """Runs ``pardemo prove --replay DIR --outputs``; returns 0 for equal log-probabilities, 1 for others."""
    if arguments.replay is None or not arguments.words or len(arguments.layout or ()) > 1 or arguments.out is not None:
        raise ValueError("say one script beside recorded inputs, as --replay DIR --outputs -- engine.py {samples}")
    from pardemo.script.compare import runs, token_outputs
    from pardemo.script.record import recorded_inputs

    recorded = recorded_inputs.read_recorded_inputs(arguments.replay)
    asked = runs.RunOptions(steps=1, double=arguments.double, timeout_s=arguments.timeout)
    with ends_in_order("prove"), _beside_stdout():
        made = token_outputs.compare_engine(recorded, arguments.layout or [], arguments.words, asked)
    _print_result(arguments, made, str(made))
    return 0 if made.equal else 1


def run_stop(arguments: argparse.Namespace) -> int:
    """Runs ``pardemo prove --stop``; returns 0 where nothing is lost, 1 where something is, 2 without an answer."""
    if arguments.out is not None:
        raise ValueError("--out writes the page of layouts that are compared; with --stop print the verdict, or --json")
    if arguments.record is not None or arguments.replay is not None:
        raise ValueError("--stop stops a script with its own samples: leave --record and --replay away")
    from pardemo.script.resume import GRACE_S, STEPS

    chosen = tuple(arguments.stops.split(",")) if arguments.stops is not None else None
    grace_s = GRACE_S if arguments.grace is None else arguments.grace
    if not grace_s >= 0:
        raise ValueError(f"--grace must be 0 or above, not {grace_s:g}")
    line, layouts, resume, settings = _asked_stop(arguments)
    steps = arguments.steps or settings.get("steps", STEPS)
    if steps < 3:
        raise ValueError(f"--steps must be at least 3, not {steps}")
    from pardemo.script.resume import trials

    with ends_in_order("prove"), _beside_stdout():
        verdict = trials.stopped(
            line, layouts, resume=resume, stops=chosen, seed=arguments.seed or 0, steps=steps, grace_s=grace_s,
            double=arguments.double or settings.get("double", False), timeout_s=arguments.timeout,
        )  # fmt: skip
    _print_result(arguments, verdict, str(verdict))
    return 1 if verdict.findings else 2 if any(trial.error for trial in verdict.trials) else 0


def _asked_stop(
    arguments: argparse.Namespace,
) -> tuple[Sequence[str], Sequence[Mapping[str, Any] | str], str | None, dict[str, Any]]:
    """Reads the script's line, the layouts, the line that resumes, and what a file says beside them."""
    from pardemo.script.compare import run_layouts

    if arguments.layout:
        _refuse_no_script(arguments, "train.py --out {folder}")
        return arguments.words, arguments.layout, arguments.resume, {}
    if len(arguments.words) > 1:
        raise ValueError('say the layout, as --layout "ranks=2", and the script behind --')
    line, tables, settings = run_layouts.tables_of(arguments.words[0] if arguments.words else "prove.toml")
    return line, tables, arguments.resume or settings.get("resume"), settings
