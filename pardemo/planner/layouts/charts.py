"""Draws charts of predicted steps: compared with thousands of published runs, and part by part."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pardemo import extras
from pardemo.draw import palette
from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.charts import bar_chart
from pardemo.draw.parts import legend
from pardemo.draw.player import Player
from pardemo.draw.style import COLOURS, Picture, new
from pardemo.planner import hardware
from pardemo.planner.layouts.configurations import find_configuration, shape_of_config
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout, check_layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.programs import MEGATRON
from pardemo.planner.layouts.search import PlannedLayout
from pardemo.project import is_headless

with extras.needed_by(__name__):
    from matplotlib.figure import Figure


BAND = 0.15  # the band around equal
FEW = 60  # points of a source that are drawn large
MARKERS = "o^sDvPX"
#: Colours of the sources: there are more sources than light colours of ranks that can be seen as a point.
POINTS = (*palette.WAYS.values(), palette.COMPUTED, palette.DONE["communication"], palette.KEPT["activations"])


def predicted_and_known(outcomes: Sequence[Any]) -> Figure:
    """Seconds of a step, predicted over known, one point for each run; the band is ± 15 %.

    ``outcomes``: of :func:`pardemo.planner.layouts.published.against.compare`; those without a time, and those that
    contradict themselves, are left out.
    """
    groups = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is not None and not outcome.run.wrong:
            groups[outcome.run.publisher].append(outcome)
    fig, ax = new(size=(6.2, 5.0))
    shown = [outcome for group in groups.values() for outcome in group]
    low = 0.7 * min(min(outcome.run.seconds, outcome.step.seconds) for outcome in shown)
    high = 1.4 * max(max(outcome.run.seconds, outcome.step.seconds) for outcome in shown)
    ends = [low, high]
    ax.fill_between(ends, [(1 - BAND) * x for x in ends], [(1 + BAND) * x for x in ends], color=palette.GRID, zorder=0)
    ax.plot(ends, ends, color=palette.PREDICTED, linewidth=1, zorder=1)
    # the largest first, and small ones as large points with an edge, or those of many would hide them
    for index, (source, group) in enumerate(sorted(groups.items(), key=lambda item: -len(item[1]))):
        colour, marker = POINTS[index % len(POINTS)], MARKERS[index % len(MARKERS)]
        published, predicted = [outcome.run.seconds for outcome in group], [outcome.step.seconds for outcome in group]
        few = len(group) < FEW
        ax.scatter(
            published, predicted, s=40 if few else 12, marker=marker, color=colour, alpha=0.95 if few else 0.6,
            edgecolors="white" if few else "none", linewidths=0.6 if few else 0, label=source, zorder=2 + few,
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ax.set(xlabel="known seconds a step", ylabel="predicted seconds a step")
    legend = ax.legend(loc="upper left")
    for handle in legend.legend_handles:
        handle.set_sizes([40])
    return fig


_COMPUTE, _SENT, _WAIT = COLOURS["compute"], COLOURS["communication"], COLOURS["wait"]


#: The planner's parts of a step: blue computes, orange talks, grey waits.
PARTS = {
    "matrix multiplications": (_COMPUTE, ""),
    "attention": (_COMPUTE, "///"),
    "memory bandwidth": (_COMPUTE, "..."),
    "launching kernels": (_WAIT, "///"),
    "pipeline bubble": (_WAIT, ""),
    "tensor-parallel traffic": (_SENT, ""),
    "context-parallel traffic": (_SENT, "---"),
    "expert-parallel traffic": (_SENT, "+++"),
    "pipeline messages": (_SENT, "///"),
    "data-parallel traffic": (_SENT, "xxx"),
    "optimizer": (COLOURS["optimizer states"], ""),
}


#: The planner's lines of a GPU's memory.
LINES = {
    "frozen parameters": palette.SHADES["frozen parameters"],
    **palette.KEPT,
    **palette.SHADES,
    "program": palette.OTHER,
}


def seconds_of_layouts(
    steps: Mapping[str, Mapping[str, float]],
    published: Mapping[str, float] | None = None,
    name: str = "which_layout_layouts",
) -> Picture:
    """Draws each layout's step part by part, in seconds; a diamond is the ``published`` time."""
    published = published or {}
    description = "; ".join(
        f"{case} {sum(parts.values()):.2f} s, mostly {max(parts, key=parts.__getitem__)}"
        + (f", published {published[case]:.2f} s" if case in published else "")
        for case, parts in steps.items()
    )
    series = {part: {case: parts.get(part, 0.0) for case, parts in steps.items()} for part in PARTS}
    return bar_chart(
        name,
        f"Predicted seconds of a step: {description}.",
        {"seconds a step; bars and numbers are predicted": {"series": series}},
        size=(6.4, 0.55 * len(steps) + 2.3),
        across=True,
        stacked=True,
        fills=PARTS,
        text="{:.3g} s",
        points=("published", published) if published else None,
    )


