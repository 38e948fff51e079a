"""How many cases of each kind of evidence came out as predicted."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pardemo.draw import palette
from pardemo.draw.style import Picture, new, save

_KINDS = {kind: palette.VERDICTS[kind] for kind in ("holds", "differs", "off")}


def verdicts(totals: Sequence[Mapping[str, Any]]) -> Picture:
    """A bar for each kind of evidence, cut by verdict.

    Args:
        totals: rows of :func:`pardemo.book.run.scorecard.totals` by evidence, without the one of all.
    """
    rows = sorted(totals, key=lambda row: -row["cases"])
    fig, ax = new(size=(6.2, 0.4 * len(rows) + 1.2))
    places, left = np.arange(len(rows)), np.zeros(len(rows))
    for kind, colour in _KINDS.items():
        counts = np.array([row[kind] for row in rows])
        ax.barh(places, counts, 0.66, left=left, color=colour, edgecolor="white", label=kind)
        left += counts
    for place, row in enumerate(rows):
        label = ", ".join(f"{row[kind]} {kind}" for kind in _KINDS if row[kind])
        ax.annotate(label, (left[place], place), (6, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, [row["evidence"] for row in rows])
    ax.set(xlabel="cases", xlim=(0, 1.6 * max(left)), ylim=(len(rows) - 0.45, -0.55))
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right")
    values_text = "; ".join(
        f"{row['evidence']}: " + ", ".join(f"{row[k]} {k}" for k in _KINDS if row[k]) for row in rows
    )
    return save(fig, "scorecard_verdicts", f"Cases by evidence and verdict. {values_text}.")
