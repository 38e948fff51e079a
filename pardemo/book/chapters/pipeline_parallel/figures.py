"""Pictures of *Pipeline parallelism*: a pipeline's computations over time, ideal or measured; idle time, and memory."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

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


def lengths_of_stages(
    lengths: Mapping[str, Sequence[float]], cuts: Mapping[str, Sequence[int]], names: Sequence[str]
) -> Picture:
    """How long each stage computes, in blocks, and how long it waits for the slowest stage; a panel for each cut.

    Args:
        lengths: cut -> blocks of each stage. cuts: cut -> layers of each stage. names: of the layers, in order.
    """
    fig, axes = new(len(lengths), 1, size=(WIDE, 1.3 * len(lengths) + 0.8), sharex=True, squeeze=False)
    longest = max(map(max, lengths.values()))
    for ax, (cut, blocks) in zip(axes.flat, lengths.items(), strict=True):
        slowest, places = max(blocks), range(len(blocks))
        waits = [slowest - length for length in blocks]
        ax.barh(places, blocks, 0.74, color=COLOURS["compute"], zorder=2)
        ax.barh(places, waits, 0.74, left=blocks, color=COLOURS["wait"], hatch="...", edgecolor="white", zorder=2)
        for place, length in enumerate(blocks):
            ax.annotate(f"{length:.1f}", (slowest, place), (5, 0), textcoords="offset points", va="center")
        layer_names = iter(names)
        inside = [Counter(islice(layer_names, count)) for count in cuts[cut]]
        labels = [", ".join(name if n == 1 else f"{n} {name}s" for name, n in counts.items()) for counts in inside]
        ax.set_yticks(places, labels)
        ax.set(title=f"{cut}: all take {slowest:.1f}", xlim=(0, 1.1 * longest), ylim=(len(blocks) - 0.5, -0.5))
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set_xlabel("for each micro-batch, in blocks")
    handles = [
        Patch(facecolor=COLOURS["compute"], label="computes"),
        Patch(facecolor=COLOURS["wait"], hatch="...", edgecolor="white", label="waits for the slowest"),
    ]
    fig.legend(handles=handles, loc="outside upper right", ncols=2)
    values_text = "; ".join(
        f"{cut} {', '.join(f'{length:.1f}' for length in stage_blocks)}" for cut, stage_blocks in lengths.items()
    )
    return save(
        fig, "pipeline_parallel_stages", f"Blocks that stages 0, 1, … compute for each micro-batch: {values_text}."
    )


def memory_of_schedules(
    states: Mapping[str, float], activations: Mapping[str, float], idle: Mapping[str, float], room_bytes: float
) -> Picture:
    """Model states and the fullest rank's activations on a GPU with each schedule, and how long a rank is idle.

    Args:
        states: kind -> bytes. activations: schedule -> bytes of activations.
        idle: schedule -> the idle share of the total time.
        room_bytes: the GPU's memory.
    """
    fig, ax = new(size=(WIDE, 1.6 + 0.55 * len(activations)))
    places, hatches, left = range(len(activations)), dict(zip(states, ("", "//", ".."), strict=True)), 0.0
    for kind, nbytes in states.items():
        style = {"color": COLOURS[kind], "hatch": hatches[kind], "edgecolor": "white"}
        ax.barh(places, [nbytes / 1e9] * len(activations), 0.6, left=left, label=kind, zorder=2, **style)
        left += nbytes / 1e9
    held = [nbytes / 1e9 for nbytes in activations.values()]
    ax.barh(places, held, 0.6, left=left, color=COLOURS["activations"], label="activations", zorder=2)
    most = left + max(held)
    for place, (schedule, gb) in enumerate(zip(activations, held, strict=True)):
        end, room = left + gb, room_bytes / 1e9  # a label stands behind the line, which would cross it
        label = f"{end:.1f} GB,\n{idle[schedule]:.1%} idle"
        inside = end > room + 0.3 * most
        at = room if inside or end < room else end
        style = {"color": palette.ink_on(COLOURS["activations"])} if inside else {}
        ax.annotate(label, (at, place), (6, 0), textcoords="offset points", va="center", zorder=4, **style)
    ax.axvline(room_bytes / 1e9, color=palette.VERDICTS["fails"], linewidth=2, zorder=3)
    ax.set_yticks(places, [schedule.replace(", ", ",\n") for schedule in activations])
    ax.set(xlabel="GB on each GPU", xlim=(0, 1.03 * most), ylim=(len(activations) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    line = Line2D([], [], color=palette.VERDICTS["fails"], linewidth=2, label="room")
    handles = [*ax.get_legend_handles_labels()[0], line]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    values_text = "; ".join(
        f"{schedule} {gb:.1f}, {idle[schedule]:.1%} idle" for schedule, gb in zip(activations, held, strict=True)
    )
    return save(
        fig,
        "pipeline_parallel_on_a_gpu",
        f"GB of activations beside {left:.0f} GB of model states on a GPU: {values_text}.",
    )


Idle = Mapping[str, Mapping[int, float]]  # name -> p -> idle time
_MARKS, _DASHES = "os", ("-", "--")


def two_bubbles(panels: Mapping[str, tuple[Idle, Idle]]) -> Picture:
    """The last rank's idle time against p: points are timetables, lines formulas; a panel for each kind of times.

    Args:
        panels: title -> (timetable -> p -> idle time, formula -> p -> idle time), in forward passes of a chunk; two of
            each, in one order: a formula's line and the points of the timetable that it is for.
    """
    fig, axes = new(len(panels), 1, size=(WIDE, 2.5 * len(panels) + 1.0), sharex=True, squeeze=False)
    said = []
    for ax, (title, (timetables, formulas)) in zip(axes.flat, panels.items(), strict=True):
        for (name, idle), dash in zip(formulas.items(), _DASHES, strict=True):
            ax.plot(list(idle), list(idle.values()), dash, color=COLOURS["predicted"], linewidth=1.6, label=name)
        for (name, idle), mark, fill in zip(timetables.items(), _MARKS, (COLOURS["backward"], "none"), strict=True):
            style = {"markerfacecolor": fill, "markeredgecolor": COLOURS["backward"], "markersize": 8}
            ax.plot(list(idle), list(idle.values()), mark, linestyle="none", label=name, **style)
        ax.set(title=title, ylabel="idle time, in F", ylim=(0, None))
        ranks = max(next(iter(timetables.values())))
        rows = [*timetables.items(), *formulas.items()]
        said.append(f"{title}: with p = {ranks} " + ", ".join(f"{name} {idle[ranks]:.1f}" for name, idle in rows))
    axes[-1, 0].set_xlabel("ranks p")
    axes[-1, 0].set_xticks(list(next(iter(timetables.values()))))
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=1)
    return save(fig, "pipeline_parallel_two_bubbles", f"Idle time of the last rank of DualPipeV. {'; '.join(said)}.")
