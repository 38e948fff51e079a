"""Pictures of *Megatron's MLP*: sums of GeLUs, a missing f, bytes by order of cuts, overlap, waiting, libraries."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pardemo import tables
from pardemo.draw.charts import bar_chart, by_kind, key, lanes, words
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.meters.timeline import Span

SAME = 1e-5  # a relative error below it is rounding: fp32 adds hundreds of numbers in another order
PLATE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "boxstyle": "round,pad=0.15"}


def sum_of_gelus(expected: torch.Tensor, sums: torch.Tensor, title: str) -> Picture:
    """Each number of the sum of the ranks' GeLUs against the GeLU of the sum; right numbers lie on the line."""
    fig, ax = new(size=(5.8, 4.0))
    ax.scatter(expected, sums, s=6, alpha=0.35, color=COLOURS["activations"], label="sum of the ranks' GeLUs")
    ends = [float(expected.min()), float(expected.max())]
    ax.plot(ends, ends, color=COLOURS["predicted"], label="right", zorder=3)  # over the points, which are many
    ax.set(title=title, xlabel="GeLU of the sum", ylabel="sum of the GeLUs")
    ax.legend(loc="upper left")
    return save(fig, "megatron_mlp_sum_of_gelus", "The sums of GeLUs lie beside the line of the GeLU of the sum.")


def without_f(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], title: str) -> Picture:
    """Numbers of a rank whose MLP has no f against those of the plain MLP; right numbers lie on the line.

    Args:
        pairs: name -> (the plain MLP's numbers, this rank's); first of the output, then of the input's gradient.
    """
    fig, axes = new(1, 2, size=(6.0, 3.4))
    for ax, (name, (expected, numbers)), kind in zip(axes, pairs.items(), ("activations", "gradients"), strict=True):
        ax.scatter(expected, numbers, s=14, alpha=0.35, color=COLOURS[kind])  # wider than the line over them
        end = 1.05 * float(expected.abs().max())
        ax.plot([-end, end], [-end, end], color=COLOURS["predicted"], linewidth=1, label="right", zorder=3)
        ax.set(title=name, xlabel="of the plain MLP", xlim=(-end, end), ylim=(-end, end), aspect="equal")
    axes[0].set_ylabel(title)
    axes[0].legend(loc="upper left")
    return save(
        fig,
        "megatron_mlp_without_f",
        "Without f every number of Z lies on the line of the right ones; those of X's gradient are a cloud beside it.",
    )


def sent_by_order(measured: Mapping[str, float], predicted: Sequence[float], ranks: int) -> Picture:
    """Plots how much a rank sent, in φ, for each order of cuts; outlines are the predictions."""
    return bar_chart(
        "megatron_mlp_bytes", "Bytes that a rank sends: {}; outlines are predicted.",
        {f"sent by a rank, φ (t = {ranks})": {
            "series": {"measured": measured}, "outline": dict(zip(measured, predicted, strict=True))}},
        fills={"measured": "communication"}, text="{:.1f} φ", size=(6.4, 3.8),
    )  # fmt: skip


def two_backward_passes(without: Sequence[Span], overlapping: Sequence[Span]) -> Picture:
    """A rank's backward pass of a layer cut by columns: the all-reduce before, and during, the second matrix
    multiplication."""
    fig, axes = new(2, 1, size=(6.4, 3.8), sharex=True)
    lengths = []
    rows = {"GEMMs": ["compute"], "all-reduce": ["communication"]}
    for ax, spans, way in zip(axes, (without, overlapping), ("one after the other", "overlapping"), strict=True):
        begin = min(s.begin_s for s in spans)
        lengths.append(1e3 * (max(s.end_s for s in spans) - begin))
        lanes(ax, by_kind(spans, rows, begin))
        for span in spans:
            middle = 1e3 * ((span.begin_s + span.end_s) / 2 - begin)
            row = int(span.kind == "communication")
            ax.text(middle, row, span.name, ha="center", va="center", color="black", bbox=PLATE)
        ax.set_title(f"{way}: {lengths[-1]:.0f} ms")
        ax.axvline(lengths[0], color="black", linestyle=":")
    if lengths[1] < lengths[0]:
        axes[1].axvspan(lengths[1], lengths[0], color=COLOURS["idle"], alpha=0.4, linewidth=0)
        axes[1].text(sum(lengths) / 2, 0.5, "saved", rotation=90, ha="center", va="center")
    axes[1].set_xlabel("milliseconds")
    key(fig, loc="outside upper right")
    return save(
        fig,
        "megatron_mlp_overlap",
        f"With overlap a pass takes {lengths[1]:.0f} ms instead of {lengths[0]:.0f}: the all-reduce "
        "travels while W₁'s gradient is computed.",
    )


def computing_and_waiting(rows: Mapping[str, tuple[float, float]]) -> Picture:
    """Milliseconds of an MLP on several groups of ranks: how long they compute, and how long they wait for all-reduces.

    Args:
        rows: the ranks and their links -> (seconds of computing, seconds of waiting).
    """
    series = {
        kind: {name: parts[at] for name, parts in rows.items()} for at, kind in enumerate(("computing", "waiting"))
    }
    return bar_chart(
        "megatron_mlp_waiting",
        f"Milliseconds of an MLP, computed: {words(series, '{:.2f}', per=1e-3)} for all-reduces.",
        {"milliseconds, forward and backward": {"series": series}}, across=True, stacked=True, per=1e-3, room=1.42,
        text=[f"{1e3 * (busy + wait):.1f} ms, {wait / (busy + wait):.0%} waiting" for busy, wait in rows.values()],
        fills={"computing": "compute", "waiting": "wait"},
    )  # fmt: skip


def libraries(
    errors: Mapping[tuple[str, int], float],
    sent: Mapping[tuple[str, int], float],
    calls: Mapping[tuple[str, int, str], int],
    shares: Mapping[tuple[str, int], float],
    ranks: int,
) -> Any:
    """Makes a table of libraries: whether the result is the plain MLP's, what a rank sends, and how much it computes.

    Args:
        errors, sent, shares: (library, t) -> relative error, φ, share of the operations.
        calls: (library, t, way) -> all-reduces. ranks: the t to show.
    """
    return tables.show(
        [
            {
                "library": name,
                "same result?": f"{'yes' if error < SAME else 'no'}, to {error:.0e}",
                "sent by a rank": f"{sent[name, t]:.2f} φ",
                "all-reduces": ", ".join(
                    f"{n} {way}" for (library, size, way), n in calls.items() if (library, size) == (name, t)
                ),
                "arithmetic": f"{shares[name, t]:.0%}" if name != "DTensor" else "not counted",
            }
            for (name, t), error in errors.items()
            if t == ranks
        ]
    )
