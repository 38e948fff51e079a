"""The map of the model as HTML: a row for each module, grey where it is right and coloured where it is wrong."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from pardemo.draw.page_parts import words
from pardemo.prove.model_map import COLUMNS, DIFFERENT, EQUAL, NOT_COMPARED, Cell, Map, Row

STYLE = """
.map { display: grid; grid-template-columns: minmax(0, max-content) repeat(3, minmax(4.2rem, max-content)); gap: 2px;
  margin: .8rem 0; font-size: .9rem; line-height: 1.35; }
.map > div { display: contents; }
.map .head { color: var(--off); text-align: center; padding: .15rem .3rem; }
.map .module { padding: .15rem 1rem .15rem calc(var(--depth) * .9rem); overflow-wrap: anywhere; }
.map .first code { font-weight: 700; }
.map b { color: var(--fails); white-space: nowrap; }
.cell { text-align: center; padding: .15rem .3rem; border-radius: .15rem; min-height: 1.5em; white-space: nowrap; }
.equal { background: var(--soft); color: var(--off); }
.different { background: var(--fails); color: var(--paper); font-weight: 600; }
.uncompared { color: var(--off); background: repeating-linear-gradient(45deg, transparent 0 4px, var(--line) 4px 5px);
  box-shadow: inset 0 0 0 1px var(--line); }
.means { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; padding: 0; font-size: .9rem; }
.means .cell { display: inline-block; min-width: 3rem; margin-right: .4em; }
@media (max-width: 44rem) { .map { font-size: .8rem; grid-template-columns: minmax(0, 1fr) repeat(3, 3.9rem); }
  .map small { display: none; }
  .map .module { padding: .15rem .3rem .15rem calc(var(--depth) * .55rem); }
  .map .head, .cell { padding: .15rem .1rem; } }
"""
#: Numbered modules in a row that are alike, from which on one row stands for all of them.
FOLDED = 3
_CLASSES = {EQUAL: "equal", DIFFERENT: "different", NOT_COMPARED: "uncompared"}
_SIGNS = {EQUAL: "=", DIFFERENT: "≠", NOT_COMPARED: "?"}


@dataclass
class _Module:
    """A module with those inside it."""

    row: Row
    inside: list["_Module"] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.row.module.rpartition(".")[2]

    @property
    def empty(self) -> bool:
        """Whether it only holds others, as a list of layers: it does not run, and has no parameters."""
        return bool(self.inside) and not any(cell.state for cell in self.row.cells)


@dataclass(frozen=True)
class Line:
    """A row of the drawing: of one module, or of several that are alike."""

    label: str
    title: str
    depth: int
    row: Row
    first: bool


def drawing(of: Map, first: Iterable[str]) -> str:
    """The map, and what its signs mean.

    Args:
        first: modules at which a finding begins.
    """
    head = "".join(f'<div class="head" role="columnheader">{words(name)}</div>' for name in ("", *COLUMNS))
    body = "".join(f'<div role="row">{_line(line)}</div>\n' for line in lines(of, first))
    means = {
        EQUAL: "equal to the reference's", DIFFERENT: "different; × 2: twice the reference's",
        NOT_COMPARED: "not compared",
    }  # fmt: skip
    legend = "".join(f"<li>{_cell(Cell(state), '')}{words(meaning)}</li>" for state, meaning in means.items())
    return (
        f'<div class="map" role="table" aria-label="map of the model"><div role="row">{head}</div>\n{body}</div>\n'
        f'<ul class="means">{legend}<li>empty: nothing there, as no gradient without parameters</li></ul>'
    )


def _line(line: Line) -> str:
    kind = f" <small>{words(line.row.kind)}</small>" if line.row.kind not in ("", line.label) else ""
    here = " <b>◀ first</b>" if line.first else ""
    module = (
        f'<div class="module{" first" if line.first else ""}" role="rowheader" style="--depth: {line.depth}" '
        f'title="{words(line.title)}"><code>{words(line.label)}</code>{kind}{here}</div>'
    )
    return module + "".join(
        _cell(cell, f"{line.title}, {what}: {cell.state or 'none'}")
        for cell, what in zip(line.row.cells, COLUMNS, strict=True)
    )


def _cell(cell: Cell, title: str) -> str:
    sign = f"×\N{NO-BREAK SPACE}{cell.factor:.4g}" if cell.factor is not None else _SIGNS.get(cell.state, "")
    name = f"cell {_CLASSES[cell.state]}" if cell.state else "cell"
    said = f' title="{words(title)}" role="cell"' if title else ""
    return f'<span class="{name}"{said}>{sign}</span>'


def lines(of: Map, first: Iterable[str] = ()) -> list[Line]:
    """The rows of the drawing. One that only holds others is left out, and its name stands before theirs; of numbered
    siblings in a row that are alike, with all that is inside them, the first stands for all.
    """  # fmt: skip
    marked = frozenset(first)
    roots: list[_Module] = []
    by_name: dict[str, _Module] = {}
    for row in of.rows:
        module = by_name[row.module] = _Module(row)
        around = by_name.get(row.module.rpartition(".")[0])
        (around.inside if around else roots).append(module)
    return list(_lines(roots, "", 0, marked))


def _lines(modules: list[_Module], before: str, depth: int, marked: frozenset[str]) -> Iterator[Line]:
    for same in _runs(modules, marked):
        one, last = same[0], same[-1]
        if one.empty and len(same) == 1:
            yield from _lines(one.inside, f"{before}{one.name}.", depth, marked)
            continue
        label, title = f"{before}{one.name}", one.row.module
        if len(same) > 1:
            label, title = f"{label} … {before}{last.name}", f"{title} … {last.row.module}"
        yield Line(label, title, depth, one.row, one.row.module in marked)
        yield from _lines(one.inside, "", depth + 1, marked)


def _runs(modules: list[_Module], marked: frozenset[str]) -> Iterator[list[_Module]]:
    """Modules one by one, and runs of numbered ones that are alike together."""
    for key, group in groupby(modules, lambda one: (one.name.isdigit(), _alike(one, marked))):
        some = list(group)
        if key[0] and len(some) >= FOLDED:
            yield some
        else:
            yield from ([one] for one in some)


def _alike(module: _Module, marked: frozenset[str]) -> tuple:
    """Equal for modules that look the same on the map."""
    cells = tuple((cell.state, None if cell.factor is None else f"{cell.factor:.4g}") for cell in module.row.cells)
    inside = tuple((one.name, _alike(one, marked)) for one in module.inside)
    return module.row.kind, cells, module.row.module in marked, inside
