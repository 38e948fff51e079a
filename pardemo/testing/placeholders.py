"""Decides which fixtures of a marked test are made in the main process, and puts placeholders for the others."""

import inspect
from collections.abc import Collection
from typing import Any

from pardemo.extras import needed_by
from pardemo.testing.messages import OnRanks

with needed_by("pardemo.testing"):
    import pytest

#: Fixtures of pytest that act on this process, or belong to it, and what to do without them.
STAYS = {
    "request": "a fixture may ask for request and return what the test needs of it",
    "capfd": "use capsys",
    "capfdbinary": "use capsys",
    "capsysbinary": "use capsys",
    "caplog": "add a handler to the logger within the test",
    "recwarn": "use pytest.warns or warnings.catch_warnings within the test",
    "pytestconfig": "a fixture may ask for it and return what the test needs of it",
    "record_property": "ranks have no report of their own",
    "record_xml_attribute": "ranks have no report of their own",
    "pytester": "run pytest within a test that is not marked",
    "testdir": "run pytest within a test that is not marked",
    "tmp_path_factory": "use tmp_path, a single folder for all ranks",
    "tmpdir_factory": "use tmp_path, a single folder for all ranks",
}


def on_ranks(
    fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest, ours: Collection[str], pytests: Collection[str]
) -> OnRanks | None:
    """Returns a placeholder for a fixture that the ranks make; None for one that is made here.

    The ranks make the fixtures of this plug-in, ``monkeypatch`` and ``capsys``, and each fixture that asks for one
    that they make.
    """
    name = fixturedef.argname
    function: Any = fixturedef.func
    module = getattr(function, "__module__", "")
    if (name in ours and module.startswith("pardemo.testing.")) or (name in pytests and module.startswith("_pytest.")):
        return OnRanks(name)
    arguments = {argument: request.getfixturevalue(argument) for argument in fixturedef.argnames}
    if not any(isinstance(value, OnRanks) for value in arguments.values()):
        return None
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return None  # pytest refuses it, by its name
    asks = arguments.pop("request", None) is not None
    for argument in arguments:
        refuse_what_stays(argument, f"the fixture {name!r} is made on the ranks, and")
    bound = getattr(function, "__self__", None)
    if bound is not None and isinstance(request.instance, type(bound)):
        function = function.__func__.__get__(request.instance)  # of this test's own instance of the class
    return OnRanks(name, function, arguments, getattr(request, "param", None), asks)


def refuse_what_stays(name: str, subject: str) -> None:
    """Fails the test where a fixture of that name belongs to the main process."""
    if name in STAYS:
        pytest.fail(f"{subject} {name!r} stays in pytest's own process: {STAYS[name]}", pytrace=False)


def arguments_of(item: pytest.Function) -> dict[str, Any]:
    """Returns a test function's arguments by name: values that are sent, and placeholders."""
    chosen = {}
    for parameter in inspect.signature(item.obj).parameters.values():
        if parameter.default is parameter.empty and parameter.name in item.funcargs:
            refuse_what_stays(parameter.name, "the test runs on ranks, and")
            chosen[parameter.name] = item.funcargs[parameter.name]
    return chosen
