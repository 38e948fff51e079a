"""Reads the axes of a search, and says which layouts they allow."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from pardemo.cluster import MAX_RANKS
from pardemo.planner.divisors import powers_of_two
from pardemo.script.compare.run_layouts import SIZES, RunLayout, from_texts
from pardemo.script.search.conditions import Condition, read_condition
from pardemo.script.search.script_options import WAYS, ScriptOption, option_for, script_options

Value = int | float | str
#: A value for each axis.
Point = dict[str, Value]
#: Kinds of axes: layouts along it must train alike; the reference has the layout's value; the same, and only made
#: smaller where a layout parts.
LAYOUT, VARIED, SIZE = "axis", "vary", "size"
#: Layouts beyond which a search is refused, since all of them are listed.
MOST = 20_000
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Axis:
    """A name of the script's line with its values, of which the reference has the first; ``kind``: as :data:`LAYOUT`.

    Raises:
        ValueError: a size is no number from 1 on, or a value comes twice; one line.
    """

    name: str
    values: tuple[Value, ...]
    kind: str = LAYOUT

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name == "ranks":
            raise ValueError(f"--{self.kind} {self.name}: an axis has a name as tp; ranks follow from tp, pp, cp, dp")
        if not self.values or len(set(map(str, self.values))) < len(self.values):
            raise ValueError(f"--{self.kind} {self.name} takes values that differ, as {self.name}=1,2")
        for value in self.values:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ValueError(f"--{self.kind} {self.name}: a value is a number or a text, not {value!r}")
            if self.name in (*SIZES, "samples", "batch") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"--{self.kind} {self.name}: a value is a number from 1 on, not {value!r}")


def parse_axis(text: str, kind: str = LAYOUT) -> Axis:
    """Reads an axis, ``tp=1,2``.

    Raises:
        ValueError: it is none; one line.
    """
    name, equals, values = text.partition("=")
    words = [word.strip() for word in values.split(",")]
    if not equals or not all(words):
        raise ValueError(f'--{kind} takes a name and its values, as "tp=1,2", not {text!r}')
    return Axis(name.strip(), tuple(map(_as_value, words)), kind)


def _as_value(word: str) -> Value:
    return int(word) if re.fullmatch(r"-?[0-9]+", word) else word


@dataclass(frozen=True)
class Space:
    """The layouts of a search: the script's line with fields, its axes, and what a layout has to fulfil.

    ``ranks``: the most that a layout may have. ``batch``: whether ``{batch}`` follows from the samples of a step.
    """

    line: tuple[str, ...]
    axes: tuple[Axis, ...]
    ranks: int
    batch: bool = False
    conditions: tuple[Condition, ...] = ()
    fields: frozenset[str] = field(default_factory=frozenset)

    def values(self, point: Mapping[str, Value]) -> dict[str, Value] | None:
        """Returns all that a point's layout says, with its ranks and its batch; None where that is no legal layout."""
        size = {name: int(point.get(name, 1)) for name in SIZES}
        ranks = math.prod(size[name] for name in ("dp", "tp", "pp", "cp"))
        if ranks > self.ranks or any(ranks % size[name] for name in ("ep", "sp")):
            return None
        values: dict[str, Value] = {"ranks": ranks, **point}
        if self.batch:
            batch, rest = divmod(int(point["samples"]), size["dp"] * size["accumulate"])
            if rest:
                return None
            values["batch"] = batch
        return values if all(condition.holds({**size, **values}) for condition in self.conditions) else None

    def layout(self, point: Mapping[str, Value]) -> RunLayout:
        """Returns a legal point's layout with the script's line. ``dp`` is left out where the line has it not."""
        values = self.values(point)
        if values is None:
            raise ValueError(f"the reference, {as_text(point)}, is no layout that the conditions and --ranks allow")
        shown = self.fields | SIZES.keys() - {"dp"} | {"ranks"}
        return from_texts([{name: value for name, value in values.items() if name in shown}], self.line, alone=True)[0]

    def reference_of(self, point: Mapping[str, Value]) -> Point:
        """Returns the point of the reference: all axes along which layouts train alike have their first value."""
        return {axis.name: axis.values[0] if axis.kind == LAYOUT else point[axis.name] for axis in self.axes}

    def differing(self, point: Mapping[str, Value]) -> Point:
        """Returns the values of a point that are not the reference's."""
        reference = self.reference_of(point)
        return {name: value for name, value in point.items() if value != reference[name]}

    def marks(self, point: Mapping[str, Value]) -> Point:
        """Returns the values that are not their axis's first, sizes left out: those that may make a point part."""
        first = {axis.name: axis.values[0] for axis in self.axes if axis.kind != SIZE}
        return {name: point[name] for name, value in first.items() if point[name] != value}

    def points(self) -> Iterator[Point]:
        """Yields all legal points but the references, with sizes at their first value.

        Raises:
            ValueError: there are more than :data:`MOST`.
        """
        wide = [axis.values[:1] if axis.kind == SIZE else axis.values for axis in self.axes]
        if (count := math.prod(map(len, wide))) > MOST:
            raise ValueError(
                f"the axes have {count:,} combinations, and a search takes up to {MOST:,}: say fewer values"
            )
        for values in product(*wide):
            point = dict(zip((axis.name for axis in self.axes), values, strict=True))
            if self.values(point) is not None and self.differing(point):
                yield point


