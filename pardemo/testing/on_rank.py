"""Runs a test's body and its fixtures on a rank, and records how it ended."""

import contextlib
import os
import pickle
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch.distributed as dist

from pardemo import compat, project
from pardemo.extras import needed_by
from pardemo.testing.fixtures import Fixtures
from pardemo.testing.messages import NotPassed, RankContext, Record, ReportOptions
from pardemo.world.fork_server import SINGLE_THREADED
from pardemo.world.rank import seed

with needed_by("pardemo.testing"):
    import pytest

#: Variables by which a rank is the one that it is: the main process's own values are not for it.
OWN = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GLOO_SOCKET_IFNAME", "TOKENIZERS_PARALLELISM", *SINGLE_THREADED,
}  # fmt: skip
_own_environment: dict[str, str] = {}
_left: list[Fixtures] = []  # of a test that failed: were they freed, generators would go on to what stands behind yield
OURS = os.path.join(project.PACKAGE, "testing", "")


def run_test(context: RankContext, packed: bytes) -> str | None:
    """Runs a test; returns the type of what it returned where that is not None, for pytest's warning.

    Raises:
        NotPassed: it failed, or was skipped, or is expected to fail. The fixtures are left as they are then: this
            process ends, and a fixture's ``yield`` that waits for the other ranks would only hold up the news.
    """
    _set(context)
    fixtures = Fixtures(context.folder)
    _left[:] = [fixtures]
    record, returned = None, None
    with _explained(context.shown), warnings.catch_warnings():
        try:
            task = pickle.loads(packed)
            warnings.filters[:] = task.filters  # type: ignore[index]
            with _module(context.module, task.function):
                seed(dist.get_rank())
                for fixture in task.fixtures:
                    fixtures.value(fixture)
                returned = task.function(**{name: fixtures.value(value) for name, value in task.arguments.items()})
                fixtures.close()
        except BaseException as error:
            record = _record(error, context.shown)
    if record is not None:
        raise NotPassed(record)
    _left.clear()
    return None if returned is None else type(returned).__name__


def _set(context: RankContext) -> None:
    """Working folder, modules' folders and environment of the main process, whatever a test before has changed."""
    if not _own_environment:
        _own_environment.update({name: value for name, value in os.environ.items() if name in OWN})
    wanted = context.env | _own_environment
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})
    sys.path[:] = context.path
    os.chdir(context.cwd)
    sys.breakpointhook = _no_breakpoint


def _no_breakpoint(*_: Any, **__: Any) -> None:
    raise RuntimeError("breakpoint(): a rank has no terminal. Print, or look at each rank's variables with pytest -l")


@contextlib.contextmanager
def _module(name: str, function: Any) -> Iterator[None]:
    """What came by value is found by its module's name too: by pickle, which the group's objects travel by.

    For as long as the test runs: of the file it has only what the test uses, and a World may load the file itself.
    """
    module = types.ModuleType(name)
    module.__dict__.update(getattr(getattr(function, "__func__", function), "__globals__", {}))
    owner = type(getattr(function, "__self__", None))
    if owner.__module__ == name:
        setattr(module, owner.__name__, owner)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before


@contextlib.contextmanager
def _explained(shown: ReportOptions) -> Iterator[None]:
    """Asserts that pytest has rewritten say where two values differ, as in the main process."""
    asked = _Asked(shown)

    def compared(op: str, left: Any, right: Any) -> str | None:
        lines = compat.assertrepr_compare(config=asked, op=op, left=left, right=right)
        return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") if lines else None

    with compat.replaced(compat.assertion_util, "_reprcompare", compared):
        yield


class _Asked:
    """What pytest's comparison of two values asks of its Config."""

    pluginmanager = types.SimpleNamespace(has_plugin=lambda name: False)  # no terminal, so no colours

    def __init__(self, shown: ReportOptions):
        self.getini = shown.ini.get
        self._verbosity = shown.assertion_verbosity

    def get_verbosity(self, kind: str | None = None) -> int:
        return self._verbosity


def _record(error: BaseException, shown: ReportOptions) -> Record:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next and traceback.tb_frame.f_code.co_filename.startswith(OURS):
        traceback = traceback.tb_next
    text = _represented(error.with_traceback(traceback), shown)
    crash = text.reprcrash
    outcome = "skipped" if isinstance(error, pytest.skip.Exception) else "failed"
    if isinstance(error, pytest.xfail.Exception):
        outcome = "xfailed"
    where = (crash.path, crash.lineno) if crash else ("", 0)
    return Record(outcome, type(error).__name__, _message(error), where, text, _packed(error))  # type: ignore[arg-type]


def _packed(error: BaseException) -> bytes | None:
    if isinstance(error, (pytest.skip.Exception, pytest.fail.Exception, pytest.exit.Exception)):
        return None  # they say that they are of builtins, where nobody finds them
    try:
        packed = cloudpickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        return None
    return packed


def _message(error: BaseException) -> str:
    try:
        return str(getattr(error, "msg", None) or error)
    except Exception as reason:
        return f"(its text cannot be had: {type(reason).__name__})"


def _represented(error: BaseException, shown: ReportOptions) -> Any:
    """As ``pytest.Function.repr_failure`` does, with the frames between this module and the test's left out."""
    style: Any = "long" if shown.style == "auto" else shown.style
    if isinstance(error, pytest.fail.Exception) and not error.pytrace:
        style = "value"

    def chosen(info: pytest.ExceptionInfo[BaseException]) -> Any:
        frames = info.traceback.filter(info)
        if shown.style == "auto" and len(frames) > 2:
            middle = [frame.with_repr_style("short") for frame in frames[1:-1]]
            return type(frames)([frames[0], *middle, frames[-1]])
        return frames

    return pytest.ExceptionInfo.from_exception(error).getrepr(
        funcargs=True,
        abspath=os.getcwd() != shown.folder,
        showlocals=shown.variables,
        style="long" if shown.all_frames else style,
        tbfilter=False if shown.all_frames else chosen,
        truncate_locals=shown.verbosity <= 1,
        truncate_args=shown.verbosity <= 2,
    )
