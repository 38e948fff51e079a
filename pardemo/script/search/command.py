"""``pardemo prove --search``: its options, and what it prints."""

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pardemo import argument_checks, project
from pardemo.termination import ends_in_order

if TYPE_CHECKING:
    from pardemo.script.search.axes import Axis, Space

#: Where reproductions are written unless ``--out`` says it; what a search writes there.
OUT, VERDICT = "pardemo-search", "search.json"
MINUTES = 5.0
#: Keys of a table ``[search]`` beside the axes, each with what it is.
_KEYS = {"ranks": (int, "a whole number"), "samples": (int, "a whole number"), "where": (list, "a list of conditions")}
_AXES = ("axis", "vary", "size")
#: Options that say something about a search alone.
OPTIONS = ("recipe", *_AXES, *_KEYS, "since", "package", "clone", "minutes")


def add_search(prove: argparse.ArgumentParser) -> None:
    """Adds the options of a search to those of ``pardemo prove``."""
    group = prove.add_argument_group("--search", "draw the layouts that the script allows, and shrink what parts")
    group.add_argument("--search", action="store_true", help="the layouts follow from axes, or the script's options")
    group.add_argument("--recipe", metavar="NAME", help="a script and axes that come with pardemo; list names them")
    repeated = {
        "axis": 'values that train alike, as "tp=1,2"; repeat it',
        "vary": 'what the reference has, too: "model=Llama,Qwen3"',
        "size": 'what is made smaller when shrinking: "layers=4,1"',
        "where": "a condition: \"wrap != 'none' or dp == 1\"",
    }
    for name, text in repeated.items():
        group.add_argument(f"--{name}", action="append", metavar="TEXT", help=text)
    group.add_argument("--ranks", type=int, metavar="N", help="the most ranks of a layout (4)")
    samples = "of a step, for {batch} (as many as all layouts divide)"
    group.add_argument("--samples", type=int, metavar="N", help=samples)
    group.add_argument("--since", metavar="WHEN", help="also since which release of --package, or commit of --clone")
    group.add_argument("--package", metavar="NAME", help="a package of pip's index, as torch (the recipe's)")
    group.add_argument("--clone", metavar="DIR", help="a clone of git, whose commits from --since on are tried")
    group.add_argument("--minutes", type=float, metavar="M", help=f"for the layouts and for shrinking ({MINUTES:g})")


def run_search(arguments: argparse.Namespace) -> int:
    """Runs ``pardemo prove --search``; returns 0 where nothing is found, 1 where something is, 2 without an answer."""
    if arguments.layout:
        raise ValueError("--search draws its layouts from axes: say --axis in place of --layout")
    if arguments.recipe == "list":
        from pardemo.script.search import recipes

        print(recipes.recipes_text())
        return 0
    argument_checks.at_least(arguments, 1, "ranks", "samples")
    if arguments.since is None and (arguments.package or arguments.clone):
        raise ValueError("--package and --clone say where --since looks: say --since, as 2.11 or a commit")
    if arguments.since is not None and not (arguments.package or arguments.clone or arguments.recipe):
        raise ValueError("--since needs --package NAME, for its releases, or --clone DIR, for its commits")
    minutes = MINUTES if arguments.minutes is None else arguments.minutes
    argument_checks.above_zero(minutes, "--minutes")
    note = partial(print, file=sys.stderr, flush=True)
    (space, double), since = _space(arguments), _since(arguments, note)
    out = _out_folder(arguments.out or OUT)  # only now: an earlier search's go where this one begins
    from pardemo.script.compare.runs import RunOptions
    from pardemo.script.search import search

    with ends_in_order("prove"), contextlib.redirect_stdout(sys.stderr):
        result = search.search(
            space, RunOptions(double=double, timeout_s=arguments.timeout), minutes=minutes, out=out,
            copied=arguments.recipe is not None, note=note, since=since,
        )  # fmt: skip
    report = json.dumps(result.as_json(), indent=1)
    if arguments.out or result.findings:
        out.mkdir(parents=True, exist_ok=True)
        project.write_text(out / VERDICT, report)
    print(report if arguments.json else result)
    return 1 if result.findings else 0 if result.by_outcome("alike") else 2


