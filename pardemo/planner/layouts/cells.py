"""A row of a CSV file by its columns: words and numbers, and one line where a cell is neither."""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Cells:
    """The cells of a row.

    Each method raises ValueError, one line with the column and what would be right, where a cell does not say it.
    """

    def __init__(self, row: Mapping[str, str | None], left_out: Mapping[str, str] | None = None):
        """``left_out``: what an empty or missing cell of a column stands for; "" where nothing is said of it."""
        self._row, self._left_out = row, left_out or {}

    def given(self, name: str) -> bool:
        """Whether the row itself says something."""
        return bool((self._row.get(name) or "").strip())

    def text(self, name: str) -> str:
        return (self._row.get(name) or "").strip() or self._left_out.get(name, "")

    def whole(self, name: str, least: int = 1) -> int:
        try:
            value = int(self.text(name))
        except ValueError:
            value = None
        if value is None or value < least:
            raise ValueError(f"{self._told(name)}; right would be a whole number of at least {least}")
        return value

    def number(self, name: str, least: float | None = None) -> float:
        """Above 0, or at least ``least``."""
        try:
            value = float(self.text(name))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (value <= 0 if least is None else value < least):
            right = "above 0" if least is None else f"of at least {least:g}"
            raise ValueError(f"{self._told(name)}; right would be a number {right}")
        return value

    def one_of(self, name: str, known: Mapping[str, Value]) -> Value:
        """What the word stands for; capitals do not matter."""
        words = {word.lower(): value for word, value in known.items()}
        if (word := self.text(name).lower()) not in words:
            raise ValueError(f"{self._told(name)}; right would be {', '.join(known)}")
        return words[word]

    def _told(self, name: str) -> str:
        return f"{name} is {self.text(name)!r}" if self.text(name) else f"{name} is empty"


def rows(path: Path) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """A file's columns; and its rows, each with the number of its line.

    Raises:
        ValueError: it is no text.
    """
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""))
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is no UTF-8 text; a CSV with a run in each row is asked for") from None
    header = list(reader.fieldnames or [])
    return header, ((reader.line_num, row) for row in reader)
