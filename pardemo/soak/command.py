"""``pardemo soak``: faults at random against the project's own, and what they leave behind."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from pardemo import options
from pardemo.soak import schedule
from pardemo.soak.schedule import Drawn

MINUTES = 5.0


def add(commands: Any) -> None:
    """Adds the subcommand to the command line's parser."""
    soak = commands.add_parser(
        "soak",
        help="inject faults at random into Worlds, runs, checkpoints and scripts; say what does not survive them",
        description="Plays scenes, each a piece of work with one fault, drawn from the seed: a rank that is killed or "
        "stopped, an interrupt, a link that goes away, a file that is cut off, a full disk; and trains random layouts "
        "beside one process. Exit status 1 where anything was wrong.",
    )
    soak.add_argument("--minutes", type=float, metavar="M", help="so long (5)")
    soak.add_argument("--faults", type=int, metavar="N", help="in place of minutes: so many faults")
    soak.add_argument("--layouts", type=int, metavar="N", help="in place of minutes: so many random layouts")
    soak.add_argument("--seed", type=int, default=1, metavar="S", help="all scenes are drawn from it (1)")
    soak.add_argument("--only", metavar="KIND", help="one kind, as world/killed, or one group, as world")
    soak.add_argument("--case", type=int, metavar="N", help="that case of --only, alone")
    soak.add_argument("--list", action="store_true", help="list the kinds, and stop")
    soak.add_argument("--json", action="store_true", help="print one object; failures and progress go to stderr")
    soak.set_defaults(action=command)


def command(arguments: argparse.Namespace) -> int:
    """The exit status: 0 where every scene ended as it should, 1 where one did not, or fewer faults took place than
    were asked for, or none."""
    options.at_least(arguments, 0, "faults", "layouts", "case")
    if arguments.minutes is not None and not 0 < arguments.minutes < float("inf"):
        raise ValueError(f"--minutes must be a number above 0, not {arguments.minutes:g}")
    if arguments.minutes is not None and (arguments.faults is not None or arguments.layouts is not None):
        raise ValueError("--minutes limits the time, --faults and --layouts the number of scenes: give one of them")
    if arguments.case is not None and arguments.only is None:
        raise ValueError("--case needs --only, which says of which kind")
    if arguments.case is not None and "/" not in arguments.only:
        raise ValueError(f"--case needs one kind, as {arguments.only}/…: --list has them")
    from pardemo.soak.player import Player
    from pardemo.soak.scenes import GROUPS
    from pardemo.soak.tally import Tally

    group = None if arguments.only is None else schedule.group_of(arguments.only)
    if group is not None and group not in GROUPS:
        raise ValueError(f"--only: no kind {arguments.only!r}; there are {', '.join(GROUPS)}")
    groups = GROUPS if group is None else (group,)
    with Player(groups, arguments.seed) as player:
        tally = Tally(arguments.seed, sys.stderr if arguments.json else sys.stdout, player.missing)
        kinds = player.kinds
        if not kinds:
            raise ValueError("; ".join(player.missing.values()))
        if arguments.only is not None:
            kinds = {kind: kinds[kind] for kind in schedule.chosen(arguments.only, kinds)}
        if arguments.list:
            print(json.dumps(sorted(kinds)) if arguments.json else "\n".join(sorted(kinds)))
            return 0
        try:
            for kind, number in _drawn(arguments, kinds, lambda: not tally.endings[-1].not_reached):
                tally.note(player.play(kind, number))
        finally:  # an interrupt, too: what was played until then is told
            if tally.endings:
                print(json.dumps(tally.as_json(), indent=1, ensure_ascii=False) if arguments.json else tally.as_text())
    return 1 if tally.failures or _too_few(arguments, tally) else 0


def _too_few(arguments: argparse.Namespace, tally: Any) -> bool:
    """Whether no fault took place, or fewer than were asked for: the kinds were given up; says so."""
    asked = (arguments.faults or 0) + (arguments.layouts or 0)
    taken = sum(not ending.not_reached for ending in tally.endings)
    if arguments.case is None and taken < asked:
        print(f"{taken} of {asked}: no kind is left of which one in {schedule.MISSES} was reached", file=tally.out)
        return True
    return not any(ending.injected for ending in tally.endings)


def _drawn(arguments: argparse.Namespace, kinds: dict[str, int], reached: Callable[[], bool]) -> Iterator[Drawn]:
    """The scenes that the command line asks for."""
    if arguments.case is not None:
        yield from ((kind, arguments.case) for kind in kinds)
    elif arguments.faults is not None or arguments.layouts is not None:
        yield from schedule.counted(kinds, arguments.seed, arguments.faults or 0, arguments.layouts or 0, reached)
    else:
        until = time.monotonic() + 60 * (arguments.minutes or MINUTES)
        for drawn in schedule.endless(kinds, arguments.seed):
            if time.monotonic() >= until:
                return
            yield drawn
