"""Registers the marker, its fixtures, and the hooks by which pytest runs a marked test on ranks.

Loading it costs a few milliseconds and no torch; all else is imported when the first marked test is collected.
"""

import contextlib
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn

from pardemo.extras import needed_by

if TYPE_CHECKING:
    from pardemo.testing.messages import OnRanks

with needed_by("pardemo.testing"):
    import pytest

#: The parameter by which pytest runs a test once per number of ranks.
PARAMETER = "pardemo_ranks"

MARKER = (
    "ranks(*sizes, cluster=None, between=None, inside=None, timeout=None): runs the test's body on every rank, once "
    "for each number of ranks; cluster: a pardemo.Cluster, or hosts x ranks on each as '2x2', with the links' limits "
    "between hosts and inside; timeout: seconds"
)
#: Fixtures of this plug-in, and of pytest's own those that act on the process that the body runs in.
OURS = ("rank", "world_size", "wire", "memory", "same_on_all_ranks", "single_process")
PYTESTS = ("monkeypatch", "capsys")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds two settings for the ini file."""
    parser.addini("ranks_timeout", "seconds that a test on ranks may take (60)", default="60")
    parser.addini("ranks_preload", "modules that ranks have loaded before they start", type="args", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, for ``--markers`` and ``--strict-markers``."""
    config.addinivalue_line("markers", MARKER)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the ranks."""
    if (worlds := sys.modules.get("pardemo.testing.worlds")) is not None:  # else there never were any
        worlds.close(config)


def pytest_pycollect_makemodule(module_path: Any, parent: pytest.Collector) -> None:
    """Starts to load torch for the ranks while a file that has the marker is imported.

    Not by the workers of pytest-xdist, which import all files and run some; and not for a list of tests.
    """
    config = parent.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    with contextlib.suppress(OSError):
        if b"mark.ranks(" in module_path.read_bytes():
            from pardemo.testing.worlds import worlds_of

            worlds_of(config).begin()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test of a marked function for each number of ranks; refuses a wrong marker in one line."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    from pardemo.argument_checks import time_limit
    from pardemo.testing.marker import rank_setups, unfit

    try:
        default = time_limit(metafunc.config.getini("ranks_timeout"), "ranks_timeout")
        if reason := unfit(metafunc.function):
            raise ValueError(reason)
        chosen = rank_setups(marker.args, marker.kwargs, default)
    except ValueError as error:
        _refuse(f"{metafunc.definition.nodeid}: @pytest.mark.ranks: {error}")
    metafunc.fixturenames.append(PARAMETER)
    metafunc.parametrize(PARAMETER, chosen, indirect=True, ids=[setup.id for setup in chosen])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuses a debugger with marked tests: it would not see the ranks."""
    for option in ("usepdb", "trace"):
        if config.getoption(option, False) and any(setup_of(item) for item in items):
            raise pytest.UsageError(
                f"--{option.removeprefix('use')} cannot enter the ranks' processes, and tests on ranks were asked for: "
                "leave it out, a failure shows each rank's frames, and with -l their variables; or deselect them"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuses a marked test that is no function of pytest's."""
    if item.get_closest_marker("ranks") is None or setup_of(item) is not None:
        return
    if getattr(item, "cls", None) is not None:
        _refuse(
            "@pytest.mark.ranks: unittest runs the methods of a TestCase itself, in this process: make it a plain "
            "class with assert"
        )
    _refuse("@pytest.mark.ranks is for test functions of Python files")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: Any) -> "OnRanks | None":
    """Gives a marked test a placeholder for each fixture that the ranks make."""
    if request.scope != "function" or setup_of(request.node) is None:
        return None
    from pardemo.testing import placeholders

    holder = placeholders.on_ranks(fixturedef, request, OURS, PYTESTS)
    if holder is not None:
        fixturedef.cached_result = (holder, fixturedef.cache_key(request), None)  # as pytest's own hook leaves it
    return holder


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a marked test's body on its ranks."""
    setup = setup_of(pyfuncitem)
    if setup is None:
        return None
    from pardemo.testing import runner

    runner.run_on_ranks(pyfuncitem, setup)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Puts the ranks' report in place of this process's frames, which are this plug-in's."""
    report = yield
    if report.when == "call" and setup_of(item) is not None:
        from pardemo.testing import runner

        runner.complete(item, report)
    return report


def setup_of(item: Any) -> Any:
    """Returns a test's :class:`pardemo.testing.marker.RankSetup`; None for a test without the marker."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(PARAMETER) if callspec is not None else None


def _refuse(line: str) -> NoReturn:
    pytest.fail(line, pytrace=False)


def _unmarked(name: str) -> NoReturn:
    _refuse(f"the fixture {name!r} is for tests that run on ranks: mark the test, as with @pytest.mark.ranks(2)")


@pytest.fixture
def rank() -> int:
    """This process's rank, 0 to world_size − 1. A fixture that asks for it is made on every rank."""
    _unmarked("rank")


@pytest.fixture
def world_size() -> int:
    """The number of ranks. A fixture that asks for it is made on every rank."""
    _unmarked("world_size")


@pytest.fixture
def wire() -> Any:
    """A WireMeter: ``with wire: …``, then ``wire.sent_bytes`` is what this rank sent meanwhile. Collective."""
    _unmarked("wire")


@pytest.fixture
def memory() -> Any:
    """A MemoryMeter that knows the modules that run in it: ``with memory: …``, then ``memory.peak_bytes``."""
    _unmarked("memory")


@pytest.fixture
def same_on_all_ranks() -> Any:
    """``same_on_all_ranks(x)`` asserts that x is the same, bit for bit, on all ranks. Collective.

    x is a tensor, an array, a number, a text, None, a module (its state), or a container of such.
    """
    _unmarked("same_on_all_ranks")


@pytest.fixture
def single_process() -> Any:
    """``single_process(fn, *args, **kwargs)``: what fn returns where there is no process group.

    Rank 0 calls it, with its arguments and seeded as at the test's begin; all ranks get what it returns. Collective.
    """
    _unmarked("single_process")
