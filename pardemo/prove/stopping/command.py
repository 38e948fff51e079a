"""``pardemo prove --stop``: a training script is stopped and resumed, and what is lost is told."""

import argparse
import contextlib
import json
import sys
from typing import Any

from pardemo import options
from pardemo.termination import ends_in_order

#: Options that say nothing without ``--stop``.
_OWN = ("resume", "stops", "seed", "grace")


def add(prove: Any) -> None:
    """Adds its options to those of ``prove``."""
    stop = prove.add_argument_group("--stop", "stop the script at random steps, resume it, and say what was lost")
    stop.add_argument("--stop", action="store_true", help="{folder} in the script's line is where it saves; "
                      "further layouts are resumed in")  # fmt: skip
    stop.add_argument("--resume", metavar="LINE", help="the script's line that goes on (the same line)")
    stop.add_argument("--stops", metavar="KINDS", help="which of rank, all, launcher, save, term, with commas (all)")
    stop.add_argument("--seed", type=int, metavar="N", help="of the moments that are drawn (0)")
    stop.add_argument("--grace", type=float, metavar="S", help="seconds between SIGTERM and SIGKILL (10)")


def refuse_without_stop(arguments: argparse.Namespace) -> None:
    """Options of ``--stop`` where it was not asked for.

    Raises:
        ValueError: names one.
    """
    for name in _OWN:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} says something about a stop: say --stop, too")


def command(arguments: argparse.Namespace) -> int:
    """The exit status: 0 nothing is lost, 1 something is, 2 where a run could not be compared."""
    if arguments.out is not None:
        raise ValueError("--out writes the page of layouts that are compared; with --stop print the verdict, or --json")
    from pardemo.prove.stopping.stops import GRACE_S, STEPS

    chosen = tuple(arguments.stops.split(",")) if arguments.stops is not None else None
    grace_s = GRACE_S if arguments.grace is None else arguments.grace
    if not grace_s >= 0:
        raise ValueError(f"--grace must be 0 or above, not {grace_s:g}")
    line, layouts, resume, said = _asked(arguments)
    options.at_least(arguments, 1, "steps")
    steps = arguments.steps or said.get("steps", STEPS)
    options.at_least(argparse.Namespace(steps=steps), 3, "steps")
    from pardemo.prove import runner
    from pardemo.prove.stopping import api, text

    with ends_in_order("prove"), contextlib.redirect_stdout(sys.stderr):
        try:
            made = api.stopped(
                line, layouts, resume=resume, stops=chosen, seed=arguments.seed or 0, steps=steps, grace_s=grace_s,
                double=arguments.double or said.get("double", False), timeout_s=arguments.timeout,
            )  # fmt: skip
        except runner.ProveError as error:
            if error.details:
                print(error.details, file=sys.stderr)
            raise
    print(json.dumps(text.as_json(made), indent=1) if arguments.json else text.screen(made))
    return 1 if made.findings else 2 if any(trial.error for trial in made.trials) else 0


def _asked(arguments: argparse.Namespace) -> tuple[Any, Any, str | None, dict[str, Any]]:
    """The script's line, the layouts, the line that resumes, and what a file says beside them."""
    from pardemo.prove import layouts

    if arguments.layout:
        if not arguments.words:
            raise ValueError("say the script behind --, as -- train.py --out {folder}")
        return arguments.words, arguments.layout, arguments.resume, {}
    if len(arguments.words) > 1:
        raise ValueError('say the layout, as --layout "ranks=2", and the script behind --')
    line, tables, said = layouts.tables_of(arguments.words[0] if arguments.words else "prove.toml")
    return line, tables, arguments.resume or said.get("resume"), said
