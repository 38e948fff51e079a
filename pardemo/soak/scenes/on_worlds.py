"""Random layouts, and the faults of one rank within a step, as scenes: each on a World of its own."""

from collections.abc import Callable
from functools import partial

from pardemo import RankError, World
from pardemo.soak.layouts import case as cases
from pardemo.soak.layouts import techniques
from pardemo.soak.layouts.run import Outcome, first_line, run_layout
from pardemo.soak.ranks.faults import FAULTS, draw_fault
from pardemo.soak.ranks.run import run_fault
from pardemo.soak.scene import Kind, Scene, Wrong

#: Seconds for a fault that only a time limit can end, and for all others.
SHORT_S, LONG_S = 4.0, 90.0


def kinds(group: str) -> dict[str, Kind]:
    """The kinds of the group ``"layouts"`` or ``"ranks"``."""
    made = [_kind(group, name, _fault, 1) for name in FAULTS]
    if group == "layouts":
        made = [_kind(group, name, _layout, cases.WEIGHTS[name]) for name in cases.KINDS]
        made += [_kind(group, name, _technique, 2) for name in techniques.TECHNIQUES]
    return {kind.name: kind for kind in made}


def _kind(group: str, name: str, play: Callable[[str, Scene], str], weight: int) -> Kind:
    return Kind(f"{group}/{name}", partial(play, name), ("",), {}, 0.0, None, weight)


def _layout(name: str, scene: Scene) -> str:
    case = cases.draw(name, scene.number, scene.seed)
    with World(case.ranks) as world:
        return _told(scene, case, run_layout({case.ranks: world}, case))


def _technique(name: str, scene: Scene) -> str:
    with World(scene.chance.choice(techniques.RANKS)) as world:
        try:
            world.run(techniques.check, name, scene.number, scene.seed, timeout_s=LONG_S)
        except RankError as error:
            raise Wrong(first_line(error)) from None
    return "equal"


def _fault(name: str, scene: Scene) -> str:
    case = draw_fault(name, scene.number, scene.seed, str(scene.folder))
    with World(case.ranks) as world:
        limit_s = SHORT_S if FAULTS[name].at_limit is not None else LONG_S
        return _told(scene, case, run_fault({case.ranks: world}, case, limit_s))


def _told(scene: Scene, case: object, outcome: Outcome) -> str:
    scene.expect(outcome.status != "failed", f"{outcome.told} [{case}]")
    return outcome.told
