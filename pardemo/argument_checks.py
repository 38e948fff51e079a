"""Checks numbers and names of a command line or a call, and refuses in one line what is impossible."""

import argparse
import difflib
from collections.abc import Collection
from typing import Any


def at_least(arguments: argparse.Namespace, least: int, *names: str) -> None:
    """Refuses an option, by its name in ``arguments``, that was given and is too small.

    Raises:
        ValueError: names the option and its value.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not value >= least:  # not a number is too small, too
            limit = "0 or more" if least == 0 else f"at least {least}"
            raise ValueError(f"--{name.replace('_', '-')} must be {limit}, not {value}")


def whole_number(value: Any, name: str, least: int = 1, most: int | None = None) -> int:
    """Returns the value, a whole number of at least ``least``, and of at most ``most`` where that is given.

    Raises:
        ValueError: it is something else; True and 2.0 are.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= (value if most is None else most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {limits}, not {value!r}")
    return value


def above_zero(value: float, name: str) -> float:
    """Returns the value, a number above 0.

    Raises:
        ValueError: it is 0, negative or no number.
    """
    if not value > 0:
        raise ValueError(f"{name} must be above 0, not {value:g}")
    return value


def time_limit(value: Any, name: str) -> float:
    """A time limit, as a number or its text.

    Raises:
        ValueError: it is no number above 0.
    """
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} is a number of seconds above 0, not {value!r}")
    return number


def nearest(
    text: object, candidates: Collection[str], otherwise: str | None = None, most: int = 1, cutoff: float = 0.6
) -> str:
    """Returns the end of an error about a name that does not exist: the nearest that do, or ``otherwise``.

    Args:
        otherwise: where none is near; without it all candidates are listed.
        most, cutoff: how many are offered, and how near they are at least, from 0 to 1 (``difflib``).

    >>> nearest("pipelin", ["pipeline", "tensor"])
    "; did you mean 'pipeline'?"
    """
    if near := difflib.get_close_matches(str(text), candidates, most, cutoff):
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; there are {', '.join(candidates)}" if otherwise is None else otherwise
