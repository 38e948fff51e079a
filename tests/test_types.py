"""What .ci/check_types.py makes of mypy's lines; ``make lint`` runs it over the package."""

import importlib.util
import tomllib

from pardemo import project

ROOT = project.PACKAGE.parent
SPEC = importlib.util.spec_from_file_location("types_check", ROOT / ".ci" / "check_types.py")
types_check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(types_check)
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
LINES = [
    "pardemo/world/rank.py:3: error: Incompatible types  [assignment]",
    "pardemo/zero/__init__.py:1: error: Name not defined  [name-defined]",
    "pardemo/planner/job.py:9: note: a note is no error",
    "Found 2 errors in 2 files",
]


def test_an_error_outside_the_list_and_a_module_on_it_that_passes_are_both_told():
    assert types_check.judge(LINES, ["pardemo.zero.*", "pardemo.planner.job"]) == ([LINES[0]], ["pardemo.planner.job"])
    assert types_check.judge(LINES, ["pardemo.zero.*", "pardemo.world.rank"]) == ([], [])
    assert types_check.judge([], ["pardemo.zero.*"]) == ([], ["pardemo.zero.*"])


def test_the_list_names_what_is_there_and_never_the_core_as_a_whole():
    names = types_check.listed(SETTINGS)
    assert names == sorted(set(names))
    for name in names:
        path = ROOT / name.removesuffix(".*").replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name
    for package in ("world", "cluster", "meters", "collectives", "formulas", "claims", "planner"):
        assert f"pardemo.{package}.*" not in names


def test_without_the_list_the_other_settings_stay():
    settings = tomllib.loads(types_check.without_list(SETTINGS))["tool"]["mypy"]
    assert {key: value for key, value in settings.items() if key != "overrides"} == {
        key: value for key, value in SETTINGS.items() if key != "overrides"
    }
    assert [part for part in SETTINGS["overrides"] if not part.get("ignore_errors")] == settings["overrides"]
