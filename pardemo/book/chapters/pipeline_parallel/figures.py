"""Pictures of *Pipeline parallelism*: a pipeline's computations over time, ideal or measured; idle time, and memory."""

from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, HATCHES, Picture, new, save

#: Inches: on a phone 10 points are then 10 pixels, and nothing scrolls.
WIDE = 4.9


def pipeline(
    ax: Axes, spans: Sequence, title: str = "", stages_per_rank: int = 1, scale: float = 1.0, until: float | None = None
) -> None:
    """A row for each rank, a box with its micro-batch's number for each computation; grey is idle time, the bubble.

    A forward and a backward that run together lie one above the other, each in half of the row.

    Args:
        spans: of kind "forward", "backward", "weight gradients", named "stage.micro-batch"; others are left out.
        stages_per_rank: with more than one, a rank's later chunks are paler.
        scale: what to multiply times with (1e3: milliseconds).
        until: where the axis ends, for charts under one another.
    """
    spans = [span for span in spans if span.kind in ("forward", "backward", "weight gradients")]
    begin, end = min(s.begin_s for s in spans), max(s.end_s for s in spans)
    ranks, axis_end = sorted({s.rank for s in spans}), (end - begin) * scale if until is None else until
    for row in range(len(ranks)):
        ax.broken_barh([(0, (end - begin) * scale)], (row - 0.4, 0.8), facecolor=COLOURS["wait"], alpha=0.6, zorder=1)
    at_one_time = Counter((span.rank, span.begin_s, span.end_s) for span in spans)
    for span in spans:
        row, (stage, micro_batch) = ranks.index(span.rank), span.name.split(".")
        low, high = row - 0.4, 0.8
        if at_one_time[span.rank, span.begin_s, span.end_s] == 2:
            low, high = (low if span.kind == "forward" else row), high / 2
        left, width = (span.begin_s - begin) * scale, (span.end_s - span.begin_s) * scale
        colour = paler(COLOURS[span.kind], int(stage) // len(ranks) % stages_per_rank / 2)
        ax.broken_barh(
            [(left, width)], (low, high), facecolor=colour, hatch=HATCHES[span.kind], zorder=3,
            edgecolor=palette.PAPER, linewidth=0.5,
        )  # fmt: skip
        if width < 0.022 * len(micro_batch) * axis_end or high < 0.8:  # too narrow, or too low, for a number
            continue
        ax.text(
            left + width / 2, row, micro_batch, ha="center", va="center", fontsize=10, zorder=4, clip_on=True,
            color=palette.ink_on(colour),
        )  # fmt: skip
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.set_xlim(0, axis_end)
    ax.grid(visible=False)
    ax.set_title(title)


def paler(colour: str, by: float) -> str:
    """A colour mixed with the page's white: by 0 as it is, by 1 white."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * by):02X}" for part in parts)


def courses(
    rows: Mapping[str, tuple[Sequence, int]], name: str, alt: str, *, at_once_s: float | None = None
) -> Picture:
    """Pipelines over time, one below the other on one axis of milliseconds; a box too narrow for a number has none.

    Args:
        rows: title -> its spans, and how many stages a rank has. name: the picture's. alt: its alternative text.
        at_once_s: seconds until the end if messages took no time, for a line.
    """
    fig, axes = new(len(rows), 1, size=(WIDE, 1.5 * len(rows) + 0.9), sharex=True, squeeze=False)
    long = max(max(s.end_s for s in spans) - min(s.begin_s for s in spans) for spans, _ in rows.values())
    for ax, (title, (spans, chunks)) in zip(axes.flat, rows.items(), strict=True):
        pipeline(ax, spans, title, chunks, 1e3, 1.01e3 * long)
        if at_once_s is not None:
            ax.axvline(1e3 * at_once_s, color=COLOURS["predicted"], linestyle=":", zorder=3.5)  # under the numbers
    axes[-1, 0].set_xlabel("milliseconds; grey: idle")
    kinds = {span.kind for spans, _ in rows.values() for span in spans}
    shown_kinds = [kind for kind in ("forward", "backward", "weight gradients") if kind in kinds]
    apart = {"forward": "F", "backward": "I, or I + W", "weight gradients": "W"} if len(shown_kinds) == 3 else {}
    patches = [Patch(facecolor=COLOURS[kind], label=apart.get(kind, kind)) for kind in shown_kinds]
    if at_once_s is not None:
        patches.append(Line2D([], [], color=COLOURS["predicted"], linestyle=":", label="end without messages"))
    fig.legend(handles=patches, loc="outside upper right", ncols=3, columnspacing=1.2, handlelength=1.4)
    return save(fig, name, alt)


def held_by_schedule(measured: Mapping[str, list[float]], predicted: Mapping[str, Sequence[float]]) -> Picture:
    """Peak activations of each rank with each schedule, in micro-batches; outlines are the predictions.

    Args:
        measured, predicted: schedule -> a number for each rank.
    """
    fig, ax = new(size=(WIDE, 1.2 + 0.6 * len(measured)))
    ranks = len(next(iter(measured.values())))
    high = 0.84 / ranks
    for place, (name, values) in enumerate(measured.items()):
        at = [place + (rank - (ranks - 1) / 2) * high for rank in range(ranks)]
        ax.barh(at, values, 0.86 * high, color=COLOURS["activations"])
        ax.barh(at, predicted[name], 0.98 * high, fill=False, edgecolor="black", linewidth=1)
        fullest = values.index(max(values))
        ax.annotate(
            f"{values[fullest]:.1f}, rank {fullest}", (max(values[fullest], predicted[name][fullest]), at[fullest]),
            (5, 0), textcoords="offset points", va="center",
        )  # fmt: skip
    ax.set_yticks(range(len(measured)), [name.replace(", ", ",\n") for name in measured])
    most = 1.35 * max(max(*values, *predicted[name]) for name, values in measured.items())
    ax.set(xlabel="activations at the peak, in micro-batches", xlim=(0, most), ylim=(len(measured) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    measured_patch = Patch(color=COLOURS["activations"], label="measured, rank 0 on top")
    handles = [measured_patch, Patch(fill=False, edgecolor="black", label="predicted")]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{name} {', '.join(f'{value:.1f}' for value in peaks)}" for name, peaks in measured.items()
    )
    return save(
        fig,
        "pipeline_parallel_memory",
        f"Peak activations of ranks 0, 1, … with each schedule, in micro-batches: {values_text}.",
    )


def live_activations(curves: Mapping[str, Sequence[tuple[float, float]]], layers: int) -> Picture:
    """Activations alive after each of ``layers`` layers, forward and then backward, and the peak within each.

    Args:
        curves: label -> for each layer passed (alive after it, the peak since the layer before), in units of A.
    """
    fig, ax = new(size=(WIDE, 3.0))
    for (label, steps), style in zip(curves.items(), ("-", "--"), strict=True):
        times = [time for step in range(len(steps)) for time in (step + 0.5, step + 1)]
        heights = [height for live, peak in steps for height in (peak, live)]
        ax.plot(times, heights, style, color=COLOURS["activations"], label=label)
    middle, most = layers, max(peak for steps in curves.values() for _, peak in steps)
    ax.axvline(middle, color=COLOURS["predicted"], linewidth=1)
    ax.text(middle - 0.2, 0.4 * most, "forward", ha="right")
    ax.text(middle + 0.2, 0.4 * most, "backward")
    ax.set(
        xlabel="layers passed, there and back",
        ylabel="activations alive, in A",
        ylim=(0, 1.35 * most),
        xticks=range(0, 2 * layers + 1, 2),
    )
    ax.legend(loc="upper right")
    return save(
        fig, "pipeline_parallel_checkpointing", "Live activations of eight layers with and without checkpointing."
    )


def idle_shares(lines: Mapping[int, Mapping[int, float]], point: tuple[int, float], label: str) -> Picture:
    """The idle share of the total time, in per cent, against m; a line for each p, and one measured point.

    Args:
        lines: p -> m -> the share. point: (m, its share). label: of the point.
    """
    fig, ax = new(size=(WIDE, 3.4))
    for (ranks, shares), style in zip(lines.items(), ("-", "--", ":"), strict=False):
        ax.plot(
            list(shares), [100 * share for share in shares.values()], style, color=COLOURS["predicted"], linewidth=1.6,
            label=f"p = {ranks}",
        )  # fmt: skip
    at, share = point
    ax.plot([at], [100 * share], "o", color=COLOURS["backward"], markersize=8, label=label)
    ax.set(xscale="log", xlabel="micro-batches m", ylabel="idle share of the total time, %", ylim=(0, None))
    ticks = list(next(iter(lines.values())))
    ax.set_xticks(ticks, [str(m) for m in ticks])
    ax.minorticks_off()
    ax.legend(loc="upper right")
    return save(
        fig,
        "pipeline_parallel_idle",
        f"More micro-batches make the idle share smaller, and never nothing; {label}: {share:.0%}.",
    )
