"""A notebook's parameters, read from its source before a kernel starts: names, defaults, how many ranks it takes."""

import ast
from pathlib import Path
from typing import Any

from pardemo.book.page.presets import need_ranks


class RunError(ValueError):
    """A request that cannot be carried out: one line, said before anything runs."""


def parameters_of(path: Path) -> dict[str, Any]:
    """Names and default values of a notebook's ``parameters`` cell."""
    defaults: dict[str, Any] = {}
    for code, tags in _code_cells(path):
        if "parameters" in tags:
            for node in code.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    defaults[node.targets[0].id] = ast.literal_eval(node.value)
    return defaults


def ranks_of(path: Path) -> dict[str, int]:
    """Returns the notebook's limits to ``world_size``: the keywords of its ``need_ranks(world_size, …)``."""
    for code, _ in _code_cells(path):
        for node in ast.walk(code):
            if isinstance(node, ast.Call) and _name_of(node.func) == need_ranks.__name__:
                return {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return {}


def _name_of(function: ast.expr) -> str:
    """``need_ranks`` of ``need_ranks`` and of ``page.need_ranks``."""
    return getattr(function, "attr", getattr(function, "id", ""))


def assign(selected: dict[str, Path], parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Gives each notebook the parameters that it has.

    Raises:
        RunError: a parameter that no selected notebook has, a value of another type than its default, or a number of
            ranks that a notebook cannot run with.
    """
    defaults = {name: parameters_of(path) for name, path in selected.items()}
    for key, value in parameters.items():
        homes = [name for name in selected if key in defaults[name]]
        if not homes:
            names = sorted({k for ks in defaults.values() for k in ks})
            raise RunError(f"no selected notebook has a parameter {key!r}; there are: {', '.join(names)}")
        for name in homes:
            default = defaults[name][key]
            fits = type(value) is type(default) or (isinstance(default, float) and type(value) is int)
            if default is not None and not fits:
                kind = type(default).__name__
                raise RunError(f"parameter {key} of {name} is a {kind} (default {default!r}), not {value!r}")
            if key == "world_size":
                _check_ranks(name, selected[name], value)
    return {name: {k: v for k, v in parameters.items() if k in defaults[name]} for name in selected}


def _check_ranks(name: str, path: Path, world_size: int) -> None:
    try:
        need_ranks(world_size, notebook=name, **ranks_of(path))
    except ValueError as error:
        raise RunError(str(error)) from None


def _code_cells(path: Path) -> list[tuple[ast.Module, list[str]]]:
    """Each code cell, parsed, and its tags; cells with a line of IPython's (``%…``, ``!…``) are none of these."""
    import nbformat

    cells = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            try:
                cells.append((ast.parse(cell.source), cell.metadata.get("tags", [])))
            except SyntaxError:
                continue
    return cells
