"""The book's pictures by name, whichever chapter draws them: for tests that go through all of them."""

from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.book.chapters import CHAPTERS
from pardemo.book.page import _names_of


class _Pictures:
    """Public names of the chapters' modules of one kind, and of what several rooms draw with."""

    def __init__(self, kind: str, *shared: str):
        self._kind, self._shared = kind, shared

    @cached_property
    def homes(self) -> dict[str, str]:
        """Each name, with its module."""
        return {
            name: module
            for chapter in CHAPTERS
            for name, module in _names_of(f"pardemo.book.chapters.{chapter}").items()
            if module.rpartition(".")[2].startswith(self._kind) and f".{chapter}." in module
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
figures = _Pictures(
    "figures", "pardemo.draw.style", "pardemo.draw.charts", "pardemo.draw.traffic", "pardemo.planner.layouts.charts"
)
