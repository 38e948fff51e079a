"""The kinds of chart that the chapters share."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from pardemo import extras
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, HATCHES, MARKERS, new

with extras.needed_by(__name__):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch


def predicted(
    ax: Axes, x: Sequence[float], y: Sequence[float], label: str | None = "predicted", kind: str = "predicted"
):
    """The prediction: a line without marks."""
    styles = {"parameter server": "--", "torch": ":"}
    return ax.plot(x, y, color=COLOURS[kind], linestyle=styles.get(kind, "-"), linewidth=1.6, label=label, zorder=2)


def measured(
    ax: Axes,
    x: Sequence[float],
    y: Sequence[float],
    label: str | None = "measured",
    kind: str = "ring",
    hollow: Sequence[bool] | None = None,
):
    """The measurement: marks without a line; ``hollow`` ones are those under conditions to be wary of."""
    flags = np.zeros(len(x), bool) if hollow is None else np.asarray(hollow, bool)
    faces = ["white" if flag else COLOURS[kind] for flag in flags]
    return ax.scatter(
        x, y, s=46, marker=MARKERS.get(kind, "o"), facecolors=faces, edgecolors=COLOURS[kind], label=label,
        linewidths=1.6, zorder=3,
    )  # fmt: skip


def bars(ax: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], outline: Mapping | None = None):
    """Bars side by side in each group: measured filled, predicted as a black outline behind them.

    Args:
        groups: labels on the x axis. series: kind -> one value per group. outline: the same shape, predicted.
    """
    places = np.arange(len(groups))
    width = 0.8 / len(series)
    for index, (kind, values) in enumerate(series.items()):
        at = places + (index - (len(series) - 1) / 2) * width
        ax.bar(
            at, values, width * 0.86, color=COLOURS.get(kind, palette.OTHER), hatch=HATCHES.get(kind, ""),
            edgecolor="white", label=kind, zorder=2,
        )  # fmt: skip
        if outline is not None:
            label = "predicted" if index == 0 else None
            ax.bar(at, outline[kind], width * 0.98, fill=False, edgecolor="black", linewidth=1.2, label=label, zorder=3)
    ax.set_xticks(places, groups)
    ax.grid(axis="x", visible=False)


def numbers(ax: Axes, places: Sequence[float], values: Sequence[float], template: str) -> None:
    """Each bar's value above it."""
    for place, value in zip(places, values, strict=True):
        ax.annotate(template.format(value), (place, value), (0, 3), textcoords="offset points", ha="center")


def sent_and_kept(
    sent: Mapping[str, float], predicted: Mapping[str, float], kept: Mapping[str, float], titles: Sequence[str],
    outlined: str,
) -> tuple[Figure, str]:  # fmt: skip
    """What each library sends, with the prediction as an outline, beside what it keeps; and the values in words.

    Args:
        sent, predicted, kept: library -> a number in the unit of its panel. titles: of the two panels.
        outlined: what an outline is.
    """
    fig, axes = new(1, 2, size=(6.4, 3.2))
    labels = [name.replace(", ", ",\n").replace("Megatron-core", "Megatron-\ncore") for name in sent]
    panels = (("communication", sent, "{:.1f}"), ("activations", kept, "{:.2f}"))
    for ax, title, (series, values, template) in zip(axes, titles, panels, strict=True):
        outline = {series: list(predicted.values())} if values is sent else None
        bars(ax, labels, {series: list(values.values())}, outline)
        numbers(ax, range(len(values)), list(values.values()), template)
        ax.set(title=title, ylim=(0, 1.25 * max(values.values())))
    fig.legend(handles=[Patch(fill=False, edgecolor="black", label=outlined)], loc="outside lower right")
    return fig, "; ".join(f"{name}: {sent[name]:.2f} sent, {kept[name]:.2f} kept" for name in sent)


def gantt(ax: Axes, spans: Sequence, begin_s: float | None = None, title: str = "") -> None:
    """Spans of several ranks as bars over time: computation on the upper, communication on the lower half of a row.

    Times are milliseconds since ``begin_s`` (the earliest span by default).
    """
    begin = min(s.begin_s for s in spans) if begin_s is None else begin_s
    ranks = sorted({s.rank for s in spans})
    for span in spans:
        row = ranks.index(span.rank)
        lower = span.kind not in ("compute", "forward", "backward")
        left, width = (span.begin_s - begin) * 1e3, (span.end_s - span.begin_s) * 1e3
        ax.broken_barh(
            [(left, width)], (row + (0.02 if lower else -0.38), 0.36), facecolor=_colour(span.kind),
            hatch=HATCHES.get(span.kind, ""), edgecolor="white", linewidth=0.5, zorder=2,
        )  # fmt: skip
    ax.set_yticks(range(len(ranks)), [f"rank {r}" for r in ranks])
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_title(title)


def _colour(kind: str) -> str:
    """A kind's colour; of one that a reader has named, always the same of those that ways of doing something have."""
    others = list(palette.WAYS.values())
    return COLOURS.get(kind) or others[zlib.crc32(kind.encode()) % len(others)]


def kind_legend(ax: Axes | Figure, kinds: Sequence[str], **kwargs) -> None:
    """A legend of kinds of things on an axes or a figure, whether or not each occurs there."""
    patches = [Patch(facecolor=_colour(k), hatch=HATCHES.get(k, ""), edgecolor="white", label=k) for k in kinds]
    ax.legend(handles=patches, **kwargs)
