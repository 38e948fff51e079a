"""Gives predictions their intervals, from the errors on published runs of their kind.

Split-conformal (Vovk et al.; Lei et al. 2018, arXiv 1604.04173): of n runs that no constant was fitted to, take known
over predicted, and of these ratios the ⌊(n+1)·10 %⌋-th and the ⌈(n+1)·90 %⌉-th. The next run of that kind lies between
them with a probability of at least 80 %, as long as it is drawn like the others. That is the assumption. (Which terms
the model has was decided with all rows in view: no constant has seen these runs, their author has.)

The ratios of each kind stand in ``known_ratios.json``, which ``tests/calibration/known_ratios.py`` writes. Beside them
stand of each program with releases by how much it becomes faster a month, so that four of five runs of a later release
lie in the interval of an earlier one's constants; and over how many hosts its runs have gone.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout

RATIOS = Path(__file__).with_name("known_ratios.json")
COVERAGE = 0.8
FEWEST = 9  # runs of a kind: with fewer, the largest and the smallest of them promise less than 80 %
#: Hosts up to which a kind of runs goes: on more of them runs scatter more. Of nanotron's on 32 hosts, an interval of
#: those on 4 and 8 holds two of three.
FEW_HOSTS, MANY_HOSTS = 8, 32
WIDER = 1.5  # of the logarithm, where no run of the program is known, or none so far over the network
#: Levels of network, from the nearest on.
LEVELS = ("one host", "hosts", "tens of hosts", "many hosts", "TP over hosts", "TP over many hosts")
FAR = LEVELS[3:]
LORA = " with LoRA"  # of which too few runs are published: those of full training stand in
#: The level that stands in, widened, for one where too few runs are known.
NEARER = {"many hosts": "tens of hosts", "TP over many hosts": "TP over hosts"}


@dataclass(frozen=True)
class Interval:
    """Between which two an outcome lies in four of five cases.

    Args:
        low, high: in the prediction's unit. kind: of runs that say so; runs: how many. like: whether they are runs of
            the prediction's own program, on its level of the network; else they only stand in. newer: what a release
            that is newer than all that were fitted does to it; "" where it is none.
    """

    low: float
    high: float
    kind: str
    runs: int
    like: bool
    newer: str = ""

    @property
    def why(self) -> str:
        """The runs that the interval comes from, in one clause."""
        more = f"; {self.newer}" if self.newer else ""
        if self.like:
            return f"from {self.runs} runs: {self.kind}{more}"
        if self.kind == FINE_TUNES:
            return f"from {self.runs} runs of Qwen's models, and wider by half, since others' norms are not fused{more}"
        return f"nothing like it is known; wider than that of {self.runs} runs: {self.kind}{more}"


def network_level(job: Job, layout: Layout) -> str:
    """Returns which of :data:`LEVELS` a layout's traffic reaches."""
    many = job.machine.hosts > MANY_HOSTS
    if not job.machine.inside(layout.tp):
        return "TP over many hosts" if many else "TP over hosts"
    if layout.gpus <= job.machine.host_gpus:
        return "one host"
    return "many hosts" if many else "tens of hosts" if job.machine.hosts > FEW_HOSTS else "hosts"


def kinds_of_runs(job: Job, layout: Layout) -> list[str]:
    """Returns the kinds that a layout is of, from the narrowest on; the second may be the one that is nearest to it."""
    experts = ("experts" if job.shape.experts else "dense") + (LORA if job.frozen else "")
    program, reached = job.program.name.removesuffix("-compiled"), network_level(job, layout)
    levels = [reached, *([NEARER[reached]] if reached in NEARER else [])]
    return [*(f"{program}, {experts}, {each}" for each in levels), f"{program}, {experts.removesuffix(LORA)}", program]


