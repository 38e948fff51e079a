"""Notes what a rank waits for, so that its World can read it while the rank is blocked.

A wait of more than a second is noted as a line of the file that takes the rank's stacks, and so is its end: whoever
reads the lines knows what is still waited for. Shorter waits, which are nearly all, write nothing.
"""

import itertools
import os
import re

PATIENCE_S = 1  # a wait of so long is noted
_MARK = "\x02"
_numbers = itertools.count()
_file: int | None = None


def write_to(descriptor: int) -> None:
    """Sets the file to which this process notes its waits (opened for appending: threads need no lock)."""
    global _file
    _file = descriptor


class Wait:
    """One wait: :meth:`goes_on` after each second, :meth:`ends`."""

    def __init__(self) -> None:
        self.seconds = 0
        self._number: int | None = None

    def goes_on(self, wait: str) -> None:
        self.seconds += PATIENCE_S
        if self._number is None:
            self._number = next(_numbers)
            _write(f"{self._number} {wait}")

    def ends(self) -> None:
        if self._number is not None:
            _write(f"{self._number} ")
            self._number = None
        self.seconds = 0


def read_waits(text: str) -> tuple[list[str], str]:
    """The waits that have not ended, and what is left of the file: the stacks."""
    waits = dict(re.findall(rf"{_MARK}(\d+) (.*)\n", text))  # the last line of each
    return [wait for wait in waits.values() if wait], re.sub(rf"{_MARK}.*\n", "", text)


def _write(line: str) -> None:
    if _file is not None:
        os.write(_file, f"{_MARK}{line}\n".encode())
