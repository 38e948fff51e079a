"""The book's pictures by name, whichever chapter draws them: for tests that go through all of them."""

import ast
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from pardemo import project


def public_names(file: Path) -> set[str]:
    """The public names that a module defines at its top."""
    defined: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {name for name in defined if not name.startswith("_")}


class _Pictures:
    """Public names of the chapters' modules of one kind, and of what several packages draw with."""

    def __init__(self, kind: str, *shared: str):
        self._kind, self._shared = kind, shared

    @cached_property
    def homes(self) -> dict[str, str]:
        """Each name, with its module."""
        return {
            name: f"pardemo.book.chapters.{file.parent.name}.{file.stem}"
            for file in self.files()
            for name in public_names(file)
        }

    def functions(self) -> set[str]:
        return {name for name in self.homes if name[0].islower()}

    def files(self) -> list[Path]:
        return sorted((project.PACKAGE / "book" / "chapters").glob(f"*/{self._kind}*.py"))

    def __getattr__(self, name: str) -> Any:
        for module in self._shared:
            if hasattr(import_module(module), name):
                return getattr(import_module(module), name)
        if name not in self.homes:
            raise AttributeError(name)
        return getattr(import_module(self.homes[name]), name)


drawings = _Pictures("drawings", "pardemo.draw.canvas", "pardemo.draw.player")
figures = _Pictures("figures", "pardemo.draw.style", "pardemo.draw.charts", "pardemo.planner.layouts.charts")
