"""Names that have a layer's number in them, and what is counted by such names: with more layers than were run."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pardemo.planner.samples import Counts

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def number(name: str) -> int | None:
    """The layer's number in a name; None without one."""
    match = _NUMBER.search(name)
    return int(match[0]) if match else None


def renamed(name: str, number: int) -> str:
    """The name with another layer's number."""
    return _NUMBER.sub(str(number), name, count=1)


def masked(name: str) -> str:
    """The name with ``*`` in the place of the layer's number."""
    return _NUMBER.sub("*", name, count=1)


def by_layer(named: Mapping[str, Any], middle: int, more: int) -> Iterator[tuple[str, Any]]:
    """Names and values, with those of layers that were not run, in order: they are like the one in the middle."""
    pending: list[tuple[str, Any]] = []
    for name, value in [*named.items(), ("", None)]:
        layer = number(name)
        if pending and layer != middle:
            for extra in range(1, more + 1):
                yield from ((renamed(middle_name, middle + extra), like) for middle_name, like in pending)
            pending = []
        if layer == middle:
            pending.append((name, value))
        if value is not None:
            yield (name if layer is None or layer <= middle else renamed(name, layer + more)), value


def counts(few: Counts, many: Counts, middle: int, more: int) -> Counts:
    """Each count with ``more`` layers, as it grows from ``few`` to ``many``; the traffic of modules, layer by layer."""
    extended: Counts = {}
    for kind, named in many.items():
        extended[kind] = {}
        for name, values in by_layer(named, middle, more):
            if number(name) is None:
                before = few[kind].get(name, (0, 0))
                values = tuple(now + more * (now - was) for now, was in zip(values, before, strict=True))
            extended[kind][name] = values
    return extended
