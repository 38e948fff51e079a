"""Picture of *Which layout?*: how far the book's rule is behind the search, job by job."""

from collections.abc import Sequence

import numpy as np

from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.planner.layouts.choice.procedure_check import Compared


def rule_and_search(rows: Sequence[Compared]) -> Picture:
    """How many times as long as the search's best a step takes with the rule's layout; the longest on top."""
    fitting = sorted((row for row in rows if row.chosen is not None), key=lambda row: row.ratio)
    fig, ax = new(size=(7.2, 0.26 * len(fitting) + 1.0))
    places = np.arange(len(fitting))
    ratios = np.array([row.ratio for row in fitting])
    ax.barh(places, 100 * (ratios - 1), 0.66, color=COLOURS["compute"])
    for place, row in zip(places, fitting, strict=True):
        text = row.chosen.kind + (", recomputed" if row.chosen.layout.recompute == "full" else "")
        ax.annotate(text, (100 * (row.ratio - 1), place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, [row.name for row in fitting])
    ax.set(xlabel="longer than the search's best, %")
    ax.set(xlim=(0, max(4.3 * 100 * (ratios.max() - 1), 10)), ylim=(-0.6, len(fitting) - 0.4))
    ax.grid(axis="y", visible=False)
    values_text = "; ".join(f"{row.name}: {row.chosen.kind}, {row.ratio:.2f} times" for row in reversed(fitting))
    return save(fig, "which_layout_rule", f"Steps with the rule's layout, by the search's best: {values_text}.")
