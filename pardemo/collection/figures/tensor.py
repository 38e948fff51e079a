"""Pictures of chapter 03: what GeLUs add up to, what each order sends, what hides behind what."""

from collections.abc import Mapping, Sequence

import torch
from matplotlib.patches import Patch

from pardemo.collection.figures.charts import bars, gantt, kind_legend
from pardemo.collection.figures.style import COLOURS, Picture, new, save
from pardemo.meters.timeline import Span


def sum_of_gelus(expected: torch.Tensor, found: torch.Tensor, title: str) -> Picture:
    """Each number of the sum of the ranks' GeLUs over the GeLU of the sum; what is right lies on the line."""
    fig, ax = new(size=(5.2, 3.8))
    ax.scatter(expected, found, s=6, color=COLOURS["activations"], label="sum of the ranks' GeLUs")
    ends = [float(expected.min()), float(expected.max())]
    ax.plot(ends, ends, color=COLOURS["predicted"], label="right")
    ax.set(title=title, xlabel="GeLU of the sum", ylabel="sum of the GeLUs")
    ax.legend(loc="upper left")
    return save(fig, "03_sum_of_gelus", "The sums of GeLUs lie beside the line of the GeLU of the sum.")


def sent_by_order(found: Mapping[str, float], predicted: Sequence[float], ranks: int) -> Picture:
    """What a rank sent, in φ, for each order of cuts; outlines are the predictions."""
    fig, ax = new(size=(7.5, 3.4))
    bars(ax, list(found), {"communication": list(found.values())}, {"communication": list(predicted)})
    for place, value in enumerate(found.values()):
        ax.annotate(f"{value:.1f} φ", (place, value), (0, 3), textcoords="offset points", ha="center")
    ax.set(ylabel=f"sent by a rank, φ (N = {ranks})", ylim=(0, 1.15 * max(predicted)))
    ax.legend(handles=[Patch(fill=False, edgecolor="black", label="predicted")], loc="upper right")
    told = ", ".join(f"{label.replace(chr(10), ' ')} {value:.1f} φ" for label, value in found.items())
    return save(fig, "03_bytes", f"Bytes that a rank sends: {told}; outlines are predicted.")


def two_backward_passes(without: Sequence[Span], overlapping: Sequence[Span]) -> Picture:
    """The backward pass of a layer cut by columns, with the exchange after and beside the second product."""
    fig, axes = new(1, 2, size=(10, 2.6), sharex=True)
    for ax, spans, words in zip(axes, (without, overlapping), ("one after the other", "overlapping"), strict=True):
        length = max(s.end_s for s in spans) - min(s.begin_s for s in spans)
        gantt(ax, list(spans), title=f"{words}: {1e3 * length:.0f} ms")
        ax.set_xlabel("milliseconds")
    kind_legend(fig, ["compute", "communication"], loc="outside upper right", ncols=2)
    return save(fig, "03_overlap", "With overlap the all-reduce travels while the second product is computed.")
