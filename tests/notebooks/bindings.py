"""Which top-level names the cells of a notebook bind and read, and which are read elsewhere although bound twice."""

import ast
import builtins
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import nbformat

from pardemo.cells import magic
from pardemo.cells.meters import METERS


@dataclass
class Cell:
    """The names of one cell.

    Attributes:
        number: the cell's position in the notebook.
        binds: the names that it binds, each with the import that binds it, or "".
        reads: the names that it reads before it has bound them itself.
        changes: the names of what another cell bound and this one changes: ``name[key] = …``, ``name.of = …``.
        on_call: for each function defined here, the global names that its body reads when it is called.
    """

    number: int
    binds: dict[str, str] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)
    on_call: dict[str, set[str]] = field(default_factory=dict)

    def follow(self, statements: Iterable[ast.stmt]) -> None:
        """Notes what statements read and bind, in their order."""
        for statement in statements:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                self.on_call[statement.name] = _names(ast.unparse(statement), "exec") - {statement.name}
                self.binds[statement.name] = ""
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                for alias in statement.names:
                    name = alias.asname or alias.name.split(".")[0]
                    self.binds[name] = f"import {getattr(statement, 'module', '')} {alias.name}"
            else:
                self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        targets: list[ast.expr] = []
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.withitem):
                self._read(_names(ast.unparse(child.context_expr)))
                targets += [child.optional_vars] if child.optional_vars else []
            elif isinstance(child, ast.expr):
                if isinstance(getattr(child, "ctx", None), ast.Store):
                    targets.append(child)
                else:
                    self._read(_names(ast.unparse(child)))
        for name in (node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)):
            if isinstance(name.ctx, ast.Load) or isinstance(statement, ast.AugAssign):
                self._read({name.id})
            if isinstance(name.ctx, ast.Store):
                self.binds[name.id] = ""
        for target in targets:
            if isinstance(target, (ast.Subscript, ast.Attribute)):
                name = target.value
                while isinstance(name, (ast.Subscript, ast.Attribute)):
                    name = name.value
                if isinstance(name, ast.Name) and name.id not in self.binds:
                    self.changes.add(name.id)
        for block in ("body", "orelse", "finalbody"):
            self.follow(getattr(statement, block, []))
        for handler in getattr(statement, "handlers", []):
            self.binds |= {handler.name: ""} if handler.name else {}
            self.follow(handler.body)

    def _read(self, names: set[str]) -> None:
        self.reads |= names - self.binds.keys()


def _names(source: str, mode: str = "eval") -> set[str]:
    """The names that an expression reads, or a definition's body does: those that are not its own."""

    def of(table: symtable.SymbolTable, outermost: bool) -> Iterator[str]:
        yield from (s.get_name() for s in table.get_symbols() if s.is_referenced() and (outermost or s.is_global()))
        for child in table.get_children():
            yield from of(child, False)

    return set(of(symtable.symtable(source, "<cell>", mode), True))


def cells_of(notebook: nbformat.NotebookNode) -> list[Cell]:
    """The code cells; of one for ranks the names that it takes from the notebook and leaves there."""
    cells = [Cell(number) for number, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for cell in cells:
        source = notebook.cells[cell.number].source
        first = source.partition("\n")[0]
        if first.startswith("%%ranks"):
            options = magic._parse(re.sub(r"\{\w+\}", "1", first.removeprefix("%%ranks")))
            inserted = re.findall(r"\{(\w+)\}", first)
            cell._read({*inserted, *options.put, *([options.cluster] if options.cluster else [])})
            meters = [getattr(options, meter) for meter in METERS if getattr(options, meter)]
            cell.binds = dict.fromkeys([*options.get, *meters], "")
        elif not first.startswith("%%"):  # what %%writefile puts into a file binds nothing here
            cell.follow(ast.parse(re.sub(r"(?m)^%.*$", "", source)).body)
    return cells


def unbound(cells: list[Cell]) -> dict[str, int]:
    """Names that a cell reads and that neither it nor a cell above it binds, each with the first such cell's number."""
    bound = {*dir(builtins), "display", "get_ipython"}
    missing: dict[str, int] = {}
    for cell in cells:
        for name in sorted(cell.reads - bound):
            missing.setdefault(name, cell.number)
        bound |= cell.binds.keys()
    return missing


def changed_elsewhere(cells: list[Cell]) -> dict[str, list[int]]:
    """Names that a cell binds and another one changes: the first run again alone loses what the second one did."""
    binders = {name for cell in cells for name, imported in cell.binds.items() if not imported}
    changed = sorted({name for cell in cells for name in cell.changes & binders})
    return {name: [cell.number for cell in cells if name in cell.changes] for name in changed}


def bound_again(cells: list[Cell]) -> dict[str, list[int]]:
    """Names that a cell reads which does not bind them, and that more than one cell binds: with those cells' numbers.

    The same import in several cells binds the same. A function reads what its body does in the cell that calls it.
    """
    bodies = {name: reads for cell in cells for name, reads in cell.on_call.items()}
    read: set[str] = set()
    for cell in cells:
        waiting, seen = cell.reads | {n for name in cell.on_call for n in bodies[name] - cell.binds.keys()}, set()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting |= bodies.get(name, set())
        read |= seen
    binders: dict[str, dict[int, str]] = {}
    for cell in cells:
        for name, imported in cell.binds.items():
            binders.setdefault(name, {})[cell.number] = imported
    return {
        name: sorted(by_cell)
        for name, by_cell in binders.items()
        if name in read and len(by_cell) > 1 and (len(set(by_cell.values())) > 1 or "" in by_cell.values())
    }