TOKENS = 2**22  # of a step: 4M, whatever is moved
#: What a page without sliders shows: what is moved from the start, and to where.
TRIED: dict[str, dict[str, int]] = {
    "half of TP": {"tp": 4},
    "TP over two nodes": {"tp": 16},
    "no pipeline": {"pp": 1},
    "slow links": {"link": 200},
    "slow links, no pipeline": {"link": 200, "pp": 1},
    "slow links, a longer pipeline": {"link": 200, "tp": 4, "pp": 8},
}


def planned_layout(model: str, gpus: int, link: int, sequence: int, tp: int, pp: int) -> PlannedLayout:
    """The sliders' job and layout: micro-batches of 1, ZeRO-1 in a pipeline, else ZeRO-3, recomputed if it must be.

    Raises:
        ValueError: it cannot be run, and why.
    """
    shape = shape_of_config(find_configuration(model))
    job = Job(shape, Machine(hardware.gpu("H100"), gpus, 8, link * 1e9 / 8), MEGATRON, sequence)
    if gpus % (tp * pp):
        raise ValueError(f"TP {tp} × PP {pp} does not divide {gpus} GPUs")
    dp, samples = gpus // (tp * pp), TOKENS // sequence
    if samples % dp:
        raise ValueError(f"{samples} samples a step are too few for DP {dp}: share layers or stages, or more tokens")
    sharding = "zero3" if pp == 1 else "zero1"
    layout = Layout(
        tp=tp, pp=pp, dp=dp, accumulation=samples // dp, sequence_parallel=tp > 1,
        sharding=sharding if dp > 1 else "none",
    )  # fmt: skip
    check_layout(layout, shape, gpus, sequence)
    if not PlannedLayout(job, layout).has_room:
        layout = layout.but(recompute="full")
    return PlannedLayout(job, layout)


#: The sliders: what each says, and its positions.
SLIDERS = {
    "gpus": ("GPUs", tuple(2**k for k in range(3, 15))),
    "link": ("Gbit/s", (25, 100, 200, 400, 800, 1600, 3200, 6400)),  # of a host's adapters
    "sequence": ("sequence", tuple(2**k for k in range(11, 18))),
    "tp": ("TP", (1, 2, 4, 8, 16, 32)),
    "pp": ("PP", (1, 2, 4, 8, 16, 32)),
}


