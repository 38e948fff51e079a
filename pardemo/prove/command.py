"""``pardemo prove``: a training script in several layouts that must train alike, and where they do not, and why."""

import argparse
import contextlib
import json
import os
import sys
from typing import Any

from pardemo import options
from pardemo.prove.stopping import command as stop_command
from pardemo.termination import ends_in_order


def add(commands: Any) -> None:
    """Adds the subcommand to the command line's parser."""
    prove = commands.add_parser(
        "prove",
        help="run a training script in several layouts; say where they do not train alike, by which factor, and why",
        usage='pardemo prove [prove.toml] [OPTIONS]\n       pardemo prove --layout "ranks=1 batch=8" '
        '--layout "ranks=4 batch=2" [OPTIONS] -- SCRIPT --batch {batch}\n'
        '       pardemo prove --stop --layout "ranks=2" [OPTIONS] -- SCRIPT --out {folder}',
        description="The first layout is the reference. Exit status: 0 all train alike, 1 they do not, 2 one could not "
        "be run.",
    )
    prove.add_argument(
        "words", nargs="*", metavar="prove.toml", help="the script and its layouts; behind -- the script itself"
    )
    prove.add_argument("--layout", action="append", metavar="TEXT", help='a layout, as "ranks=4 batch=8"; repeat it')
    prove.add_argument("--steps", type=int, metavar="K", help="first steps to compare (3; with --stop 8)")
    stop_command.add(prove)
    prove.add_argument("--double", action="store_true", help="run the script in fp64: a difference is a difference")
    prove.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for each layout (600)")
    prove.add_argument(
        "--out", metavar="DIR", help="also write a page with a map of the model, JSON, tensors of what nobody explains"
    )
    prove.add_argument("--json", action="store_true", help="print the verdict as JSON")
    prove.set_defaults(action=command)


def command(arguments: argparse.Namespace) -> int:
    """The exit status: 0 equal, 1 different, 2 where a layout could not be run."""
    options.at_least(arguments, 1, "steps")
    if not arguments.timeout > 0:
        raise ValueError(f"--timeout must be above 0, not {arguments.timeout:g}")
    if arguments.stop:
        return stop_command.command(arguments)
    stop_command.refuse_without_stop(arguments)
    from pardemo.measure import launch_lines
    from pardemo.prove import layouts  # without torch: what cannot be run is said at once

    said: dict[str, Any] = {}
    if arguments.layout:
        if not arguments.words:
            raise ValueError("say the script behind --, as -- train.py --batch {batch}")
        wanted = layouts.from_texts(arguments.layout, arguments.words)
    else:
        if len(arguments.words) > 1:
            raise ValueError('say the layouts, as --layout "ranks=1 batch=8" --layout "ranks=4 batch=2"')
        wanted, said = layouts.from_file(arguments.words[0] if arguments.words else "prove.toml")
    for layout in wanted:
        launch = launch_lines.read(list(layout.line), layout.ranks)
        if not launch.module and not os.path.isfile(launch.script):
            raise ValueError(f"there is no script {launch.script}")
    from pardemo.prove import files, proof, runner, text

    asked = runner.Options(
        steps=arguments.steps or said.get("steps", 3), double=arguments.double or said.get("double", False),
        timeout_s=arguments.timeout,
    )  # fmt: skip
    out = files.folder(arguments.out) if arguments.out is not None else None
    with ends_in_order("prove"), contextlib.redirect_stdout(sys.stderr):
        try:
            made = proof.scripts(wanted, asked)
        except runner.ProveError as error:
            if error.details:
                print(error.details, file=sys.stderr)
            raise
        for details in filter(None, made.details.values()):
            print(details)  # with what the ranks print
    if out is not None:
        script = launch_lines.read(list(wanted[0].line), wanted[0].ranks).script
        files.write(out, made, os.path.basename(script))
    print(json.dumps(made.as_json(), indent=1) if arguments.json else text.screen(made))
    for hint in text.hints(made):
        print(hint, file=sys.stderr)
    return 2 if made.failed and not made.findings else 1 if made.findings else 0
