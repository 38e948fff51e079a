"""Every claim's measured figure over its prediction, on one axis."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart
from pardemo.draw.style import COLOURS, Picture, new

TICKS = (-1, -0.1, -0.01, -0.001, 0, 0.001, 0.01, 0.1, 1, 10)
NAMES = ("−100 %", "−10 %", "−1 %", "−0.1 %", "as\npredicted", "+0.1 %", "+1 %", "+10 %", "× 2", "× 11")
#: what a point is -> marker, colour, filled. A bound's marker points to where it allows the measurement to lie.
POINTS = {
    "holds": ("o", "holds", True),
    "at most": ("<", "holds", False),
    "at least": (">", "holds", False),
    "differs": ("D", "differs", False),
    "off": ("s", "off", False),
    "fails": ("X", "fails", True),
}
LABELS = {
    "holds": "holds",
    "at most": "below its bound",
    "at least": "above its bound",
    "differs": "differs, explained",
    "off": "off",
    "fails": "fails",
}
FURTHEST = 10.0


def ratios(panels: Mapping[str, Mapping[str, Sequence[tuple[float, str]]]]) -> Figure:
    """Panels one below the other on one axis.

    Args:
        panels: title -> name of a row -> its points, each (measured over predicted, one of :data:`POINTS`). What is
            more than 11 times the prediction is drawn at the end of the axis.
    """
    heights = [max(len(rows), 1) for rows in panels.values()]
    fig, axes = new(
        len(panels), 1, size=(9.5, 0.44 * sum(heights) + 1.6), sharex=True, height_ratios=heights, squeeze=False
    )
    kinds: dict[str, object] = {}
    for ax, (title, rows) in zip(axes.flat, panels.items(), strict=True):
        kinds |= _panel(ax, rows)
        ax.set_title(title)
    axes[-1, 0].set_xlabel("measured against predicted")
    drawn = [kind for kind in POINTS if kind in kinds]
    fig.legend([kinds[kind] for kind in drawn], [LABELS[kind] for kind in drawn], loc="outside lower center", ncols=6)
    return fig


def _panel(ax: Axes, rows: Mapping[str, Sequence[tuple[float, str]]]) -> dict[str, object]:
    drawn: dict[str, object] = {}
    for index, points in enumerate(rows.values()):
        for kind, (marker, colour, filled) in POINTS.items():
            kept = [min(ratio - 1, FURTHEST) for ratio, point_kind in points if point_kind == kind]
            if not kept:
                continue
            spread = [index + 0.62 * ((0.618 * k) % 1 - 0.5) for k in range(len(kept))]  # even, and the same every time
            drawn[kind] = ax.scatter(
                kept, spread, s=20, marker=marker, linewidths=0.9, zorder=3, alpha=0.85,
                facecolors=COLOURS[colour] if filled else "white", edgecolors=COLOURS[colour],
            )  # fmt: skip
    ax.axvline(0, color=COLOURS["predicted"], linewidth=1.2, zorder=2)
    ax.set_xscale("symlog", linthresh=1e-3, linscale=0.7)
    ax.set_xticks(TICKS, NAMES)
    ax.minorticks_off()
    ax.set_xlim(-1.6, FURTHEST * 1.6)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    for edge in range(1, len(rows)):
        ax.axhline(edge - 0.5, color=palette.GRID, linewidth=0.6, zorder=1)
    ax.grid(axis="y", visible=False)
    return drawn


_KINDS = ("holds", "differs", "off")


def verdicts(totals: Sequence[Mapping[str, Any]]) -> Picture:
    """A bar for each kind of evidence, cut by verdict.

    Args:
        totals: rows of :func:`pardemo.book.run.scorecard.totals` by evidence, without the one of all.
    """
    rows = {row["evidence"]: row for row in sorted(totals, key=lambda row: -row["cases"])}
    texts = [", ".join(f"{row[kind]} {kind}" for kind in _KINDS if row[kind]) for row in rows.values()]
    summary = "; ".join(f"{name}: {text}" for name, text in zip(rows, texts, strict=True))
    series = {kind: {name: row[kind] for name, row in rows.items()} for kind in _KINDS}
    return bar_chart(
        "scorecard_verdicts", f"Cases by evidence and verdict. {summary}.", {"cases": {"series": series}}, across=True,
        stacked=True, text=texts, room=1.6, ncols=3,
    )  # fmt: skip
