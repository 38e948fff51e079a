"""Defines the messages between the main process and a test's ranks; imports neither torch nor pytest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ReportOptions:
    """Pytest's options for showing failures: ``--tb``, ``-l``, ``-v``, ``--full-trace`` and the ini file's limits."""

    style: str
    variables: bool
    verbosity: int
    assertion_verbosity: int
    all_frames: bool
    folder: str
    ini: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankContext:
    """The state of the process that a rank restores before each test.

    Attributes:
        path: ``sys.path``. cwd: the working folder. env: the main process's environment variables.
        folder: for files that the ranks exchange during the test; it need not be there yet.
        module: the name of the test's module.
    """

    path: list[str]
    cwd: str
    env: dict[str, str]
    folder: str
    module: str
    shown: ReportOptions


@dataclass
class OnRanks:
    """Stands for a fixture's value in the main process, since each rank makes the value for itself.

    Attributes:
        name: the fixture's. function: the fixture function; None for a fixture that the ranks know by name.
        arguments: what it is called with, other ``OnRanks`` among them. param: ``request.param``.
        asks: whether the function takes ``request``.
    """

    name: str
    function: Callable | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    param: Any = None
    asks: bool = False

    def __repr__(self) -> str:
        return f"<fixture {self.name!r}: made on the ranks, not here>"


@dataclass
class Task:
    """A test: its function, the arguments of it, and every fixture that the ranks make, in their order.

    ``filters``: as ``warnings.filters``, what pytest makes of the ini file, the command line and the test's markers.
    """

    function: Callable
    arguments: dict[str, Any]
    fixtures: list[OnRanks]
    filters: list[Any] = field(default_factory=list)


@dataclass
class Record:
    """The outcome of a test on a rank where it did not pass.

    Attributes:
        type, message: of the exception. location: path and line that raised it.
        text: pytest's own representation of it (``ExceptionInfo.getrepr``), made on the rank.
        exception: the exception, pickled; None where it cannot be.
    """

    outcome: Literal["failed", "skipped", "xfailed"]
    type: str
    message: str
    location: tuple[str, int]
    text: Any
    exception: bytes | None = None


class NotPassed(Exception):
    """Raised on a rank where a test did not pass, so that its World ends at once; ``record`` is the outcome."""

    def __init__(self, record: Record):
        super().__init__(record)
        self.record = record


def execute(context: RankContext, task: bytes) -> str | None:
    """Calls :func:`pardemo.testing.on_rank.run_test`, which is imported on the rank only."""
    from pardemo.testing.on_rank import run_test

    return run_test(context, task)
