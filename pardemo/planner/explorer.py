"""The plan's pictures: memory line by line against the GPU's capacity, and sliders over it."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from pardemo.collection.drawings import key
from pardemo.collection.figures.explore import is_headless
from pardemo.collection.figures.style import new
from pardemo.planner.footprint import LINES
from pardemo.planner.memory import Curve
from pardemo.tables import show

#: The kinds that every chapter has, and shades of them for what frameworks and models add.
SHADES = {**key.KEPT, **key.SHADES}


def memory_chart(bars: Mapping[str, Mapping[str, float]], capacity_bytes: float, title: str = "") -> Figure:
    """Stacked bars of GB, one for each entry of ``bars`` (lines in bytes), and the GPU's capacity as a line."""
    import matplotlib.pyplot as plt

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
    plt.close(fig)
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

    def draw(samples: int, offload: str):
        found = curve.estimate(samples, offload=offload)
        return memory_chart({f"micro-batch {samples}": found.lines}, capacity_bytes, f"offload: {offload}")

    return widgets.interactive(
        draw,
        samples=widgets.IntSlider(8, min=1, max=64, description="batch"),
        offload=widgets.Dropdown(options=["none", "optimizer"], description="offload"),
    )
