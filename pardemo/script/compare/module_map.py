"""Maps which modules of a step were compared with the reference's, and which of them differ."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pardemo.script.compare.differences import StepComparison
from pardemo.script.compare.findings import wrong_gradients
from pardemo.script.compare.pairs import Pair
from pardemo.script.compare.reference import Reference

#: What a cell says. One that is empty has nothing to compare: a module without parameters has no gradient.
EQUAL, DIFFERENT, NOT_COMPARED, NOTHING = "equal", "different", "not compared", ""
#: What each column is about, and how that is called in a sentence.
COLUMNS = {"forward": "outputs of modules", "gradient": "gradients", "update": "changes of parameters"}
ROOT = "(root)"


@dataclass(frozen=True)
class Cell:
    """The state of what was compared of a module, and its factor where all of it is off by one number."""

    state: str = NOTHING
    factor: float | None = None


@dataclass(frozen=True)
class ModuleRow:
    """A module: its name, its class, and what was compared of it. Of parameters only its own count."""

    module: str
    kind: str
    cells: tuple[Cell, Cell, Cell]


@dataclass(frozen=True)
class ModelMap:
    """A map of a layout's step, compared with the reference's.

    ``rows``: modules in a tree, each before those inside it, and those in the order in which they run. ``counts``: of
    each of :data:`COLUMNS` how many were compared, and of how many. ``root``: the name of the whole model.
    """

    step: int
    rows: tuple[ModuleRow, ...]
    counts: Mapping[str, tuple[int, int]]
    root: str = ROOT


def step_map(
    reference: Reference, step: int, comparison: StepComparison | None = None, alike: Iterable[str] = frozenset()
) -> ModelMap:
    """Makes the map of a step: of its samples only, or with ``comparison`` of outputs, gradients and parameters.

    Where outputs part, gradients and parameters are not looked at: they are of what was wrong before them.

    Args:
        alike: modules whose outputs are the reference's.
    """
    parameters, order = reference.whole[step], reference.order[step]
    parted = {output.module for output in comparison.parted} if comparison else set()
    outputs = dict.fromkeys(alike, EQUAL) | dict.fromkeys(parted, DIFFERENT)
    pairs = (comparison.gradients, comparison.updates) if comparison and not parted else ({}, {})
    wrong = wrong_gradients(comparison) if comparison and not parted else set()
    gradients = {
        name: _cell(pairs[0].get(name), name in wrong)
        for name in parameters.before
        if name in parameters.gradients or name in pairs[0] or name in wrong
    }
    moved = {name for name, pair in pairs[1].items() if not pair.equal or pair.apart}
    updates = {name: _cell(pairs[1].get(name), name in moved) for name in parameters.before}
    calls = [call for record in reference.run.records for call in record.steps[step].calls]
    kinds = {call.module: call.kind for call in calls}
    root = next((name for name in reversed(order) if kinds.get(name) == name), ROOT)  # the model is called by its class
    held: dict[str, list[str]] = {}
    for name in parameters.before:
        held.setdefault(name.rpartition(".")[0] or root, []).append(name)
    rows = []
    for module in tree([*order, *held], order, root):
        cells = (
            Cell(outputs.get(module, NOT_COMPARED) if module in order else NOTHING),
            _merge_cells([gradients[name] for name in held.get(module, []) if name in gradients]),
            _merge_cells([updates[name] for name in held.get(module, [])]),
        )
        rows.append(ModuleRow(module, kinds.get(module, ""), cells))
    compared = [sum(cell.state != NOT_COMPARED for cell in cells.values()) for cells in (gradients, updates)]
    counts = {
        "forward": (len(outputs.keys() & order), len(order)),
        "gradient": (compared[0], len(gradients)),
        "update": (compared[1], len(updates)),
    }
    return ModelMap(step + 1, tuple(rows), counts, root)


def _cell(pair: Pair | None, wrong: bool) -> Cell:
    if wrong:
        plain = pair is not None and not pair.apart and pair.rest <= 1e-6
        return Cell(DIFFERENT, pair.factor if plain and pair is not None else None)
    return Cell(NOT_COMPARED if pair is None else EQUAL)


def _merge_cells(cells: list[Cell]) -> Cell:
    """Merges the cells of a module's parameters: different where one is, equal only where all are."""
    for state in (DIFFERENT, NOT_COMPARED, EQUAL):
        these = [cell for cell in cells if cell.state == state]
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
    around: dict[str, list[str]] = {}  # of each name those that it is inside of, and itself
    first: dict[str, float] = {}
    for name in names:
        parts = name.split(".")
        if parts[0] == root and name != root:
            continue  # of another wrapper around the same model
        prefixes = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        for depth, prefix in enumerate(prefixes):
            around[prefix] = prefixes[: depth + 1]
            first[prefix] = min(first.get(prefix, math.inf), order.get(name, math.inf))
    return sorted(first, key=lambda name: (name != root, [(first[prefix], prefix) for prefix in around[name]]))
