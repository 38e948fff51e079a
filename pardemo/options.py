"""Numbers of the command line: what is impossible is refused before a command imports what it works with."""

import argparse


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
