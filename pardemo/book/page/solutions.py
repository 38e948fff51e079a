"""One way to solve each exercise: real code that the tests run, and that readers can unfold.

The functions are written as they would stand in the notebook: the stub's name and parameters, without type hints. A
reader sees :func:`text`, which runs where it is pasted, and has neither the mark of the exercise nor the hint.
"""

import ast
import inspect
from functools import cache
from importlib import import_module


@cache
def text(chapter: str, stub: str) -> str:
    """The code of a solution, with the imports and helpers that it needs and no others."""
    module = import_module(f"pardemo.book.chapters.{chapter}.exercises")
    body = ast.parse(inspect.getsource(module)).body
    helpers = {node.name: node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in helpers.values():
        node.decorator_list.clear()
    needed, used = {stub}, set()
    while needed:  # a helper may need another one
        used |= needed
        needed = {inner for name in needed & helpers.keys() for inner in _names(helpers[name])} - used
    imports = "\n".join(filter(None, (_import(node, used) for node in body)))
    lines = inspect.getsource(module).splitlines()
    code = "\n\n\n".join(_source(node, lines) for name, node in helpers.items() if name in used)
    return f"{imports}\n\n\n{code}".strip()


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _import(node: ast.stmt, used: set[str]) -> str:
    """An import reduced to the names that are used; empty where none is."""
    if not isinstance(node, (ast.Import, ast.ImportFrom)):
        return ""
    node.names = [alias for alias in node.names if (alias.asname or alias.name) in used]
    return ast.unparse(node) if node.names else ""


def _source(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """Without decorators and docstring."""
    hint = node.body[0] if ast.get_docstring(node) else None
    kept = [n for n in range(node.lineno, node.end_lineno + 1) if not hint or not hint.lineno <= n <= hint.end_lineno]
    return "\n".join(lines[n - 1] for n in kept).replace(":\n\n", ":\n", 1)
