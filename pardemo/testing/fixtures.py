"""Makes fixtures on a rank: those of the plug-in, pytest's own that act on the process, and the user's."""

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from pardemo import compat
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
        """Returns what this rank makes for a placeholder; any other value is returned as it is."""
        if not isinstance(given, OnRanks):
            return given
        if id(given) not in self._values:
            self._values[id(given)] = self._made(given)
        return self._values[id(given)]

    def close(self) -> None:
        """Runs what follows the ``yield`` of each fixture, the last one first."""
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


class CapSys:
    """``capsys`` on a rank: what this rank prints by ``sys.stdout`` and ``sys.stderr``."""

    def __init__(self, capture: Any):
        self._capture = capture

    def readouterr(self) -> Any:
        """Returns what was printed since the last call, as ``out`` and ``err``, and forgets it."""
        return self._capture.readouterr()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Prints to the terminal again within the block."""
        self._capture.suspend_capturing()
        try:
            yield
        finally:
            self._capture.resume_capturing()


def _capsys() -> Generator[CapSys, None, None]:
    capture = compat.MultiCapture(in_=None, out=compat.SysCapture(1), err=compat.SysCapture(2))
    capture.start_capturing()
    yield CapSys(capture)
    capture.pop_outerr_to_orig()  # what nobody has looked at is printed
    capture.stop_capturing()


def _monkeypatch() -> Generator[pytest.MonkeyPatch, None, None]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _meter(name: str, kind: Any, **options: Any) -> Generator[Any, None, None]:
    entered = []

    class Meter(kind):
        """Notes that it was entered: one that never was has zeros, and whoever compared them has tested nothing."""

        def __enter__(self) -> Any:
            entered.append(self)
            return super().__enter__()

    yield Meter(**options)
    if not entered:
        pytest.fail(f"the test asks for {name!r} and measures nothing with it: write 'with {name}:'", pytrace=False)


_BUILT_IN: dict[str, Callable] = {
    "rank": dist.get_rank,
    "world_size": dist.get_world_size,
    "wire": partial(_meter, "wire", WireMeter),
    "memory": partial(_meter, "memory", MemoryMeter, meets=True),
    "same_on_all_ranks": lambda: same_on_all_ranks,
    "single_process": SingleProcess,
    "monkeypatch": _monkeypatch,
    "capsys": _capsys,
}
