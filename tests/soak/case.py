"""What a case is: a piece of work with one fault in it, drawn from the seed, its kind and its number alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, TypeVar

Run = TypeVar("Run", bound=Callable[..., object])
BEGUN = "begun"  # a file beside the case's folder


class Wrong(Exception):
    """The case did not end as it should: the message says what happened instead."""


class Lost(Wrong):
    """Work that was whole before the fault is gone: the message says which."""


class NotReached(Exception):
    """The fault did not take place, as where the work was over before it: the message says why."""


class Skipped(Exception):
    """This machine cannot run the case: the message says why."""


@dataclass(frozen=True)
class Case:
    """A drawn case, as its function sees it.

    Attributes: ``kind``, as ``"world/killed"``; ``number``, ``seed``: what it is drawn from; ``way``: one of the kind's
    ways; ``folder``: the case's own, empty at its begin and its working folder; ``shared``: a folder that all cases of
    a run have, for what is expensive to make.
    """

    kind: str
    number: int
    seed: int
    way: str
    folder: Path
    shared: Path

    @cached_property
    def rng(self) -> Random:
        """Random numbers of this case: the same each time that it is run."""
        return Random(f"{self.seed} {self.kind} {self.number}")

    def begin(self) -> None:
        """Says that the signal, if the kind has one, may come."""
        (self.folder.parent / BEGUN).touch()

    def expect(self, right: object, told: object) -> None:
        """Raises :class:`Wrong` with what was ``told`` where something is not right."""
        if not right:
            raise Wrong(str(told))

    def keeps(self, kept: object, told: object) -> None:
        """Raises :class:`Lost` with what was ``told`` where work is lost."""
        if not kept:
            raise Lost(str(told))


@dataclass(frozen=True)
class Kind:
    """A kind of case; :func:`fault` makes one of a function.

    ``run`` runs in a process of its own and returns what the fault's error said; it raises :class:`Wrong`,
    :class:`NotReached` or :class:`Skipped`. ``ways``: the variants, drawn in turn. ``signals``, by way: the signal that
    the process gets at a random moment, within ``within_s`` seconds of ``case.begin()``. ``then``: runs in another
    process when the first has ended, whatever ended it. ``weight``: how often the kind is drawn in a round. ``leaves``,
    by way: patterns of temporary files that cannot but stay, because who made them was killed.
    """

    name: str
    run: Callable[[Case], object]
    ways: Sequence[str] = ("",)
    signals: Mapping[str, int] = field(default_factory=dict)
    within_s: float = 2.0
    then: Callable[[Case], object] | None = None
    weight: int = 1
    leaves: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def way(self, number: int, seed: int) -> str:
        """The way of a case: each in turn, in an order drawn from the seed, so that few cases see all of them."""
        ways = list(self.ways)
        Random(f"{seed} {self.name}").shuffle(ways)
        return ways[number % len(ways)]

    def delay_s(self, number: int, seed: int) -> float:
        """When the signal comes, after ``begin()``: more often early than late, where most happens."""
        return self.within_s * Random(f"{seed} {self.name} {number} signal").random() ** 2


def fault(name: str, ways: Iterable[str] = ("",), **more: Any) -> Callable[[Run], Run]:
    """Marks a function as a kind of case, with the fields of :class:`Kind`; :func:`kinds_of` finds it."""

    def mark(run: Run) -> Run:
        run.__dict__["kind"] = Kind(name, run, tuple(ways), **more)
        return run

    return mark


def kinds_of(module: ModuleType) -> dict[str, Kind]:
    """The kinds of a module, by name, in the order in which they stand there."""
    marked = [value.kind for value in vars(module).values() if isinstance(getattr(value, "kind", None), Kind)]
    return {kind.name: kind for kind in marked}
