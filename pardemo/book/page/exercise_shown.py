"""An exercise as a reader sees it: one line, with the hint and a solution folded below it."""

import ast
import dis
import html
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

#: What the bytecode of a function without a body is made of.
_NOTHING = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}


@dataclass(frozen=True)
class ExerciseShown:
    """Result of an exercise; shown as ``message``, in notebooks and pages with what is folded below it.

    ``attempted`` is False for a stub, and ``solved`` True for a right answer only.
    """

    name: str
    attempted: bool
    solved: bool
    message: str
    hint: str
    solution: str

    def __repr__(self) -> str:
        return self.message

    def _repr_html_(self) -> str:
        line = html.escape(self.message, quote=False)
        if self.solved:
            folded = _folded("One way to write it", _code(self.solution))
        else:
            hint = f'<p style="margin:.2em 1.2em">{html.escape(self.hint, quote=False)}</p>'
            folded = _folded("Hint", hint) + _folded("Solution", _code(self.solution))
        quiet = "" if self.attempted else ' style="opacity:.75"'
        return f'<div class="exercise"><div{quiet}>{line}</div>{folded}</div>'


def is_stub(function: Callable | None) -> bool:
    """Whether there is nothing in ``function`` yet: ``...``, ``pass``, a docstring, or ``return None``.

    It is read off the bytecode and not tried: a function that computes something and forgets to return it has been
    attempted, and deserves an answer.
    """
    if function is None or function is ...:
        return True
    if not hasattr(function, "__code__"):
        return False
    steps = list(dis.get_instructions(function))
    constants = (step.argval for step in steps if step.opname in ("LOAD_CONST", "RETURN_CONST"))
    return all(step.opname in _NOTHING for step in steps) and all(c is None or c is ... for c in constants)


def _folded(summary: str, content: str) -> str:
    return f'<details><summary style="cursor:pointer">{summary}</summary>{content}</details>'


def _code(text: str) -> str:
    return f"<pre><code>{html.escape(text, quote=False)}</code></pre>"


@cache
def solution_of(chapter: str, stub: str) -> str:
    """The code of a solution, without its mark and hint, with the imports and helpers that it needs and no others.

    It runs where a reader pastes it: solutions are written as they would stand in the notebook, without type hints.
    """
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
