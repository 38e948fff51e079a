"""Fixtures that a rank makes: those of the plug-in, pytest's own that act on the process, and the user's."""

import inspect
import io
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from pardemo.extras import needed_by
from pardemo.meters import MemoryMeter, WireMeter
from pardemo.testing.messages import OnRanks
from pardemo.testing.same_on_all_ranks import same_on_all_ranks
from pardemo.testing.single_process import SingleProcess

with needed_by("pardemo.testing"):
    import pytest


class Fixtures:
    """One test's fixtures on this rank, each made once, in the order of the main process.

    Args:
        folder: for files that the ranks exchange during the test.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._values: dict[int, Any] = {}
        self._open: list[tuple[str, Generator]] = []

    def value(self, given: Any) -> Any:
        """Of a place holder what this rank makes; anything else is what it is."""
        if not isinstance(given, OnRanks):
            return given
        if id(given) not in self._values:
            self._values[id(given)] = self._made(given)
        return self._values[id(given)]

    def close(self) -> None:
        """Goes on behind the ``yield`` of each, the last one first."""
        while self._open:
            name, generator = self._open.pop()
            if next(generator, self) is not self:
                pytest.fail(f"the fixture {name!r} yields more than once", pytrace=False)

    def _made(self, fixture: OnRanks) -> Any:
        arguments = {name: self.value(value) for name, value in fixture.arguments.items()}
        if fixture.asks:
            arguments["request"] = _Request(fixture)
        function = fixture.function
        if function is None:
            function = _BUILT_IN[fixture.name]
            arguments = {"folder": self._folder} if fixture.name == "single_process" else {}
        if not inspect.isgeneratorfunction(function):
            return function(**arguments)
        generator = function(**arguments)
        value = next(generator)
        self._open.append((fixture.name, generator))
        return value


class _Request:
    """What a fixture on a rank has of pytest's ``request``."""

    def __init__(self, fixture: OnRanks):
        self.fixturename, self.param = fixture.name, fixture.param

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pytest.fail(
            f"request.{name}: on the ranks request has param and fixturename; make {self.fixturename!r} of two "
            "fixtures, one of them without rank",
            pytrace=False,
        )


class Captured(NamedTuple):
    """What was printed since the last look at it."""

    out: str
    err: str


class CapSys:
    """``capsys`` on a rank: what this rank prints by ``sys.stdout`` and ``sys.stderr``."""

    def __init__(self) -> None:
        self._real = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()

    def readouterr(self) -> Captured:
        """What was printed since the last call, and forgets it."""
        both = (sys.stdout, sys.stderr)
        texts = [stream.getvalue() if isinstance(stream, io.StringIO) else "" for stream in both]
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        return Captured(*texts)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within the block what is printed goes where it went before."""
        own = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._real
        try:
            yield
        finally:
            sys.stdout, sys.stderr = own

    def close(self) -> None:
        """Prints what nobody has looked at."""
        left = self.readouterr()
        sys.stdout, sys.stderr = self._real
        sys.stdout.write(left.out)
        sys.stderr.write(left.err)


def _capsys() -> Generator[CapSys, None, None]:
    capture = CapSys()
    yield capture
    capture.close()


def _monkeypatch() -> Generator[pytest.MonkeyPatch, None, None]:
    patch = pytest.MonkeyPatch()
    yield patch
    patch.undo()


class _Used:
    """Notes whether a meter was entered: one that never was has zeros, and whoever compared them has tested nothing."""

    used = False

    def __enter__(self) -> Any:
        self.used = True
        return super().__enter__()  # type: ignore[misc]


class _Wire(_Used, WireMeter):
    pass


class _Memory(_Used, MemoryMeter):
    pass


def _meter(name: str, make: Callable[[], Any]) -> Generator[Any, None, None]:
    yield (meter := make())
    if not meter.used:
        pytest.fail(f"the test asks for {name!r} and measures nothing with it: write 'with {name}:'", pytrace=False)


def _wire() -> Generator[WireMeter, None, None]:
    yield from _meter("wire", _Wire)


def _memory() -> Generator[MemoryMeter, None, None]:
    yield from _meter("memory", lambda: _Memory(meets=True))


_BUILT_IN: dict[str, Callable] = {
    "rank": dist.get_rank,
    "world_size": dist.get_world_size,
    "wire": _wire,
    "memory": _memory,
    "same_on_all_ranks": lambda: same_on_all_ranks,
    "single_process": SingleProcess,
    "monkeypatch": _monkeypatch,
    "capsys": _capsys,
}
