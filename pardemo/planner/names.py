"""Names that have a layer's number in them, and what is counted by such names: with more layers than were run."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pardemo.planner.samples import Counts

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def number(name: str) -> int | None:
    """Of the layer."""
    found = _NUMBER.search(name)
    return int(found[0]) if found else None


def renamed(name: str, number: int) -> str:
    """Of another layer."""
    return _NUMBER.sub(str(number), name, count=1)


def masked(name: str) -> str:
    """Of any layer."""
    return _NUMBER.sub("*", name, count=1)


def by_layer(named: Mapping[str, Any], middle: int, more: int) -> Iterator[tuple[str, Any]]:
    """Names and values with the layers that were not run, in order: they are like the one in the middle."""
    held: list[tuple[str, Any]] = []
    for name, value in [*named.items(), ("", None)]:
        layer = number(name)
        if held and layer != middle:
            for extra in range(1, more + 1):
                yield from ((renamed(one, middle + extra), like) for one, like in held)
            held = []
        if layer == middle:
            held.append((name, value))
        if value is not None:
            yield (name if layer is None or layer <= middle else renamed(name, layer + more)), value


def counts(few: Counts, many: Counts, middle: int, more: int) -> Counts:
    """Each count goes on as from one layer less to one more; what modules moved, layer by layer."""
    found: Counts = {}
    for kind, named in many.items():
        found[kind] = {}
        for name, values in by_layer(named, middle, more):
            if number(name) is None:
                before = few[kind].get(name, (0, 0))
                values = tuple(now + more * (now - was) for now, was in zip(values, before, strict=True))
            found[kind][name] = values
    return found
