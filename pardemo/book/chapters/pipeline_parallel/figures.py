"""Pictures of *Pipeline parallelism*: a pipeline's computations over time, ideal or measured; idle time, and memory."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, bars, key, line_chart, numbers, patch, words
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
    handles = [patch(apart.get(kind, kind), kind) for kind in shown_kinds]
    if at_once_s is not None:
        handles.append(Line2D([], [], color=COLOURS["predicted"], linestyle=":", label="end without messages"))
    fig.legend(handles=handles, loc="outside upper right", ncols=3, columnspacing=1.2, handlelength=1.4)
    return save(fig, name, alt)


def held_by_schedule(
    measured: Mapping[str, list[float]], predicted: Mapping[str, Sequence[float]], name: str
) -> Picture:
    """Peak activations of each rank with each schedule, in micro-batches; outlines are the predictions.

    Args:
        measured, predicted: schedule -> a number for each rank. name: the picture's.
    """
    fig, ax = new(size=(WIDE, 1.2 + 0.6 * len(measured)))
    ranks = range(len(next(iter(measured.values()))))
    held, rule = (
        {rank: {key.replace(", ", ",\n"): by_schedule[key][rank] for key in measured} for rank in ranks}
        for by_schedule in (measured, predicted)
    )
    bars(ax, held, rule, across=True, fills=dict.fromkeys(ranks, "activations"), room=1.35)
    for index, (schedule, peaks) in enumerate(measured.items()):
        fullest = peaks.index(max(peaks))
        at, end = (
            index + (fullest - (len(ranks) - 1) / 2) * 0.84 / len(ranks),
            max(peaks[fullest], predicted[schedule][fullest]),
        )
        numbers(ax, [at], [end], [f"{peaks[fullest]:.1f}, rank {fullest}"], across=True)
    ax.set(xlabel="activations at the peak, in micro-batches")
    outline = ax.get_legend_handles_labels()[0][1]
    fig.legend(
        [patch("", "activations"), outline],
        ["measured, rank 0 on top", "predicted"],
        loc="outside lower center",
        ncols=2,
    )
    summary = words(measured, "{:.1f}")
    return save(fig, name, f"Peak activations of ranks 0, 1, … with each schedule, in micro-batches: {summary}.")


def idle_shares(lines: Mapping[int, Mapping[int, float]], point: tuple[int, float], label: str) -> Picture:
    """The idle share of the total time, in per cent, against m; a line for each p, and one measured point.

    Args:
        lines: p -> m -> the share. point: (m, its share). label: of the point.
    """
    shares = {f"p = {ranks}": curve for ranks, curve in lines.items()}
    return line_chart(
        "pipeline_parallel_idle",
        f"More micro-batches make the idle share smaller, and never nothing; {label}: {point[1]:.0%}.",
        {**shares, label: dict([point])}, per=0.01, size=(WIDE, 3.4), x="micro-batches m",
        y="idle share of the total time, %", log_x=list(next(iter(lines.values()))), legend="upper right",
        colours=[*["predicted"] * len(lines), "backward"], marks=[*[""] * len(lines), "o"], markersize=8,
    )  # fmt: skip


def lengths_of_stages(
    lengths: Mapping[str, Sequence[float]], cuts: Mapping[str, Sequence[int]], names: Sequence[str]
) -> Picture:
    """Plots how long each stage computes, in blocks, and waits for the slowest stage; a panel for each cut.

    Args:
        lengths: cut -> blocks of each stage. cuts: cut -> layers of each stage. names: of the layers, in order.
    """
    fig, axes = new(len(lengths), 1, size=(WIDE, 1.3 * len(lengths) + 0.8), sharex=True, squeeze=False)
    for ax, (cut, blocks) in zip(axes.flat, lengths.items(), strict=True):
        slowest = max(blocks)
        series = {"computes": blocks, "waits for the slowest": [slowest - length for length in blocks]}
        fills = dict(zip(series, ("compute", "wait"), strict=True))
        bars(ax, series, across=True, stacked=True, fills=fills, text=[f"{length:.1f}" for length in blocks], wide=0.74)
        layer_names = iter(names)
        inside = [Counter(islice(layer_names, count)) for count in cuts[cut]]
        labels = [", ".join(name if n == 1 else f"{n} {name}s" for name, n in counts.items()) for counts in inside]
        ax.set_yticks(range(len(blocks)), labels)
        ax.set_title(f"{cut}: all take {slowest:.1f}")
    axes[-1, 0].set(xlabel="for each micro-batch, in blocks", xlim=(0, 1.1 * max(map(max, lengths.values()))))
    key(fig, loc="outside upper right")
    alt = f"Blocks that stages 0, 1, … compute for each micro-batch: {words(lengths, '{:.1f}')}."
    return save(fig, "pipeline_parallel_stages", alt)


def memory_of_schedules(
    states: Mapping[str, float], activations: Mapping[str, float], idle: Mapping[str, float], room_bytes: float
) -> Picture:
    """Model states and the fullest rank's activations on a GPU with each schedule, and how long a rank is idle.

    Args:
        states: kind -> bytes. activations: schedule -> bytes of activations.
        idle: schedule -> the idle share of the total time.
        room_bytes: the GPU's memory.
    """
    series = {kind: dict.fromkeys(activations, nbytes) for kind, nbytes in states.items()}
    series["activations"] = activations
    states_bytes = sum(states.values())
    texts = [f"{(states_bytes + held) / 1e9:.1f} GB,\n{idle[name]:.1%} idle" for name, held in activations.items()]
    return bar_chart(
        "pipeline_parallel_on_a_gpu",
        f"GB on a GPU, with {states_bytes / 1e9:.0f} GB of model states: {{}}; activations and idle time: "
        + "; ".join(f"{name} {held / 1e9:.1f}, {idle[name]:.1%} idle" for name, held in activations.items()),
        {"GB on each GPU": {"series": series}}, per=1e9, across=True, stacked=True, text=texts, room=1.32,
        line=("room", room_bytes / 1e9), size=(WIDE, 1.8 + 0.55 * len(activations)), ncols=2,
        fills=dict(zip(series, (*zip(states, ("", "//", ".."), strict=True), "activations"), strict=True)),
    )  # fmt: skip