def of_seconds(job: Job, layout: Layout, seconds: float) -> Interval:
    """Returns the interval of a step's predicted seconds.

    Of a release that is newer than all that were fitted it goes further down, by what the program becomes faster a
    month; runs on the very machine (``job.measured``) have measured that away.
    """
    interval = _interval(_ratios()["seconds"], kinds_of_runs(job, layout), seconds, job.measured)
    months, program = job.program.months_ahead, job.program
    if job.measured or not months:
        return interval
    faster = 1 - (1 - faster_a_month(program.name)) ** months
    newer = f"release {program.release} is {months} month{'s' * (months > 1)} newer than the last one that was fitted, "
    newer += f"{program.fitted_release}, so it goes {100 * faster:.0f} % further down"
    return replace(interval, low=interval.low * (1 - faster), newer=newer)


def faster_a_month(program: str) -> float:
    """Returns the share of a step's time that a program's later releases save a month, at most in four of five runs."""
    return _ratios()["faster a month"].get(program, 0.0)


def measured_hosts(program: str) -> tuple[int, int] | None:
    """Hosts of the largest published run of a program that computed, and most that one stage's replicas went over.

    None of a program of which no run is published.
    """
    hosts = _ratios()["hosts"].get(program.removesuffix("-compiled"))
    return None if hosts is None else (hosts[0], hosts[1])


def stage_hosts(job: Job, layout: Layout) -> int:
    """Hosts that a pipeline stage's ranks are on: over these its gradients are summed."""
    return min(job.machine.hosts, -(-layout.tp * layout.cp * layout.dp // job.machine.host_gpus))


def beyond_measured(job: Job, layout: Layout) -> bool:
    """Returns whether a layout's stages go over more hosts than those of any published run of the program."""
    known = measured_hosts(job.program.name)
    return known is not None and job.machine.hosts > known[0] and stage_hosts(job, layout) > known[1]


def of_bytes(job: Job, layout: Layout, nbytes: float) -> Interval:
    """Returns the interval of a GPU's predicted bytes."""
    return _interval(_ratios()["bytes"], kinds_of_runs(job, layout), nbytes, False)


FINE_TUNES = "transformers, fine-tunes"


def of_fine_tune(quantity: str, predicted: float) -> Interval:
    """Returns the interval of a fine-tune's ``seconds`` or ``bytes``.

    The times that are known are of one family of models whose norms are fused, so that those of others are wider.
    """
    return _interval(_ratios()[quantity], [FINE_TUNES], predicted, False, alike=quantity == "bytes")


def _interval(
    ratios_by_kind: Mapping[str, list[float]], names: Sequence[str], predicted: float, centred: bool, alike: bool = True
) -> Interval:
    pooled = {name: [r for kind, ratios in ratios_by_kind.items() if _is(kind, name) for r in ratios] for name in names}
    pooled["all programs"] = [r for kind, ratios in ratios_by_kind.items() if kind != FINE_TUNES for r in ratios]
    name = next((name for name in names if len(pooled[name]) >= FEWEST), "all programs")
    like = name == names[0] or (name != "all programs" and not names[0].endswith(FAR) and LORA not in names[0])
    like = like and alike
    low, high = (bound if like else bound**WIDER for bound in between(pooled[name], centred))
    return Interval(predicted * low, predicted * high, name, len(pooled[name]), like)


def _is(kind: str, name: str) -> bool:
    """Returns whether runs of a kind are of a wider one, too: ``nanotron, dense, hosts`` are nanotron's."""
    return kind == name or kind.startswith(f"{name},")


def between(ratios: Sequence[float], centred: bool = False) -> tuple[float, float]:
    """Returns the two ratios between which the next one lies with a probability of at least 80 %.

    ``centred``: around their median, where a prediction's bias has been measured away.
    """
    sorted_ratios = sorted(ratios)
    n, tail = len(sorted_ratios), (1 - COVERAGE) / 2
    low = sorted_ratios[max(0, math.floor((n + 1) * tail) - 1)]
    high = sorted_ratios[min(n - 1, math.ceil((n + 1) * (1 - tail)) - 1)]
    middle = sorted_ratios[n // 2] if centred else 1.0
    return low / middle, high / middle


@functools.cache
def _ratios() -> dict[str, dict[str, Any]]:
    return json.loads(RATIOS.read_text(encoding="utf-8"))
