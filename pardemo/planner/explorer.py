"""The plan's pictures: memory line by line against the GPU's capacity, and sliders over it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pardemo.collection.drawings import key
from pardemo.collection.figures.explore import is_headless
from pardemo.collection.figures.style import draw, new
from pardemo.planner.footprint import LINES, Footprint
from pardemo.planner.memory import Curve
from pardemo.tables import show

#: The kinds that every chapter has, and shades of them for what frameworks and models add.
SHADES = {**key.KEPT, **key.SHADES}

ZOOM = 40  # events on each side of the peak, at most


def memory_chart(bars: Mapping[str, Mapping[str, float]], capacity_bytes: float, title: str = "") -> Figure:
    """Stacked bars of GB, one for each entry of ``bars`` (lines in bytes), and the GPU's capacity as a line."""
    fig, ax = new(size=(9.0, 4.2))
    base = [0.0] * len(bars)
    for kind in LINES:
        values = [lines.get(kind, 0.0) / 1e9 for lines in bars.values()]
        if max(values) >= 0.05:
            ax.bar(range(len(bars)), values, 0.62, bottom=base, color=SHADES[kind], label=kind, edgecolor="white")
        base = [low + value for low, value in zip(base, values, strict=True)]
    for place, total in enumerate(base):
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the line below ends at the number
        ax.annotate(f"{total:,.1f}", (place, total), (0, 4), textcoords="offset points", ha="center", bbox=behind)
    ax.axhline(capacity_bytes / 1e9, color="black", linestyle="--", linewidth=1.2)
    ax.annotate(f"{capacity_bytes / 1e9:.0f} GB", (-0.95, capacity_bytes / 1e9), (0, 2), textcoords="offset points")
    ax.set_xticks(range(len(bars)), list(bars))
    top = 1.15 * max(*base, capacity_bytes / 1e9)
    ax.set(ylabel="GB per GPU at the peak", xlim=(-1.0, len(bars) - 0.5), ylim=(0, top), title=title)
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return fig


def step_timeline(found: Footprint, title: str) -> Figure:
    """GB by kind over a step's allocations and frees; beside it the peak, which is a spike of a few events, zoomed."""
    fig, (ax, close) = new(1, 2, size=(10.5, 3.8), sharey=True, width_ratios=(3, 1))
    share = found.timeline.astype(float) / 1e9
    total = share.sum(1)
    top = int(total.argmax())
    near = np.flatnonzero(total > 0.6 * total[top])  # the spike alone, however many events it has
    near = near[np.abs(near - top) <= ZOOM]
    begin, end = max(int(near.min()) - 4, 0), min(int(near.max()) + 5, len(total))
    for axes, first, last in ((ax, 0, len(total)), (close, begin, end)):
        axes.stackplot(
            range(first, last),
            share[first:last].T,
            colors=[SHADES[kind] for kind in found.lines],
            labels=list(found.lines),
            step="post",
        )
    close.annotate(f"peak {total[top]:.1f} GB", (top, total[top]), (0, 6), textcoords="offset points", ha="center")
    ax.axvline(top, color="black", linewidth=0.8, linestyle=":")
    ax.set(ylim=(0, 1.15 * total[top]), ylabel="GB", title=title, xlabel="allocations and frees, forward then backward")
    close.set(title="zoomed: the dotted line", xlabel="the same events")
    close.margins(x=0)
    handles, labels = ax.get_legend_handles_labels()
    shown = [k for k, kind in enumerate(found.lines) if share[:, k].max() >= 0.05]
    fig.legend([handles[k] for k in shown], [labels[k] for k in shown], loc="outside lower center", ncols=4)
    return fig


def memory_explorer(curve: Curve, capacity_bytes: float) -> Any:
    """A slider for the micro-batch, a switch for offload; a table where nobody is there to move them."""
    if is_headless():
        rows = []
        for samples in (1, 2, 4, 8, 16, 32):
            found = curve.estimate(samples)
            fits = found.peak_bytes <= capacity_bytes
            lines = {kind: round(found.lines[kind] / 1e9, 2) for kind in LINES if found.lines[kind] >= 5e7}
            rows.append({"micro-batch": samples, "GB": round(found.peak_bytes / 1e9, 1), "fits": fits} | lines)
        return show(rows)
    import ipywidgets as widgets
    from IPython.display import display

    def redraw(samples: int, offload: str) -> None:
        found = curve.estimate(samples, offload=offload)
        chart = memory_chart({f"micro-batch {samples}": found.lines}, capacity_bytes, f"offload: {offload}")
        told = f"Micro-batch {samples}, offload {offload}: {found.peak_bytes / 1e9:.1f} GB at the peak."
        display(draw(chart, told))  # interactive shows what is displayed, not what is returned

    return widgets.interactive(
        redraw,
        # each move replays the allocator: drawn when the slider is let go
        samples=widgets.IntSlider(8, min=1, max=64, description="batch", continuous_update=False),
        offload=widgets.Dropdown(options=["none", "optimizer"], description="offload"),
    )
