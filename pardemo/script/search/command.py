"""``pardemo prove --search``: its options, and what it prints."""

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pardemo import argument_checks, project
from pardemo.termination import ends_in_order

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
    group.add_argument(
        "--axis", action="append", metavar="TEXT", help='values that train alike, as "tp=1,2"; repeat it'
    )
    group.add_argument(
        "--vary", action="append", metavar="TEXT", help='what the reference has, too: "model=Llama,Qwen3"'
    )
    group.add_argument(
        "--size", action="append", metavar="TEXT", help='what is made smaller when shrinking: "layers=4,1"'
    )
    group.add_argument("--where", action="append", metavar="TEXT", help="a condition: \"wrap != 'none' or dp == 1\"")
    group.add_argument("--ranks", type=int, metavar="N", help="the most ranks of a layout (4)")
    group.add_argument(
        "--samples", type=int, metavar="N", help="of a step, for {batch} (as many as all layouts divide)"
    )
    group.add_argument("--since", metavar="WHEN", help="also since which release of --package, or commit of --clone")
    group.add_argument("--package", metavar="NAME", help="a package of pip's index, as torch (the recipe's)")
    group.add_argument("--clone", metavar="DIR", help="a clone of git, whose commits from --since on are tried")
    group.add_argument("--minutes", type=float, metavar="M", help=f"for the layouts and for shrinking ({MINUTES:g})")


@dataclass
class _Asked:
    """What a search was asked: the script's words, the axes by their kind, the numbers of a table ``[search]``."""

    words: list[str]
    axes: list[Any] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


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
    asked = _asked(arguments)
    out = _out_folder(arguments.out or OUT)
    from pardemo.script.compare.runs import RunOptions
    from pardemo.script.runtime.launch_lines import read_launch
    from pardemo.script.search import axes, search

    steps = arguments.steps or asked.settings.get("steps", 3)
    launch = read_launch([re.sub(r"\{\w+\}", "1", word) for word in asked.words], 1)
    if not launch.module and not os.path.isfile(launch.script):
        raise ValueError(f"there is no script {launch.script}")
    text = "" if launch.module else Path(launch.script).read_text("utf-8", errors="replace")
    space = axes.read_space(
        asked.words, asked.axes, text=text, ranks=asked.numbers.get("ranks", 4), samples=asked.numbers.get("samples"),
        steps=steps, conditions=asked.numbers.get("where", ()),
    )  # fmt: skip
    double = arguments.double or asked.settings.get("double", False)
    progress = sys.stderr

    def note(line: str) -> None:
        print(line, file=progress, flush=True)

    with ends_in_order("prove"), contextlib.redirect_stdout(sys.stderr):
        result = search.search(
            space, RunOptions(double=double, timeout_s=arguments.timeout), minutes=minutes, out=out,
            copied=arguments.recipe is not None, note=note, since=_since(arguments, note),
        )  # fmt: skip
    report = json.dumps(result.as_json(), indent=1)
    if arguments.out or result.findings:
        out.mkdir(parents=True, exist_ok=True)
        project.write_text(out / VERDICT, report)
    print(report if arguments.json else result)
    return 1 if result.findings else 0 if result.by_outcome("alike") else 2


def _since(arguments: argparse.Namespace, note: Callable[[str], None]) -> Callable[..., str] | None:
    """Returns what finds out since when a reproduction shows its difference; None where nobody asks."""
    from pardemo.script.search import bisect, recipes

    if arguments.since is None:
        return None
    if arguments.clone is not None:
        return partial(bisect.since_commit, clone=Path(arguments.clone), since=arguments.since, note=note)
    package = arguments.package or recipes.package_of(arguments.recipe)
    return partial(bisect.since_release, package=package, since=arguments.since, note=note)


def _asked(arguments: argparse.Namespace) -> _Asked:
    """Reads the script's line and the axes, from the command line or from a file; the command line counts more."""
    from pardemo.script.compare import run_layouts
    from pardemo.script.search import axes

    if arguments.recipe is not None:
        from pardemo.script.search.recipes import recipe

        if arguments.words:
            raise ValueError("--recipe has a script of its own: leave out the one behind --")
        words, table, settings = recipe(arguments.recipe)
    elif len(arguments.words) == 1 and arguments.words[0].endswith(".toml"):
        words, table, settings = run_layouts.search_of(arguments.words[0])
    elif arguments.words:
        words, table, settings = list(arguments.words), {}, {}
    else:
        words, table, settings = run_layouts.search_of("prove.toml")
    given = [axes.parse_axis(text, kind) for kind in _AXES for text in getattr(arguments, kind) or ()]
    asked = _Asked(words, given, {}, settings)
    for name, value in table.items():
        if name in _AXES:
            asked.axes += [axis for axis in _table_axes(name, value) if axis.name not in {axis.name for axis in given}]
        elif name not in _KEYS:
            raise ValueError(f"[search]: {name!r} is not known; it may say {', '.join(sorted({*_KEYS, *_AXES}))}")
        elif not isinstance(value, _KEYS[name][0]) or isinstance(value, bool):
            raise ValueError(f"[search]: {name} must be {_KEYS[name][1]}")
        else:
            asked.numbers[name] = value
    asked.numbers |= {name: value for name in _KEYS if (value := getattr(arguments, name)) is not None}
    return asked


def _table_axes(kind: str, table: Any) -> list[Any]:
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
    entries = list(folder.iterdir()) if folder.is_dir() else []
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is a folder, and {path} is a file")
    for entry in entries:
        if entry.name != VERDICT and not (entry.name.isdecimal() and (entry / "repro.py").is_file()):
            raise ValueError(f"--out: {path} has other things in it, as {entry.name}: say a folder of its own")
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry)
    return folder
