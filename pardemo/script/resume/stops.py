"""Draws when, where and by which signal a script is stopped."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pardemo.script.resume import GRACE_S
from pardemo.world.errors import ranks_text

#: How a run ends before its end, and in words.
KINDS = {
    "rank": "SIGKILL of one rank",
    "all": "SIGKILL of all ranks",
    "launcher": "SIGKILL of the launcher",
    "save": "SIGKILL during a save",
    "term": "SIGTERM to all ranks",
}
#: Where in a step a rank is stopped: before its first forward pass, before the optimizer's step, right after it.
MOMENTS = {"forward": "before", "backward": "in", "step": "after"}
NEVER = "the stop never came: the script went another way than in the undisturbed run"


@dataclass(frozen=True)
class Stop:
    """A stop of the script: its kind, its moment, and the ranks that get the signal.

    ``done``: steps of the optimizer that are over when it comes; with the moment ``step`` one more, and nothing after
    it. ``ranks``: those that get the signal. ``share``: of a save, the part of its time that is over; ``saves_s``: the
    seconds of all saves after that step, in the undisturbed run.
    """

    kind: str
    done: int
    moment: str
    ranks: tuple[int, ...]
    share: float = 0.0
    saves_s: tuple[float, ...] = ()
    grace_s: float = GRACE_S

    @property
    def text(self) -> str:
        """``SIGKILL of rank 1 in step 5``."""
        signal = f"SIGKILL of {ranks_text(list(self.ranks))}" if self.kind == "rank" else KINDS[self.kind]
        if self.kind == "save":
            return f"{signal} after step {self.done}"
        return f"{signal} {MOMENTS[self.moment]} step {self.done + 1}"


def draw_stops(
    kinds: Sequence[str],
    steps: int,
    saved: Sequence[int],
    saves_s: Mapping[int, Sequence[float]],
    ranks: int,
    seed: int,
) -> list[Stop]:
    """Draws a stop of each kind.

    Args:
        steps: of the undisturbed run. saved: numbers of steps after which files had changed. saves_s: the seconds of
            the saves that were seen after a number of steps; where there are none, a stop of the kind ``save`` is
            left out.

    Raises:
        ValueError: nothing is saved before the last two steps, so that nothing could be resumed.
    """
    resumable = [done for done in range(steps - 1) if any(0 < number <= done for number in saved)]
    if not resumable:
        first = f"the first save comes after step {min(saved)}" if saved else "nothing is written to {folder}"
        raise ValueError(f"{first}, and {steps} steps are run: raise --steps, or let the script save more often")
    draw = random.Random(seed)
    stops = []
    for kind in kinds:
        done, moment = draw.choice(resumable), draw.choice(list(MOMENTS))
        drawn_rank, share = draw.randrange(ranks), draw.random()
        if kind == "save":
            later = [step for step in saves_s if any(0 < number < step for number in saved) and step < steps]
            if not later:
                continue
            done, moment = draw.choice(later), "forward"
        which = (drawn_rank,) if kind == "rank" else tuple(range(ranks))
        stops.append(Stop(kind, done, moment, which, share, tuple(saves_s[done]) if kind == "save" else ()))
    return stops
