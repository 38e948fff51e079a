"""What every page of the book has: guesses, presets, exercises that check themselves, a ledger of claims, pictures.

A chapter's package is a :func:`door`: it shows these names and the public names of the chapter's own modules, each
loaded when it is first asked for, so that a rank that imports a measurement loads no Matplotlib.
"""

import ast
from collections.abc import Callable
from functools import partial
from importlib import import_module, resources
from typing import Any

from pardemo import extras

#: What every page has, and where it is; the first argument of those of :data:`OF_CHAPTER` is the chapter's name.
SHARED = {
    "choose": "pardemo.book.page.presets",
    "need_ranks": "pardemo.book.page.presets",
    "guess": "pardemo.book.page.guesses",
    "save": "pardemo.draw.style",
    "check": "pardemo.book.page.exercises",
    "ledger": "pardemo.book.page.claimed",
    "problems": "pardemo.book.page.problems",
}
OF_CHAPTER = ("check", "ledger", "problems")
#: Modules of a chapter that its page does not show by name: exercises are asked for one by one, problems all at once.
NOT_SHOWN = ("exercises", "problem_set", "solutions")


def door(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a chapter's package.

    Args:
        package: the package's dotted name, whose last part is the chapter's.

    Raises:
        MissingExtra: the extra [book] is not installed.
        ValueError: two modules of the chapter have a public name in common, or one has a name that every page has.
    """
    extras.require(package, "matplotlib")
    chapter = package.rpartition(".")[2]
    homes: dict[str, str] = {}

    def names() -> dict[str, str]:
        if not homes:
            homes.update(_names_of(package))
        return homes

    def get(name: str) -> Any:
        if name.startswith("__") or name not in names():
            raise AttributeError(f"chapter {chapter} has no {name!r}; it has: {', '.join(listed())}")
        with extras.needed_by(f"chapter {chapter}"):
            value = getattr(import_module(names()[name]), name)
        return partial(value, chapter) if name in OF_CHAPTER else value

    def listed() -> list[str]:
        return sorted(names())

    return get, listed


def _names_of(package: str) -> dict[str, str]:
    """Each public name of a chapter's modules, read from their text, with the module that defines it."""
    homes = dict(SHARED)
    for file in sorted(resources.files(package).iterdir(), key=lambda file: file.name):
        module, _, suffix = file.name.rpartition(".")
        if suffix != "py" or module == "__init__" or module in NOT_SHOWN:
            continue
        for name in _public(ast.parse(file.read_text(encoding="utf-8"))):
            if name in homes:
                raise ValueError(f"{package}: {name} is in {homes[name]} and in {module}; a page has one of them")
            homes[name] = f"{package}.{module}"
    return homes


def _public(tree: ast.Module) -> set[str]:
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
        elif isinstance(node, ast.Assign):
            targets = [name for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            defined.update(name.id for name in targets)
    return {name for name in defined if not name.startswith("_")}
