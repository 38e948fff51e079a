"""Reads the layouts of a proof from prove.toml or the command line, and puts them into the script's arguments."""

import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

from pardemo.cluster import MAX_RANKS

#: What a layout may say of how its ranks are used, beside ``ranks``, and what it is in words.
SIZES = {
    "tp": "tensor-parallel size", "pp": "pipeline stages", "cp": "context-parallel size", "ep": "expert-parallel size",
    "dp": "data-parallel size", "sp": "sequence-parallel size", "accumulate": "micro-batches that are accumulated",
    "micro_batches": "micro-batches",
}  # fmt: skip
_FIELD = re.compile(r"\{(\w+)\}")
#: What a ``prove.toml`` may say beside the script and its layouts.
_MORE = {"steps": (int, "a whole number"), "double": (bool, "true or false"), "resume": (str, "the script's line")}


@dataclass(frozen=True)
class RunLayout:
    """One way to run the script.

    ``ranks``: how many. ``values``: all that it says, for the fields of the script's line. ``line``: that line, filled.
    """

    ranks: int
    values: Mapping[str, Any]
    line: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``ranks=4 batch=8``, as on the command line."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers above 1 that a factor may be: ranks, and what :data:`SIZES` names, each with its words."""
        named = {"ranks": self.ranks} | {k: v for k, v in self.values.items() if k in SIZES and isinstance(v, int)}
        if "dp" not in named:
            model = prod(v for k, v in named.items() if k in ("tp", "pp", "cp"))
            if model > 1 and self.ranks % model == 0:
                named["dp"] = self.ranks // model
        return {key: value for key, value in named.items() if value > 1}

    def size(self, key: str) -> int:
        """Returns a number of :data:`SIZES`; by default 1, or for ``dp`` what is left of the ranks."""
        if key == "dp" and key not in self.values:
            return self.ranks // prod(self.size(cut) for cut in ("tp", "pp", "cp"))
        return int(self.values.get(key, 1))


def from_file(path: str) -> tuple[list[RunLayout], dict[str, Any]]:
    """Reads the layouts of a ``prove.toml``, and what else it says: ``steps``, ``double``, ``resume``.

    Raises:
        ValueError: it cannot be read, has no script, no layouts, or a name that nobody knows; one line.
    """
    line, tables, settings = tables_of(path)
    return fill_line([_layout(table, path) for table in tables], line), settings


def tables_of(path: str) -> tuple[list[str], list[dict[str, Any]], dict[str, Any]]:
    """Reads the words of the script's line in a ``prove.toml``, its layouts as tables, and what else it says.

    Raises:
        ValueError: as :func:`from_file`.
    """
    words, read = _read_file(path)
    tables = read.pop("layout", None)
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path} needs a [[layout]] for the reference and one or more to compare with it")
    read.pop("search", None)
    return words, tables, read


def search_of(path: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Reads the words of the script's line in a ``prove.toml``, its table ``[search]``, and what else it says.

    Raises:
        ValueError: as :func:`from_file`.
    """
    words, read = _read_file(path)
    table = read.pop("search", {})
    if not isinstance(table, dict):
        raise ValueError(f"{path}: search is a table, [search], of axes and limits")
    read.pop("layout", None)
    return words, table, read


def _read_file(path: str) -> tuple[list[str], dict[str, Any]]:
    """Reads a ``prove.toml``: the words of the script's line, and all else."""
    try:
        read = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: write one, or give --layout and the script behind --") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is no TOML: it is nested without end") from None
    known = {"script", "layout", "search", *_MORE}
    if unknown := sorted(read.keys() - known):
        raise ValueError(f"{path}: {unknown[0]!r} is not known; it may say {', '.join(sorted(known))}")
    script = read.pop("script", None)
    if not isinstance(script, str) or not script.strip():
        raise ValueError(f'{path} needs script = "train.py …"')
    for name, value in read.items():
        if name in _MORE:
            kind, words = _MORE[name]
            if type(value) is not kind:
                raise ValueError(f"{path}: {name} must be {words}")
    if read.get("steps", 1) < 1:
        raise ValueError(f"{path}: steps must be a number from 1 on, not {read['steps']}")
    return words_of(script, f"{path}: "), read


