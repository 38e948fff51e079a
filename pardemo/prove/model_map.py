"""The model's modules in the order of execution, and of each what was compared in a step: the map on the page."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pardemo.prove import causes
from pardemo.prove.facts import Facts, Pair
from pardemo.prove.runner import Run

if TYPE_CHECKING:  # which imports this
    from pardemo.prove.reference import Reference

#: What a cell says. One that is empty has nothing to compare: a module without parameters has no gradient.
EQUAL, DIFFERENT, NOT_COMPARED, NOTHING = "equal", "different", "not compared", ""
#: What each column is about, and how that is called in a sentence.
COLUMNS = {"forward": "outputs of modules", "gradient": "gradients", "update": "changes of parameters"}
ROOT = "(root)"


@dataclass(frozen=True)
class Cell:
    """What was compared of a module: a state, and the factor where all of it is off by one number."""

    state: str = NOTHING
    factor: float | None = None


@dataclass(frozen=True)
class Row:
    """A module: its name, its class, and what was compared of it. Of parameters only its own count."""

    module: str
    kind: str
    cells: tuple[Cell, Cell, Cell]


@dataclass(frozen=True)
class Map:
    """A step of a layout beside the reference's.

    ``rows``: modules in a tree, each before those inside it, and those in the order in which they run. ``counts``: of
    each of :data:`COLUMNS` how many were compared, and of how many. ``root``: the name of the whole model.
    """

    step: int
    rows: tuple[Row, ...]
    counts: Mapping[str, tuple[int, int]]
    root: str = ROOT


def of(facts: Facts, reference: "Reference", other: Run, alike: set[str]) -> Map:
    """The map of a step of which outputs, gradients and parameters were looked at.

    Where outputs part, gradients and parameters are not: they are of what was wrong before them.

    Args:
        alike: modules whose outputs are the reference's.
    """
    parted = {one.module for one in facts.parted}
    outputs = dict.fromkeys(facts.order, NOT_COMPARED)
    outputs |= dict.fromkeys(alike, EQUAL) | dict.fromkeys(parted, DIFFERENT)
    truth = reference.whole[facts.step]
    if parted:
        return made(reference, facts.step, outputs, {}, {})
    wrong = causes.wrong_gradients(facts, reference, other)
    gradients = {
        name: _cell(facts.gradients.get(name), name in wrong)
        for name in truth.before
        if name in truth.gradients or name in facts.gradients or name in wrong
    }
    updates = {}
    for name in truth.before:
        pair = facts.updates.get(name)
        updates[name] = _cell(pair, pair is not None and bool(not pair.equal or pair.apart))
    return made(reference, facts.step, outputs, gradients, updates)


def of_none(reference: "Reference", step: int) -> Map:
    """The map of a step of which samples or the first parameters differ: nothing that follows was looked at."""
    return made(reference, step, {}, {}, {})


def _cell(pair: Pair | None, wrong: bool) -> Cell:
    if wrong:
        plain = pair is not None and not pair.apart and pair.rest <= 1e-6
        return Cell(DIFFERENT, pair.factor if plain and pair is not None else None)
    return Cell(NOT_COMPARED if pair is None else EQUAL)


def made(
    reference: "Reference",
    step: int,
    outputs: Mapping[str, str],
    gradients: Mapping[str, Cell],
    updates: Mapping[str, Cell],
) -> Map:
    """A map of what is known of modules' outputs and of parameters; of the others it says that nothing is."""
    truth, order = reference.whole[step], reference.order[step]
    calls = [call for record in reference.run.records for call in record.steps[step].calls]
    kinds = {call.module: call.kind for call in calls}
    root = next((name for name in reversed(order) if kinds.get(name) == name), ROOT)  # the model is called by its class
    own: dict[str, list[str]] = {}
    for name in truth.before:
        own.setdefault(name.rpartition(".")[0] or root, []).append(name)
    rows = []
    for module in tree([*order, *own], order, root):
        names = own.get(module, [])
        trained = [name for name in names if name in truth.gradients or name in gradients]
        cells = (
            Cell(outputs.get(module, NOT_COMPARED) if module in order else NOTHING),
            _together(gradients.get(name, Cell(NOT_COMPARED)) for name in trained),
            _together(updates.get(name, Cell(NOT_COMPARED)) for name in names),
        )
        rows.append(Row(module, kinds.get(module, ""), cells))
    trained = [name for name in truth.before if name in truth.gradients or name in gradients]
    counts = {
        "forward": (sum(outputs.get(module, NOT_COMPARED) != NOT_COMPARED for module in order), len(order)),
        "gradient": (_compared(gradients, trained), len(trained)),
        "update": (_compared(updates, truth.before), len(truth.before)),
    }
    return Map(step + 1, tuple(rows), counts, root)


def _compared(cells: Mapping[str, Cell], names: Iterable[str]) -> int:
    return sum(name in cells and cells[name].state != NOT_COMPARED for name in names)


def _together(cells: Iterable[Cell]) -> Cell:
    """Of a module's parameters: different where one is, equal only where all are."""
    some = list(cells)
    for state in (DIFFERENT, NOT_COMPARED, EQUAL):
        these = [cell for cell in some if cell.state == state]
        if these:
            factors = {None if cell.factor is None else f"{cell.factor:.4g}" for cell in these}
            return Cell(state, these[0].factor if len(factors) == 1 else None)
    return Cell()


def tree(names: Iterable[str], order: Mapping[str, int], root: str = ROOT) -> list[str]:
    """Names and those around them, each before what is inside it; those inside one in the order in which they run.

    >>> tree(["head", "blocks.0.up", "embed"], {"embed": 0, "blocks.0.up": 1, "head": 2})
    ['embed', 'blocks', 'blocks.0', 'blocks.0.up', 'head']

    Args:
        order: of those that run, when they end. root: the name of the whole model, which comes first.
    """
    inside: dict[str, list[str]] = {}
    first: dict[str, float] = {}
    given = list(dict.fromkeys(names))
    for name in given:
        at = order.get(name, float("inf"))
        while name not in first or at < first[name]:
            around = name.rpartition(".")[0]
            if name not in first and name != root:
                inside.setdefault(around, []).append(name)
            first[name] = min(at, first.get(name, at))
            if not around:
                break
            name = around
    found = [root] if root in first else []
    left = sorted(inside.get("", []), key=first.__getitem__, reverse=True)
    while left:
        name = left.pop()
        found.append(name)
        left += sorted(inside.get(name, []), key=first.__getitem__, reverse=True)
    return found
