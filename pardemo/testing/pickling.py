"""Pickles a test for the ranks. The code of test files and of ``conftest.py`` goes along, as pytest compiled it.

Ranks do not import test files: functions and classes of these travel by value, with the globals that they use. So their
asserts are the ones that pytest has rewritten, and a test file costs the ranks nothing. All else travels by its name.
"""

import contextlib
import fnmatch
import functools
import io
import os
import re
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

import cloudpickle

from pardemo.extras import needed_by
from pardemo.testing.messages import OnRanks, Task
from pardemo.world import pickling

with needed_by("pardemo.testing"):
    import pytest


def pack(task: Task, modules: Collection[types.ModuleType]) -> bytes | str:
    """Pickles a task for the ranks; ``modules``: whose code is sent by value.

    Where something cannot be sent, a line that names it and says what to do about it.
    """
    with _by_value(modules):
        try:
            return _dumps(task)
        except Exception as error:
            return _culprit(task, error)


@functools.lru_cache(maxsize=16)
def travelling(patterns: tuple[str, ...], module: types.ModuleType) -> list[types.ModuleType]:
    """Returns ``module`` and all modules that are loaded from files of such names, or from a ``conftest.py``.

    Looked up once for a module: milliseconds, among some thousand modules.
    """
    wanted = re.compile("|".join(map(fnmatch.translate, ("conftest.py", *patterns)))).match
    files = [(loaded, getattr(loaded, "__file__", None)) for loaded in [*sys.modules.values()]]
    others = [loaded for loaded, file in files if file and loaded is not module and wanted(os.path.basename(file))]
    return [module, *others]


class _Pickler(pickling.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (pytest.Mark, pytest.MarkDecorator, _FIXTURE)):
            return _left_behind, ()
        return super().reducer_override(value)


def _left_behind() -> None:
    """In the place of a marker, or of a fixture's definition: ranks have no use for either."""


@pytest.fixture
def _any_fixture() -> None:
    """For its type."""


_FIXTURE = type(_any_fixture)


def _dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


@contextlib.contextmanager
def _by_value(modules: Collection[types.ModuleType]) -> Iterator[None]:
    already = cloudpickle.list_registry_pickle_by_value()
    mine = [module for module in modules if module.__name__ not in already and module.__name__ in sys.modules]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def _culprit(task: Task, error: Exception) -> str:
    """Which part of a task cannot be sent."""
    for name, value in _values(task):
        if reason := _pickling_error(value):
            return (
                f"the value of {name!r} (a {type(value).__name__}) cannot be sent to the ranks: {reason}. A fixture "
                "that asks for rank is made on each rank instead"
            )
    for function in (task.function, *(fixture.function for fixture in task.fixtures)):
        plain: Any = getattr(function, "__func__", function)
        variables = getattr(plain, "__globals__", {})
        for name in getattr(getattr(plain, "__code__", None), "co_names", ()):
            if name in variables and (reason := _pickling_error(variables[name])):
                return (
                    f"{plain.__name__} uses {name} (a {type(variables[name]).__name__}), which cannot be sent to the "
                    f"ranks: {reason}. Make it within the function"
                )
    return f"the test cannot be sent to the ranks: {error}. Open files, locks and sockets do not travel"


def _values(task: Task) -> Iterator[tuple[str, Any]]:
    for arguments in (task.arguments, *(fixture.arguments for fixture in task.fixtures)):
        yield from ((name, value) for name, value in arguments.items() if not isinstance(value, OnRanks))
    yield from ((f"{fixture.name}, request.param", fixture.param) for fixture in task.fixtures)
    owner = getattr(task.function, "__self__", None)
    yield from ((f"self.{name}", value) for name, value in getattr(owner, "__dict__", {}).items())


def _pickling_error(value: Any) -> str:
    try:
        _dumps(value)
    except Exception as error:
        return str(error)
    return ""
