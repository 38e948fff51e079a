"""Sends a marked test to its ranks, and makes pytest's report of their answers."""

import contextlib
import os
import pickle
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from typing import NoReturn

from pardemo.extras import needed_by
from pardemo.testing import pickling, placeholders, verdict
from pardemo.testing.marker import RankSetup
from pardemo.testing.messages import NotPassed, OnRanks, RankContext, Record, ReportOptions, Task, execute
from pardemo.testing.worlds import worlds_of
from pardemo.world.errors import RankDied, RankError, RankFailed

with needed_by("pardemo.testing"):
    import pytest

#: What pytest's comparison of two values asks of the ini file; another version may ask for less.
INI = ("assertion_text_diff_style", "truncation_limit_lines", "truncation_limit_chars")
KEY = pytest.StashKey[verdict.Verdict | None]()


def run_on_ranks(item: pytest.Function, setup: RankSetup) -> None:
    """Runs a test on its ranks, and raises what pytest would have met in one process."""
    __tracebackhide__ = True
    arguments = placeholders.arguments_of(item)
    made_there = [value for value in item.funcargs.values() if isinstance(value, OnRanks)]
    modules = pickling.travelling(tuple(item.config.getini("python_files")), item.module)
    task = pickling.pack(Task(item.obj, arguments, made_there, [*warnings.filters]), modules)
    if isinstance(task, str):
        _fail(task)
    worlds = worlds_of(item.config)
    context = _context(item, worlds.folder())
    line, returned = None, []
    outcome = item.stash[KEY] = None  # nothing of an earlier run of the same test
    try:
        world = worlds.get(setup.size, setup.cluster)
        returned = world.run(execute, context, task, timeout_s=setup.timeout_s)
    except RankFailed as error:
        records = _records(error)
        if records is None:
            line = str(error)
        else:
            outcome = item.stash[KEY] = verdict.judge(records, error, setup.size)
    except RankDied as error:
        line = verdict.of_death(error)
    except (RankError, ValueError) as error:  # a hang; ranks or links that cannot be had here
        line = _without_ours(str(error))
    finally:
        shutil.rmtree(context.folder, ignore_errors=True)
    if line is not None:
        _fail(line)
    if outcome is not None:
        _raise(outcome)
    if kinds := sorted({kind for kind in returned if kind is not None}):
        line = f"Test functions should return None, but {item.nodeid} returned {', '.join(kinds)} on its ranks."
        item.warn(pytest.PytestReturnNotNoneWarning(line))


def complete(item: pytest.Item, report: pytest.TestReport) -> None:
    """Puts the ranks' own frames, or the place where they skipped, into the report."""
    outcome = item.stash.get(KEY, None)
    if outcome is not None and outcome.text is not None:
        report.longrepr = outcome.text


def _context(item: pytest.Function, folder: str) -> RankContext:
    config = item.config
    known = {}
    for name in INI:
        try:
            known[name] = config.getini(name)
        except (KeyError, ValueError):
            continue
    shown = ReportOptions(
        style=config.getoption("tbstyle", "auto"),
        variables=config.getoption("showlocals", False),
        verbosity=config.get_verbosity(),
        assertion_verbosity=config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
        all_frames=config.getoption("fulltrace", False),
        folder=os.fspath(config.invocation_params.dir),
        ini=known,
    )
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return RankContext(path, os.getcwd(), dict(os.environ), folder, item.module.__name__, shown)


def _records(error: RankFailed) -> Mapping[int, Record] | None:
    """What each rank says that did not pass; None where one of them could not run the test at all."""
    records = {}
    for rank, failure in sorted(error.failures.items()):
        if not isinstance(failure.exception, NotPassed):
            return None
        records[rank] = failure.exception.record
    return records


def _raise(outcome: verdict.Verdict) -> NoReturn:
    """The first rank's exception where it can be had here, so that ``xfail(raises=…)`` and ``-x`` see what it is."""
    __tracebackhide__ = True
    error: BaseException = outcome.error
    if outcome.exception is not None:
        with contextlib.suppress(Exception):  # its class may be of the ranks alone
            error = pickle.loads(outcome.exception)
    raise error


def _without_ours(text: str) -> str:
    """Stacks without the frames of this plug-in."""
    return re.sub(r'^  File ".*pardemo/testing/.*\n?', "", text, flags=re.MULTILINE)


def _fail(line: str) -> NoReturn:
    __tracebackhide__ = True
    pytest.fail(line, pytrace=False)
