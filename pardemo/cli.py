"""The command line: ``pardemo COMMAND``, also ``python -m pardemo``; data and fine-tune bring their own commands."""

import argparse
import atexit
import gc
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import pardemo
from pardemo import argument_checks, extras, project
from pardemo.book.run.report import command as report_command
from pardemo.book.run.site import command as site_command
from pardemo.closed_pipe import work_goes_on
from pardemo.finetune import commands as finetune
from pardemo.headlines import command as headlines
from pardemo.planner import command as planner
from pardemo.script import command as script_command
from pardemo.script.real_job import command as compare_command
from pardemo.termination import ends_in_order
from pardemo.world.launched import value_of

#: Commands by what they are for, with an example of each group.
GROUPS = {
    "the book": ("run claims report site doctor", "pardemo run data_parallel"),
    "your script": ("measure prove compare", "pardemo measure --ranks 4 -- train.py --batch 8"),
    "the planner": ("plan", "pardemo plan --search --model llama3-8b --gpu H100 --gpus 8"),
    "the fine-tune": ("data finetune predict score export chat", "pardemo finetune tiny-cpu"),
    "pardemo itself, in a checkout": ("bench soak", "pardemo soak --minutes 1"),
}
#: Commands of a checkout alone: what they run stands in its tests/.
OF_A_CHECKOUT = {
    "bench": "the speed table: ratios measured side by side in one run",
    "soak": "inject faults at random, and say what does not survive them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 only on success, 2 for bad input, which is told in one line.

    141 where the reader of our output, head or less, has seen enough: what a shell says of a program that ends so.
    A command that works goes on without a reader (:mod:`pardemo.closed_pipe`), and its status is its work's.
    """
    atexit.register(_leave_cycles)
    try:
        try:
            return _run_command(argv)
        finally:
            sys.stdout.flush()  # here, and not when Python ends: there is nobody to catch it then
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _leave_cycles() -> None:
    """Keeps Python from searching all that was loaded for cycles at its end, which takes up to a second.

    But not where Triton is loaded, which comes with torch's builds for CUDA: its bindings list in thirty lines what is
    left as leaks.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _run_command(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in OF_A_CHECKOUT:
        command, action = given[0], partial(_from_checkout, *given)
    else:
        arguments = _parser().parse_args(given)
        command, action = arguments.command, partial(arguments.action, arguments)
    try:
        return action()
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        if (missing := extras.line_of(f"pardemo {command}", error)) is None:
            raise
        print(missing, file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"pardemo {command}: {project.error_line(error)}{project.not_in_the_package(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\npardemo {command}: interrupted", file=sys.stderr)
        return 130


def _from_checkout(command: str, *arguments: str) -> int:
    """Runs ``main(arguments)`` of the module ``command`` in ``tests/<command>``, which has its own options.

    Raises:
        ValueError: there is no checkout.
    """
    tests = project.root() / "tests"
    if not (tests / command / "command.py").is_file():
        raise ValueError(f"it comes with the repository, not with the package: git clone {project.REPOSITORY}")
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))  # for the ranks, too
    return import_module(f"{command}.command").main(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pardemo", usage="pardemo COMMAND [OPTIONS]", description="Parallel training: predict, run, compare.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=pardemo.__version__)
    commands: Any = _Commands(parser)

    run = commands.add_parser("run", help="execute notebooks; write executed copies, figures, claims and report.html")
    run.add_argument("names", nargs="*", metavar="NAME", help="a chapter, as data_parallel or 01 (default: all)")
    run.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), dest="parameters",
        help="a notebook parameter, as -p world_size 2 (may be repeated)",
    )  # fmt: skip
    run.add_argument("--out", metavar="DIR", help="output folder (default outputs/latest)")
    run.add_argument("--resume", action="store_true", help="skip what finished with the same sources and parameters")
    run.add_argument("--cell-timeout", type=int, default=600, metavar="S", help="seconds a cell may take (600)")
    run.add_argument("--list", action="store_true", help="list the notebooks and their parameters, and stop")
    run.set_defaults(action=_run)

    show = commands.add_parser("claims", help="the ledger of a run as a table")
    show.add_argument("folder", nargs="?", metavar="DIR", help="a run's folder (default outputs/latest)")
    show.add_argument("--json", action="store_true", help="print rows as JSON")
    show.set_defaults(action=_claims)

    report_command.add_report(commands)
    site_command.add_site(commands)

    for name, text in OF_A_CHECKOUT.items():
        commands.add_parser(name, help=text)

    finetune.add_fine_tune(commands)

    doctor = commands.add_parser("doctor", help="what this machine has, and which notebooks it can run at which size")
    doctor.add_argument("--json", action="store_true", help="print rows as JSON")
    doctor.add_argument("--build", action="store_true", help="compile DeepSpeed's file operators (for NVMe offload)")
    doctor.add_argument("--deepspeed", metavar="FILE", help="a DeepSpeed configuration to look through instead")
    doctor.add_argument("--ranks", type=int, default=1, metavar="N", help="the ranks that it is for (1)")
    doctor.set_defaults(action=_doctor)

    headlines.add_data(commands)
    planner.add_plan(commands, compare_command.profile_of_traces)
    script_command.add_measure(commands)
    script_command.add_prove(commands)
    compare_command.add_compare(commands)
    parser.epilog = commands.in_groups()
    return parser