def words_of(line: str, origin: str = "") -> list[str]:
    """Splits a script's line into words, as a shell does.

    Raises:
        ValueError: a quotation has no end; ``origin`` stands before it.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ValueError(f"{origin}the script's line cannot be read, {str(error).lower()}: {line}") from None


def from_texts(texts: Sequence[Mapping[str, Any] | str], line: Sequence[str], alone: bool = False) -> list[RunLayout]:
    """Reads layouts, as ``"ranks=4 batch=8"`` or as tables, for a script's line with ``{batch}`` in it.

    ``alone``: one layout is enough, where no two are compared.
    """
    read = [
        _layout(_parse_values(text, "--layout takes"), f"--layout {text!r}") if isinstance(text, str)
        else _layout(text, f"layout {number}") for number, text in enumerate(texts, 1)
    ]  # fmt: skip
    return fill_line(read, line, alone)


def for_function(layouts: Sequence[Mapping[str, Any] | str]) -> list[RunLayout]:
    """Reads layouts, as texts, ``"ranks=4 tp=2"``, or as tables, for a function that reads what they say.

    Raises:
        ValueError: one cannot be read, two are the same, or there is one alone; one line.
    """
    read = [_parse_values(text, "a layout is written as") if isinstance(text, str) else text for text in layouts]
    for given in read:
        if not isinstance(given, Mapping):
            raise ValueError(f'a layout is a text, "ranks=4 tp=2", or a dict, not {given!r}')
    parsed = [_layout(values, f"layout {number}") for number, values in enumerate(read, 1)]
    for layout in parsed:
        if layout.ranks % prod(layout.size(cut) for cut in ("tp", "pp", "cp")) or layout.ranks % layout.size("dp"):
            raise ValueError(f"{layout.name}: {layout.ranks} ranks do not divide into groups of these sizes")
    return _require_distinct(parsed)


def _parse_values(text: str, takes: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in text.replace(",", " ").replace(";", " ").split():
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier() or not value:
            raise ValueError(f'{takes} "ranks=4 batch=8", not {text!r}')
        if key in values:
            raise ValueError(f"{takes} each name once, and {text!r} says {key} twice")
        values[key] = int(value) if value.isascii() and value.isdecimal() else value
    return values


def _layout(values: Mapping[str, Any], origin: str) -> RunLayout:
    ranks = values.get("ranks")
    if ranks is None:
        raise ValueError(f"{origin}: say how many ranks, as ranks=4")
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"{origin}: ranks must be a number from 1 to {MAX_RANKS}, not {ranks!r}")
    for key, value in values.items():
        if not isinstance(value, (int, float, str)) or isinstance(value, bool):
            raise ValueError(f"{origin}: {key} must be a number or a text, not {value!r}")
        if key in SIZES and (type(value) is not int or value < 1):
            raise ValueError(f"{origin}: {key} must be a number from 1 on, not {value!r}")
    return RunLayout(ranks, dict(values))


def fill_line(layouts: Sequence[RunLayout], line: Sequence[str], alone: bool = False) -> list[RunLayout]:
    """Returns the layouts with the script's line, its ``{fields}`` in their values; ``alone``: one layout is enough."""
    fields = {name for part in line for name in _FIELD.findall(part)}
    filled = []
    for layout in layouts:
        if missing := sorted(fields - layout.values.keys()):
            raise ValueError(f"the script's line has {{{missing[0]}}}, which the layout {layout.name!r} does not say")
        if unused := sorted(layout.values.keys() - fields - {"ranks"} - SIZES.keys()):
            raise ValueError(
                f"the layout {layout.name!r} says {unused[0]}, which is nowhere in the script's line as {{{unused[0]}}}"
            )
        filled.append(replace(layout, line=tuple(_filled(part, layout) for part in line)))
    return _require_distinct(filled, alone)


def _require_distinct(layouts: list[RunLayout], alone: bool = False) -> list[RunLayout]:
    """Returns the layouts, if they are two or more, and no two of them the same."""
    if len(layouts) < 2 and not alone:
        raise ValueError(
            "a proof needs two layouts or more: the first is the reference, the others are held against it"
        )
    for a, b in combinations(layouts, 2):
        # a script sees no more of a layout than its line; a function sees all
        if a.ranks == b.ranks and (a.line == b.line if a.line else dict(a.values) == dict(b.values)):
            raise ValueError(f"two layouts are the same, {a.name} and {b.name}: nothing would be compared")
    return layouts


#: Numbers of a layout, the likeliest first.
_ORDER = ("accumulate", "micro_batches", "dp", "ranks", "cp", "sp", "tp", "ep", "pp")


@dataclass(frozen=True)
class Factor:
    """A factor that is a number of the layout: ``× 4 = the number of ranks``. ``keys``: all whose number it is."""

    times: bool
    keys: tuple[str, ...]
    number: int

    @property
    def text(self) -> str:
        """The factor in words: ``× 4 = the number of ranks``."""
        names = " or ".join(f"the {size_text(key)}" for key in self.keys)
        return f"{'×' if self.times else '÷'} {self.number} = {names}"


def size_text(key: str) -> str:
    """Returns the words for a layout's key."""
    return "number of ranks" if key == "ranks" else SIZES.get(key, key)


def distinct_digits(*values: float) -> list[str]:
    """Writes numbers with so many digits that those that differ look different, four at least.

    >>> distinct_digits(0.5, 0.500012)
    ['0.5', '0.50001']
    """
    for digits in range(4, 17):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def layout_factor(layout: RunLayout, value: float, tolerance: float) -> Factor | None:
    """Returns the layout's number, or the product of two of them, that a factor or its inverse is."""
    if not math.isfinite(value) or value <= 0:
        return None
    sizes = {key: layout.sizes[key] for key in _ORDER if key in layout.sizes}
    ways = [(True, value), (False, 1 / value)]
    for times, number in ways:
        keys = tuple(key for key, size in sizes.items() if math.isclose(number, size, rel_tol=tolerance))
        if keys:
            return Factor(times, keys, sizes[keys[0]])
    for (times, number), (a, first), (b, second) in product(ways, sizes.items(), sizes.items()):
        if a < b and math.isclose(number, first * second, rel_tol=tolerance):
            return Factor(times, (a, b), first * second)
    return None


def _filled(part: str, layout: RunLayout) -> str:
    """Fills a word of the script's line with the layout's values in place of their names."""
    return _FIELD.sub(lambda field: str(layout.values[field[1]]), part)