def as_text(point: Mapping[str, Value]) -> str:
    """``tp=2 accumulate=2``."""
    return " ".join(f"{name}={value}" for name, value in point.items())


def read_space(
    line: Sequence[str],
    axes: Sequence[Axis] = (),
    *,
    text: str = "",
    ranks: int = 4,
    samples: int | None = None,
    steps: int = 3,
    conditions: Sequence[str] = (),
) -> Space:
    """Makes the space of a search; what the axes leave open, the script's options say.

    Where no axis of layouts is given, these are the options that have a name of :data:`SIZES`, and those of
    :data:`WAYS` with choices. ``dp`` is an axis in any case, and a step's samples are as many as all layouts divide.

    Args:
        line: the script and its arguments, with ``{names}`` of axes. An axis that is not in it is added as an option.
        text: the script's.

    Raises:
        ValueError: an axis is said twice or is nowhere, the numbers fit no layout, a condition is none; one line.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"--ranks must be from 1 to {MAX_RANKS}, not {ranks}")
    options = script_options(text)
    all_axes = list(axes)
    if not any(axis.kind == LAYOUT for axis in all_axes):
        known = {axis.name for axis in all_axes}
        all_axes += [axis for axis in _axes_of(options, ranks) if axis.name not in known]
    names = [axis.name for axis in all_axes]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"the axis {twice} is said twice")
    if "dp" not in names:
        all_axes.insert(0, Axis("dp", tuple(powers_of_two(ranks))))
    words, fields = list(line), {name for part in line for name in _FIELD.findall(part)}
    batch = "batch" not in names and ("batch" in fields or option_for("batch", options) is not None)
    for name in [*names, *(["batch"] if batch else [])]:
        option = option_for(name, options)
        if name not in fields and option is not None and not any(w.partition("=")[0] == option.flag for w in words):
            words += [option.flag, f"{{{name}}}"]
            fields.add(name)
        elif name not in fields and name == "batch":
            batch = False  # the line says it itself
        elif name not in fields and name not in SIZES:
            raise ValueError(f"the axis {name} is nowhere in the script's line as {{{name}}}, and no option of its own")
    if batch or "samples" in fields:
        all_axes.append(_samples_axis(all_axes, ranks, samples, option_for("batch", options)))
    elif samples is not None:
        raise ValueError("--samples needs {batch} in the script's line, which follows from it")
    all_axes.append(Axis("steps", tuple(range(steps, 0, -1)), SIZE))
    known_names = {"ranks", "batch", *SIZES, *(axis.name for axis in all_axes)}
    read = tuple(read_condition(condition, known_names) for condition in conditions)
    space = Space(tuple(words), tuple(all_axes), ranks, batch, read, frozenset(fields))
    space.layout({axis.name: axis.values[0] for axis in all_axes})  # says what is wrong before anything runs
    return space


def _axes_of(options: Mapping[str, ScriptOption], ranks: int) -> list[Axis]:
    """Returns the axes that a script's options have: sizes in powers of two, and ways with their default first."""
    axes = [
        Axis(name, (1, 2, 4) if name in ("accumulate", "micro_batches") else tuple(powers_of_two(ranks)))
        for name in SIZES.keys() - {"dp"} if option_for(name, options) is not None
    ]  # fmt: skip
    for option in options.values():
        if option.name in WAYS and len(option.choices) > 1 and option.takes_value:
            first = [option.default] if option.default in option.choices else []
            axes.append(Axis(option.name, tuple(dict.fromkeys([*first, *option.choices]))))
    return sorted(axes, key=lambda axis: axis.name)


def _samples_axis(axes: Sequence[Axis], ranks: int, samples: int | None, option: ScriptOption | None) -> Axis:
    """Makes the axis of a step's samples: all that were asked for, then their divisors, which are tried when shrinking.

    As many by default as the layouts' data-parallel ranks times micro-batches all divide, and as the script takes.
    """
    by_name = {axis.name: axis for axis in axes}
    replicas = [int(value) for value in by_name["dp"].values if int(value) <= ranks]
    parts = by_name["accumulate"].values if "accumulate" in by_name else (1,)
    least = math.lcm(*(count * int(part) for count in replicas for part in parts))
    if samples is None:
        taken = option.default if option is not None and isinstance(option.default, int) else 2 * least
        samples = least * max(math.ceil(taken / least), 1)
    return Axis("samples", tuple(part for part in range(samples, 0, -1) if samples % part == 0), SIZE)