class _Commands:
    """The command line's commands, which its help shows in :data:`GROUPS`, where argparse would list them."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._subparsers = parser.add_subparsers(
            dest="command", required=True, metavar="COMMAND", prog="pardemo", help=argparse.SUPPRESS
        )
        self._helps: dict[str, str] = {}

    def add_parser(self, name: str, *, help: str, **options: Any) -> argparse.ArgumentParser:
        """A command's own parser; ``help``: what the command is for, in a line."""
        self._helps[name] = help
        return self._subparsers.add_parser(name, **options)

    def in_groups(self) -> str:
        """Each group with its commands and its example."""
        lines = []
        for group, (names, example) in GROUPS.items():
            lines += [f"{group}, as {example}:", *(self._line(name) for name in names.split()), ""]
        return "\n".join([*lines, "pardemo COMMAND --help tells a command's options."])

    def _line(self, name: str) -> str:
        margin = " " * 12
        return textwrap.fill(f"  {name:10}{self._helps[name]}", 100, subsequent_indent=margin)


@work_goes_on()
def _run(arguments: argparse.Namespace) -> int:
    argument_checks.above_zero(arguments.cell_timeout, "--cell-timeout")
    from pardemo.book.run import runner
    from pardemo.book.run.parameters import parameters_of

    if arguments.list:
        for name, path in runner.choose_notebooks(arguments.names).items():
            values = ", ".join(f"{key}={value!r}" for key, value in parameters_of(path).items())
            print(f"{name:24} {values}")
        return 0
    given = {key: value_of(value) for key, value in arguments.parameters}
    with ends_in_order("run"):
        outcomes = runner.run_notebooks(arguments.names, given, arguments.out, arguments.resume, arguments.cell_timeout)
    print(f"report: {arguments.out or os.path.relpath(project.output_dir())}/report.html")
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print(f"{outcome.notebook} failed in {outcome.error}", file=sys.stderr)
    return 1 if failed else 0


def _claims(arguments: argparse.Namespace) -> int:
    from pardemo import claims
    from pardemo.tables import text_table

    rows = claims.read(arguments.folder)
    if arguments.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        shown = claims.frame(rows)
        print(text_table([list(shown.columns), *shown.values.tolist()]))
        print(", ".join(f"{count} {verdict}" for verdict, count in claims.counts(rows).items() if count))
    return 1 if claims.counts(rows)["fails"] else 0


def _doctor(arguments: argparse.Namespace) -> int:
    argument_checks.at_least(arguments, 1, "ranks")
    from pardemo.book.run import doctor
    from pardemo.tables import text_table

    if arguments.deepspeed is not None:
        print(doctor.examine_deepspeed(arguments.deepspeed, arguments.ranks))
        return 0
    if arguments.build:
        from pardemo.peers.deepspeed import deepspeed_disk

        deepspeed_disk.build_operators()
    rows = doctor.examine()
    if arguments.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        table = [("", "what", "found"), *(("ok" if row["ok"] else "note", row["what"], row["found"]) for row in rows)]
        print(text_table(table))
    return 0
