"""Which number of a layout a factor is: ranks, micro-batches, the sizes of its groups."""

import math
from dataclasses import dataclass

from pardemo.prove.layouts import SIZES, Layout

#: Numbers of a layout, the likeliest first.
_ORDER = ("accumulate", "micro_batches", "dp", "ranks", "cp", "sp", "tp", "ep", "pp")


@dataclass(frozen=True)
class Factor:
    """A factor that is a number of the layout: ``× 4 = the number of ranks``. ``keys``: all whose number it is."""

    times: bool
    keys: tuple[str, ...]
    number: int

    def told(self) -> str:
        """In words."""
        names = " or ".join(f"the {words(key)}" for key in self.keys)
        return f"{'×' if self.times else '÷'} {self.number} = {names}"


def words(key: str) -> str:
    """What a layout's key is, in words."""
    return "number of ranks" if key == "ranks" else SIZES.get(key, key)


def apart(*values: float) -> list[str]:
    """Numbers with so many digits that those that differ look different, four at least.

    >>> apart(0.5, 0.500012)
    ['0.5', '0.50001']
    """
    for digits in range(4, 17):
        told = [f"{value:.{digits}g}" for value in values]
        if len(set(told)) == len(set(values)):
            break
    return told


def factor(layout: Layout, value: float, tolerance: float) -> Factor | None:
    """The layout's number, or the product of two of them, that a factor or its inverse is."""
    if not math.isfinite(value) or value <= 0:
        return None
    sizes = {key: layout.sizes[key] for key in _ORDER if key in layout.sizes}
    for times in (True, False):
        number = value if times else 1 / value
        keys = tuple(key for key, size in sizes.items() if math.isclose(number, size, rel_tol=tolerance))
        if keys:
            return Factor(times, keys, sizes[keys[0]])
    for times in (True, False):
        number = value if times else 1 / value
        for a, first in sizes.items():
            for b, second in sizes.items():
                if a < b and math.isclose(number, first * second, rel_tol=tolerance):
                    return Factor(times, (a, b), first * second)
    return None
