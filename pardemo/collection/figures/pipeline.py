"""A pipeline's course, ideal or measured: who computes which micro-batch when, and the bubble in between."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from pardemo.collection.drawings import key
from pardemo.collection.figures.style import COLOURS, HATCHES


def pipeline(
    ax: Axes, spans: Sequence, title: str = "", stages_per_rank: int = 1, scale: float = 1.0, until: float | None = None
) -> None:
    """Each rank a row, each computation a box with its micro-batch's number; grey is idle, the bubble.

    Args:
        spans: of kind "forward" and "backward", named "stage.micro-batch"; others are left out.
        stages_per_rank: with more than one, every second chunk has a border of its own.
        scale: what to multiply times with (1e3: milliseconds).
        until: where the axis ends, for charts under one another.
    """
    spans = [span for span in spans if span.kind in ("forward", "backward")]
    begin, end = min(s.begin_s for s in spans), max(s.end_s for s in spans)
    ranks, axis_end = sorted({s.rank for s in spans}), (end - begin) * scale if until is None else until
    for row in range(len(ranks)):
        ax.broken_barh([(0, (end - begin) * scale)], (row - 0.4, 0.8), facecolor=COLOURS["wait"], alpha=0.6, zorder=1)
    for span in spans:
        row, (stage, micro_batch) = ranks.index(span.rank), span.name.split(".")
        left, width = (span.begin_s - begin) * scale, (span.end_s - span.begin_s) * scale
        second = int(stage) // len(ranks) % 2 == 1 and stages_per_rank > 1
        ax.broken_barh(
            [(left, width)], (row - 0.4, 0.8), facecolor=COLOURS[span.kind], hatch=HATCHES[span.kind], zorder=2,
            edgecolor="black" if second else "white", linewidth=1.0 if second else 0.5,
        )  # fmt: skip
        if width < 0.008 * axis_end:  # too narrow for a number
            continue
        ax.text(
            left + width / 2, row, micro_batch, ha="center", va="center", fontsize=7, zorder=3, clip_on=True,
            color=key.ink_on(COLOURS[span.kind]),
        )  # fmt: skip
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.set_xlim(0, axis_end)
    ax.grid(visible=False)
    ax.set_title(title)
