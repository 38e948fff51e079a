"""Tables for readers: in a notebook, and in a terminal."""

from collections.abc import Sequence
from typing import Any


def show(rows: Any):
    """A pandas table (or rows for one) as a notebook shows it whole: text to the left, nothing cut, no row numbers.

    An index with a meaning of its own (texts) is kept. Returns a pandas Styler; its ``data`` is the table.
    """
    import pandas as pd

    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows)
    styler = frame.style.set_properties(**{"text-align": "left"}).format(precision=4)
    styler = styler.set_table_styles([{"selector": "th", "props": [("text-align", "left")]}])
    return styler.hide(axis="index") if isinstance(frame.index, pd.RangeIndex) else styler


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the head first, laid out in columns for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
