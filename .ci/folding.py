"""Which cells of a notebook are folded: ``python .ci/folding.py`` sets it in all of them.

What a reader came for is the text, the experiment and its outcome. Cells that only import, ask, claim or draw are
folded, in JupyterLab (``source_hidden``) and on the report's page; a click opens them. A cell that claims is folded on
every page, unless it defines something or has a loop.
"""

import ast
import builtins
from pathlib import Path
from typing import Any

from pardemo import project

#: Calls that show something: a page's questions, claims, tables, and a chapter's drawings and figures.
SHOWS = {
    "page", "claim", "tables", "display", "drawings", "figures", "english", "beside_english", "findings", "thresholds",
}  # fmt: skip
PLAIN = (ast.Import, ast.ImportFrom, ast.Pass, ast.Assign, ast.AugAssign, ast.Expr)
#: Modules whose functions compute a prediction or look at what was measured, and run nothing.
ARITHMETIC = {"np", "formulas", "communication", "memory", "math", *SHOWS, "measurements", "predictions", "restarts"}


def is_folded(source: str) -> bool:
    """Whether a code cell only imports, asks, books and draws."""
    lines = source.splitlines()
    if source.startswith("%%"):
        return False
    body = ast.parse("\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in lines)).body
    if not body or "page.check(" in source:  # an exercise is the reader's
        return False
    if any(isinstance(node, ast.Call) and _root(node.func) == "claim" for node in ast.walk(ast.Module(body, []))):
        return all(isinstance(statement, PLAIN) for statement in body)
    return all(map(_books, body)) and any(not isinstance(statement, (ast.Assign, ast.AugAssign)) for statement in body)


def _books(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Pass)):
        return True
    if isinstance(statement, (ast.Assign, ast.AugAssign)):
        return all(_is_arithmetic(call) for call in ast.walk(statement.value) if isinstance(call, ast.Call))
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    if isinstance(value, (ast.Name, ast.Constant)):
        return True
    shows = isinstance(value, ast.Call) and (_root(value.func) in SHOWS or _is_reveal(value))
    inside = (call for call in ast.walk(value) if isinstance(call, ast.Call) and call is not value)
    return shows and all(_is_arithmetic(call) or _root(call.func) in SHOWS or _is_reveal(call) for call in inside)


def _is_reveal(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "reveal"


def _is_arithmetic(call: ast.Call) -> bool:
    """A builtin but print, a function of :data:`ARITHMETIC`, or a method of what is there (``.items()``)."""
    if isinstance(call.func, ast.Name):
        harmless = hasattr(builtins, call.func.id) and call.func.id not in ("print", "open", "exec", "eval", "input")
        return harmless or call.func.id == "Page"
    return _root(call.func) in ARITHMETIC or (
        isinstance(call.func, ast.Attribute) and call.func.attr in ("items", "values", "keys", "mean", "max", "min")
    )


def _root(node: ast.expr) -> str:
    """The name that an attribute's chain begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def fold(notebook: Any) -> int:
    """Sets or takes away ``source_hidden`` in each code cell of an nbformat notebook; returns how many are folded."""
    count = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        folded = "parameters" not in cell.metadata.get("tags", []) and is_folded(cell.source)
        count += folded
        if folded:
            cell.metadata.setdefault("jupyter", {})["source_hidden"] = True
        elif "jupyter" in cell.metadata:
            cell.metadata["jupyter"].pop("source_hidden", None)
            if not cell.metadata["jupyter"]:
                del cell.metadata["jupyter"]
    return count


def main() -> None:
    import nbformat

    for name, path in project.notebooks().items():
        notebook = nbformat.read(path, as_version=4)
        count = fold(notebook)
        nbformat.write(notebook, Path(path))
        print(f"{name}: {count} of {sum(cell.cell_type == 'code' for cell in notebook.cells)} code cells folded")


if __name__ == "__main__":
    main()
