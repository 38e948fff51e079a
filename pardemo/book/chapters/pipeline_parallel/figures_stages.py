"""Pictures of *Pipeline parallelism*: how long the stages of a cut take, and how a schedule fills a GPU's memory."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pardemo.book.chapters.pipeline_parallel.figures import WIDE
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save


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
