"""Tables for readers: in a notebook, and in a terminal."""

from collections.abc import Sequence
from typing import Any

from pardemo import extras


def show(rows: Any):
    """A pandas table (or rows for one) as a notebook shows it whole: text to the left, nothing cut, no row numbers.

    An index with a meaning of its own (texts) is kept. Returns a pandas Styler; its ``data`` is the table.
    """
    with extras.needed_by(f"{__name__}.show"):
        import pandas as pd
        from pandas.io.formats.style import Styler

    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows)
    styler = Styler(frame, precision=4, cell_ids=False)  # a style for the table, not one for each of its cells
    styler = styler.set_table_styles([{"selector": tag, "props": [("text-align", "left")]} for tag in ("th", "td")])
    return styler.hide(axis="index") if isinstance(frame.index, pd.RangeIndex) else styler


def amount(nbytes: float, decimals: int | None = None) -> str:
    """Bytes in words: ``4.12 GB``, ``12.3 MB``, ``640 B``; with as many decimals as are given, or three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            digits = (2 if nbytes < 10 * size else 1) if decimals is None else decimals
            return f"{nbytes / size:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the head first, laid out in columns for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