def layout_explorer(
    model: str = "llama3-70b", gpus: int = 256, link: int = 3200, sequence: int = 8192, tp: int = 8, pp: int = 4
) -> Any:  # fmt: skip
    """Sliders and bars that follow them, drawn to a scale of 0.5, 5, 50, … s; where nobody moves them, a player."""
    start = {"gpus": gpus, "link": link, "sequence": sequence, "tp": tp, "pp": pp}
    if is_headless():
        frames = []
        for change, moved in {"the start": dict[str, int](), **TRIED}.items():
            at = start | moved
            title = f"{change}: TP {at['tp']}, PP {at['pp']}, {at['link']:,} Gbit/s"
            frames.append(_frame(title, planned_layout(model, **at)))
        return Player(frames, "where a step's time and a GPU's memory go, as the sliders move")
    import ipywidgets as widgets
    from IPython.display import display

    def redraw(**chosen: int) -> None:
        try:
            planned = planned_layout(model, **chosen)
        except ValueError as error:
            print(f"No such layout: {error}.")
            return
        step, scale = planned.step, 5 * 10 ** math.ceil(math.log10(planned.seconds / 5))
        # interactive shows what is displayed and printed, not what is returned
        display(Drawing(*_frame(str(planned.layout), planned, scale)))
        print(f"{step.tokens_per_s:,.0f} tokens/s a GPU, MFU {step.mfu:.0%}")

    sliders = {
        name: widgets.SelectionSlider(options=options, value=start[name], description=title, continuous_update=False)
        for name, (title, options) in SLIDERS.items()
    }
    return widgets.interactive(redraw, **sliders)


#: What a rank does in a step, and the planner's parts that are it.
DOES = {
    "computes": (
        palette.COMPUTED,
        ("layers as measured", "matrix multiplications", "attention", "memory bandwidth", "optimizer"),
    ),
    "talks in each layer": (
        palette.DONE["communication"],
        ("tensor-parallel traffic", "context-parallel traffic", "expert-parallel traffic"),
    ),
    "gradients, gathers, messages": (palette.RECEIVED, ("data-parallel traffic", "pipeline messages")),
    "waits": (palette.DONE["idle"], ("pipeline bubble", "launching kernels")),
}
_SHOWN = {**palette.KEPT, "logits": palette.SHADES["logits"]}
_LEFT, _WIDE, _MOST_GB = 92, 440, 100


def _frame(title: str, planned: PlannedLayout, most_s: float = 50) -> tuple[Canvas, str]:
    canvas = Canvas(640, 262)
    predicted, footprint = planned.step, planned.memory
    canvas.text(8, 18, title, "start", size=20, bold=True)
    spent = {name: sum(predicted.parts.get(part, 0.0) for part in parts) for name, (_, parts) in DOES.items()}
    gigabytes = {line: value / 1e9 for line, value in footprint.lines.items() if line in _SHOWN}
    colours = {name: colour for name, (colour, _) in DOES.items()}
    _bar(canvas, 44, "time", spent, colours, most_s, f"{predicted.seconds:.3g} s")
    _bar(canvas, 156, "memory", gigabytes, _SHOWN, _MOST_GB, f"{footprint.peak_bytes / 1e9:.0f} GB")
    room = _LEFT + _WIDE * planned.job.machine.gpu.memory_bytes / 1e9 / _MOST_GB
    canvas.line([(room, 146), (room, 204)], palette.VERDICTS["fails"], 3)
    times, lines = list(colours.items()), list(_SHOWN.items())
    keys = {
        104: times[:2],
        130: times[2:],
        222: lines[:3],
        248: [*lines[3:], ("the GPU has", palette.VERDICTS["fails"])],
    }
    for y, key in keys.items():
        legend(canvas, 8, y, dict(key), gap=18)
    seconds = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items() if seconds >= 0.05)
    text = (
        f"{title}: {planned.layout}. {predicted.seconds:.1f} s a step ({seconds}); {footprint.peak_bytes / 1e9:.0f} GB."
    )
    return canvas, text


def _bar(
    canvas: Canvas, y: float, name: str, values: Mapping[str, Any], colours: Mapping[str, str], most: float, label: str
) -> None:  # fmt: skip
    canvas.text(_LEFT - 10, y + 18, name, "end")
    x, end = _LEFT, _LEFT + _WIDE
    for kind, value in values.items():
        wide = min(value * _WIDE / most, end - x)
        if wide > 0:
            canvas.box(x, y, wide, 36, colours[kind], thick=1)
        x += wide
    canvas.text(x + 8, y + 18, label + (" →" if sum(values.values()) > most else ""), "start", bold=True)
