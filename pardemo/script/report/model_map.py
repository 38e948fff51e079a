"""Draws a map of a model: what of each module is equal in a layout, different, or was not compared."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

from pardemo.script.blocks import Block, Line, Lines, Marked, Table
from pardemo.script.compare.module_map import COLUMNS, DIFFERENT, EQUAL, NOT_COMPARED, Cell, ModelMap, ModuleRow

STYLE = """
.cell { display: block; text-align: center; padding: .15rem .3rem; border-radius: .15rem; min-height: 1.5em;
  min-width: 3rem; white-space: nowrap; }
li .cell { display: inline-block; margin-right: .4em; }
.equal { background: var(--soft); color: var(--off); }
.different { background: var(--fails); color: var(--paper); font-weight: 600; }
.uncompared { color: var(--off); background: repeating-linear-gradient(45deg, transparent 0 4px, var(--line) 4px 5px);
  box-shadow: inset 0 0 0 1px var(--line); }
"""
#: Numbered modules in a row that are alike, from which on one row stands for all of them.
FOLDED = 3
_CLASSES = {EQUAL: "equal", DIFFERENT: "different", NOT_COMPARED: "uncompared"}
_SIGNS = {EQUAL: "=", DIFFERENT: "≠", NOT_COMPARED: "?"}


@dataclass
class _Module:
    """A module with those inside it."""

    row: ModuleRow
    inside: list["_Module"] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.row.module.rpartition(".")[2]

    @property
    def empty(self) -> bool:
        """Whether it only holds others, as a list of layers: it does not run, and has no parameters."""
        return bool(self.inside) and not any(cell.state for cell in self.row.cells)


@dataclass(frozen=True)
class MapLine:
    """A row of the drawing: of one module, or of several that are alike."""

    label: str
    title: str
    depth: int
    row: ModuleRow
    first: bool


def map_blocks(model: ModelMap, first: Iterable[str]) -> list[Block]:
    """Draws the map, and says what its signs mean.

    Args:
        first: modules at which a finding begins.
    """
    rows: list[Sequence[Line]] = []
    for line in map_lines(model, first):
        indent = f' style="margin-left: {line.depth}em" title="{escape(line.title)}"'
        kind = "" if line.row.kind == line.label else line.row.kind
        here = Marked("strong", "◀ first" * line.first, ' class="failed"')
        cells: list[Line] = [
            [_cell(cell, f' title="{escape(line.title)}, {column}: {cell.state or "none"}"')]
            for cell, column in zip(line.row.cells, COLUMNS, strict=True)
        ]
        rows.append(([Marked("code", line.label, indent), " ", Marked("small", kind), " ", here], *cells))
    means = {
        EQUAL: "equal to the reference's", DIFFERENT: "different; × 2: twice the reference's",
        NOT_COMPARED: "not compared",
    }  # fmt: skip
    legend: list[Line] = [[_cell(Cell(state)), meaning] for state, meaning in means.items()]
    return [Table(("", *COLUMNS), rows), Lines([*legend, "empty: nothing there, as no gradient without parameters"])]


def _cell(cell: Cell, title: str = "") -> Marked:
    sign = f"×\N{NO-BREAK SPACE}{cell.factor:.4g}" if cell.factor is not None else _SIGNS.get(cell.state, "")
    return Marked("span", sign, f' class="cell {_CLASSES.get(cell.state, "")}"{title}')


def map_lines(model: ModelMap, first: Iterable[str] = ()) -> list[MapLine]:
    """Makes the rows of the drawing.

    One that only holds others is left out, and its name stands before theirs; of numbered siblings in a row that are
    alike, with all that is inside them, the first stands for all.
    """
    marked = frozenset(first)
    roots: list[_Module] = []
    by_name: dict[str, _Module] = {}
    for row in model.rows:
        module = by_name[row.module] = _Module(row)
        around = by_name.get(row.module.rpartition(".")[0])
        (around.inside if around else roots).append(module)
    return list(_lines(roots, "", 0, marked))


def _lines(modules: list[_Module], before: str, depth: int, marked: frozenset[str]) -> Iterator[MapLine]:
    for same in _runs_of_equal(modules, marked):
        module, last = same[0], same[-1]
        if module.empty and len(same) == 1:
            yield from _lines(module.inside, f"{before}{module.name}.", depth, marked)
            continue
        label, title = f"{before}{module.name}", module.row.module
        if len(same) > 1:
            label, title = f"{label} … {before}{last.name}", f"{title} … {last.row.module}"
        yield MapLine(label, title, depth, module.row, module.row.module in marked)
        yield from _lines(module.inside, "", depth + 1, marked)


def _runs_of_equal(modules: list[_Module], marked: frozenset[str]) -> Iterator[list[_Module]]:
    """Returns modules one by one, and runs of numbered ones that are alike together."""
    for key, group in groupby(modules, lambda module: (module.name.isdigit(), _look(module, marked))):
        some = list(group)
        if key[0] and len(some) >= FOLDED:
            yield some
        else:
            yield from ([module] for module in some)


def _look(module: _Module, marked: frozenset[str]) -> tuple:
    """Returns a key that is equal for modules that look the same on the map."""
    cells = tuple((cell.state, None if cell.factor is None else f"{cell.factor:.4g}") for cell in module.row.cells)
    inside = tuple((inner.name, _look(inner, marked)) for inner in module.inside)
    return module.row.kind, cells, module.row.module in marked, inside
