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


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the head first, laid out in columns for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
