"""Reads the cells of a CSV row as words and numbers; the error for a wrong cell is one line."""

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

    Each method raises ValueError for a wrong cell: one line that names the column and what would be right.
    """

    def __init__(self, row: Mapping[str, str | None], left_out: Mapping[str, str] | None = None):
        """``left_out``: by column, what an empty or missing cell stands for; "" by default."""
        self._row, self._left_out = row, left_out or {}

    def has(self, name: str) -> bool:
        """Whether the row itself has a value in that column."""
        return bool((self._row.get(name) or "").strip())

    def text(self, name: str) -> str:
        return (self._row.get(name) or "").strip() or self._left_out.get(name, "")

    def whole(self, name: str, least: int = 1) -> int:
        try:
            value = int(self.text(name))
        except ValueError:
            value = None
        if value is None or value < least:
            raise ValueError(f"{self._problem(name)}; right would be a whole number of at least {least}")
        return value

    def number(self, name: str, least: float | None = None) -> float:
        """A number above 0, or of at least ``least``."""
        try:
            value = float(self.text(name))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (value <= 0 if least is None else value < least):
            right = "above 0" if least is None else f"of at least {least:g}"
            raise ValueError(f"{self._problem(name)}; right would be a number {right}")
        return value

    def one_of(self, name: str, meanings: Mapping[str, Value]) -> Value:
        """The meaning of the cell's word; capitals do not matter."""
        words = {word.lower(): value for word, value in meanings.items()}
        if (word := self.text(name).lower()) not in words:
            raise ValueError(f"{self._problem(name)}; right would be {', '.join(meanings)}")
        return words[word]

    def _problem(self, name: str) -> str:
        return f"{name} is {self.text(name)!r}" if self.text(name) else f"{name} is empty"


def rows(path: Path) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """A file's columns; and its rows, each with the number of its line.

    Raises:
        ValueError: the file is not UTF-8 text.
    """
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""))
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is no UTF-8 text; a CSV with a run in each row is asked for") from None
    header = list(reader.fieldnames or [])
    return header, ((reader.line_num, row) for row in reader)
