"""What a scene is: one piece of work with one fault, played in a process of its own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TypeVar

MARK = "kind of scene"
#: Seconds that a scene may take before it counts as a hang: a hundred times what most take, for loaded machines.
LIMIT_S = 180.0


class Wrong(Exception):
    """The scene did not end as it should: the message says what happened instead."""


class Lost(Wrong):
    """Work that was whole before the fault is gone, or was done for nothing: the message says which."""


class NotReached(Exception):
    """The scene's fault did not take place, as where the work was over before it: the message says why."""


class Skipped(Exception):
    """This machine cannot play the scene: the message says why."""


@dataclass(frozen=True)
class Scene:
    """A drawn scene, as its function sees it.

    Attributes: ``kind``, as ``"world/killed"``; ``number``, ``seed``: what it is drawn from; ``way``: one of the kind's
    ways; ``folder``: a folder of the scene's own, empty at its begin; ``shared``: a folder that all scenes of a run
    have, for what is expensive to make; ``begin()``: tells the stage that the signal, if the kind has one, may come.
    """

    kind: str
    number: int
    seed: int
    way: str
    folder: Path
    shared: Path
    begin: Callable[[], None] = lambda: None

    @cached_property
    def chance(self) -> Random:
        """Random numbers of this scene: the same each time that it is played."""
        return Random(f"{self.seed} {self.kind} {self.number}")

    def expect(self, right: bool, told: object) -> None:
        """Raises :class:`Wrong` with what was ``told`` where something is not right."""
        if not right:
            raise Wrong(str(told))

    def keeps(self, kept: bool, told: object) -> None:
        """Raises :class:`Lost` with what was ``told`` where work is lost."""
        if not kept:
            raise Lost(str(told))


@dataclass(frozen=True)
class Kind:
    """A kind of scene.

    ``play`` runs in a process of its own and returns what was told by the error, for the record; it raises
    :class:`Wrong`, :class:`NotReached` or :class:`Skipped`. ``ways``: the variants, drawn in turn. ``signals``, by way:
    the signal that the process gets at a random moment after ``scene.begin()``, within ``within_s`` seconds. ``after``,
    where there is one, runs in another process when the first has ended, whatever ended it: it looks whether work was
    lost. ``leaves``, by way: patterns of temporary files that cannot but stay, since who made them was killed.
    """

    name: str
    play: Callable[[Scene], object]
    ways: tuple[str, ...]
    signals: Mapping[str, int]
    within_s: float
    after: Callable[[Scene], object] | None
    weight: int
    leaves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def way(self, number: int, seed: int) -> str:
        """The way of a case: each in turn, in an order drawn from the seed, so that few cases see all of them."""
        ways = list(self.ways)
        Random(f"{seed} {self.name}").shuffle(ways)
        return ways[number % len(ways)]

    def delay_s(self, number: int, seed: int) -> float:
        """When the signal comes, after ``begin()``: more often early than late, where most happens."""
        return self.within_s * Random(f"{seed} {self.name} {number} signal").random() ** 2


Play = TypeVar("Play", bound=Callable[[Scene], object])


def scene(
    name: str,
    ways: Iterable[str] = ("",),
    signals: Mapping[str, int] | None = None,
    within_s: float = 2.0,
    after: Callable[[Scene], object] | None = None,
    weight: int = 1,
    leaves: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[Play], Play]:
    """Marks a function as a kind of scene; :func:`kinds_of` finds it in its module. ``weight``: how often it comes."""

    def mark(play: Play) -> Play:
        play.__dict__[MARK] = Kind(name, play, tuple(ways), signals or {}, within_s, after, weight, leaves or {})
        return play

    return mark


def kinds_of(module: ModuleType) -> dict[str, Kind]:
    """The kinds of scene of a module, by name, in the order in which they stand there."""
    marked = (getattr(value, MARK, None) for value in vars(module).values())
    return {each.name: each for each in marked if isinstance(each, Kind)}