def _since(arguments: argparse.Namespace, note: Callable[[str], None]) -> Callable[[Path, tuple[int, int]], str] | None:
    """Returns what finds out since when a reproduction shows its difference; None where nobody asks."""
    from pardemo.script.search import bisect, recipes

    if arguments.since is None:
        return None
    if arguments.clone is not None:
        clone = Path(arguments.clone)
        versions = bisect.commits(clone, arguments.since)
        return lambda script, ranks: bisect.since_commit(script, ranks, clone, versions, note)
    package = arguments.package or recipes.package_of(arguments.recipe)
    versions = bisect.releases(package, arguments.since)
    return lambda script, ranks: bisect.since_release(script, ranks, package, versions, note)


def _space(arguments: argparse.Namespace) -> "tuple[Space, bool]":
    """Returns the space that was asked for, and whether layouts run in fp64, too; the command line counts more."""
    from pardemo.script.runtime.launch_lines import read_launch
    from pardemo.script.search import axes

    words, table, settings = _script(arguments)
    given = [axes.parse_axis(text, kind) for kind in _AXES for text in getattr(arguments, kind) or ()]
    known, numbers = {axis.name for axis in given}, dict[str, Any]()
    for name, value in table.items():
        if name in _AXES:
            given += [axis for axis in _table_axes(name, value) if axis.name not in known]
        elif name not in _KEYS:
            raise ValueError(f"[search]: {name!r} is not known; it may say {', '.join(sorted({*_KEYS, *_AXES}))}")
        elif not isinstance(value, _KEYS[name][0]) or isinstance(value, bool):
            raise ValueError(f"[search]: {name} must be {_KEYS[name][1]}")
        else:
            numbers[name] = value
    numbers |= {name: value for name in _KEYS if (value := getattr(arguments, name)) is not None}
    launch = read_launch([re.sub(r"\{\w+\}", "1", word) for word in words], 1)
    if not launch.module and not os.path.isfile(launch.script):
        raise ValueError(f"there is no script {launch.script}")
    text = "" if launch.module else Path(launch.script).read_text("utf-8", errors="replace")
    space = axes.read_space(
        words, given, text=text, ranks=numbers.get("ranks", 4), samples=numbers.get("samples"),
        steps=arguments.steps or settings.get("steps", 3), conditions=numbers.get("where", ()),
    )  # fmt: skip
    return space, arguments.double or settings.get("double", False)


def _script(arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Returns the script's words, a table ``[search]`` and other settings: of a recipe, of a file, or of the words."""
    from pardemo.script.compare import run_layouts
    from pardemo.script.search.recipes import recipe

    words = list(arguments.words)
    if arguments.recipe is not None:
        if words:
            raise ValueError("--recipe has a script of its own: leave out the one behind --")
        return recipe(arguments.recipe)
    if not words or (len(words) == 1 and words[0].endswith(".toml")):
        return run_layouts.search_of(words[0] if words else "prove.toml")
    return words, {}, {}


def _table_axes(kind: str, table: Any) -> "list[Axis]":
    from pardemo.script.search.axes import Axis

    if not isinstance(table, dict) or not all(isinstance(values, list) for values in table.values()):
        raise ValueError(f"[search.{kind}] has a list of values for each name, as tp = [1, 2]")
    return [Axis(name, tuple(values), kind) for name, values in table.items()]


def _out_folder(path: str) -> Path:
    """Returns the folder for reproductions, without those of an earlier search.

    Raises:
        ValueError: it has other things; said before anything runs.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is a folder, and {path} is a file")
    entries = list(folder.iterdir()) if folder.is_dir() else []
    for entry in entries:
        if entry.name != VERDICT and not (entry.name.isdecimal() and (entry / "repro.py").is_file()):
            raise ValueError(f"--out: {path} has other things in it, as {entry.name}: say a folder of its own")
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry)
    return folder
