"""Pictures of *Which layout?*: where a step's time goes, what predictions miss, where one way to cut is the better."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.planner.layouts.charts import LINES, stacked
from pardemo.planner.layouts.choice.procedure_check import Compared

_COMPUTE, _SENT = COLOURS["compute"], COLOURS["communication"]
_MARKS = tuple(zip(palette.WAYS.values(), "osD^", strict=True))


def memory_of_layouts(
    layouts: Mapping[str, Mapping[str, float]], capacity_bytes: float, name: str = "which_layout_memory"
) -> Picture:
    """GB of the fullest GPU, line by line, against what it has."""
    fig, ax = new(size=(6.4, 0.55 * len(layouts) + 1.9))
    bars = {case: {line: value / 1e9 for line, value in lines.items()} for case, lines in layouts.items()}
    ends = stacked(ax, bars, {line: (colour, "") for line, colour in LINES.items()})
    for place, end in enumerate(ends):
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the line may run below the number
        style = {"textcoords": "offset points", "va": "center", "bbox": behind}
        over = end > capacity_bytes / 1e9
        weight = "bold" if over else "normal"
        ax.annotate(f"{end:.0f} GB{' ✗' if over else ''}", (end, place), (7, 0), weight=weight, **style)
    ax.axvline(capacity_bytes / 1e9, color=palette.VERDICTS["fails"], linewidth=2, label="the GPU has")
    ax.set(xlabel="GB of the fullest GPU", xlim=(0, 1.2 * max(*ends, capacity_bytes / 1e9)))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    values_text = "; ".join(f"{case} {end:.0f} GB" for case, end in zip(layouts, ends, strict=True))
    return save(fig, name, f"Of {capacity_bytes / 1e9:.0f} GB: {values_text}.".replace("\n", " "))


def errors_by(groups: Mapping[str, Mapping[Any, Mapping[str, Any]]], least: int = 5) -> Picture:
    """The mean error of a step's time for each TP, PP, …, in per cent, with how many runs it is of."""
    rows = [
        (f"{dimension} {value}", 100 * error["mean"], error["runs"])
        for dimension, of in groups.items() for value, error in of.items() if error["runs"] >= least
    ]  # fmt: skip
    fig, ax = new(size=(6.4, 0.27 * len(rows) + 0.9))
    places = np.arange(len(rows))
    ax.barh(places, [mean for _, mean, _ in rows], 0.66, color=_COMPUTE)
    for place, (_, mean, runs) in enumerate(rows):
        ax.annotate(f"{mean:.0f} %, {runs} runs", (mean, place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, [label for label, _, _ in rows])
    ax.set(xlabel="mean error of a step's time, per cent; groups of 5 runs and more", ylim=(len(rows) - 0.4, -0.6))
    ax.set_xlim(0, 1.3 * max(mean for _, mean, _ in rows))
    ax.grid(axis="y", visible=False)
    values_text = ", ".join(f"{label}: {mean:.0f}" for label, mean, _ in rows)
    return save(fig, "which_layout_errors", f"Mean error of a step's time, per cent: {values_text}.")


def waits_of_messages(extra: Mapping[int, Sequence[float]], lines: Mapping[int, float]) -> Picture:
    """Seconds of a micro-batch that the prediction misses, one point for each published pipeline, by its stages.

    Args:
        extra: stages -> known less predicted seconds, by micro-batches.
        lines: stages -> what a wait for each message would make.
    """
    fig, ax = new(size=(6.4, 4.0))
    generator = np.random.default_rng(0)
    for place, (pp, values) in enumerate(extra.items()):
        at = place + generator.uniform(-0.28, 0.28, len(values))
        run_label = "published run" if place == 0 else None
        ax.scatter(at, values, s=22, color=_SENT, linewidths=0, alpha=0.7, label=run_label)
        for level in (0.0, lines[pp]):
            label = "lines: no wait, or one for each message" if place == 0 and level == 0 else None
            ax.hlines(level, place - 0.42, place + 0.42, color=palette.PREDICTED, linewidth=1.6, label=label, zorder=3)
    ax.set_xticks(range(len(extra)), list(extra))
    most = max(max(values) for values in extra.values())
    ax.set(xlabel="stages of the pipeline", ylabel="seconds missed, by micro-batches", ylim=(-0.25, 1.05 * most))
    ax.grid(axis="x", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(f"{pp} stages: 0 or about {level:.2f}" for pp, level in lines.items())
    return save(
        fig, "which_layout_messages", f"Seconds a micro-batch that are not predicted, in two groups: {values_text}."
    )


def tokens_by_tp(
    lines: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]], host: int = 8
) -> Picture:
    """Tokens/s of a GPU against the ranks that share a layer: lines predicted, points published; a node ends at the
    dotted line."""
    fig, ax = new(size=(6.4, 4.0))
    sizes = sorted({tp for line in lines.values() for tp in line})
    for (name, line), (colour, marker) in zip(lines.items(), _MARKS, strict=False):
        dashed = "-" if name in points else "--"
        ax.plot([sizes.index(tp) for tp in line], list(line.values()), color=colour, linestyle=dashed, label=name)
        if name in points:
            at = [sizes.index(tp) for tp in points[name]]
            ax.scatter(at, list(points[name].values()), s=52, marker=marker, color=colour, zorder=3)
    ax.axvline(sizes.index(host) + 0.5, color=palette.OTHER, linestyle=":", linewidth=1.6)
    ax.annotate("one node | two", (sizes.index(host) + 0.5, ax.get_ylim()[1]), (0, 2), textcoords="offset points",
                ha="center")  # fmt: skip
    ax.set_xticks(range(len(sizes)), sizes)
    ax.set(xlabel="ranks that share a layer (TP); points: published", ylabel="tokens/s of a GPU", ylim=(0, None))
    ax.legend(loc="lower left")
    values_text = "; ".join(
        f"{name}: " + ", ".join(f"{v:,.0f} at {tp}" for tp, v in of.items()) for name, of in lines.items()
    )
    return save(fig, "which_layout_cliff", f"Tokens/s of a GPU, predicted, by TP: {values_text}.")


def rates_of_two_ways(
    lines: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]]
) -> Picture:  # fmt: skip
    """TFLOP/s of a GPU against GPUs, the samples of a step fixed: lines predicted, points published."""
    fig, ax = _curves(lines, points)
    gpus = sorted({n for line in lines.values() for n in line})
    ax.set(xlabel="GPUs, 1,536 samples a step; points: published", ylabel="TFLOP/s of a GPU")
    ax.set(ylim=(0, None), xscale="log")
    ax.set_xticks(gpus, [f"{n:,}" for n in gpus])
    ax.minorticks_off()
    values_text = "; ".join(
        f"{name}: " + ", ".join(f"{v:.0f} on {n}" for n, v in of.items()) for name, of in points.items()
    )
    return _below(fig, ax, "which_layout_published_pair", f"Published TFLOP/s of a GPU: {values_text}.")


def seconds_by_link(lines: Mapping[str, Mapping[float, float]], crossing: float) -> Picture:
    """Seconds of a step against what a node's network cards carry; dotted where ZeRO-3's gathers fill all the time."""
    fig, ax = _curves(lines, {})
    links = sorted({link for line in lines.values() for link in line})
    ax.axvline(
        crossing, color=palette.OTHER, linestyle=":", linewidth=1.6, label="gathers as long as multiplications, by hand"
    )
    ax.set(xlabel="GB/s of a node's network cards", ylabel="seconds a step", ylim=(0, None), xscale="log")
    ax.set_xticks(links, [f"{link:g}" for link in links])
    ax.minorticks_off()
    values_text = "; ".join(
        f"{name}: " + ", ".join(f"{v:.0f} at {x:g}" for x, v in of.items()) for name, of in lines.items()
    )
    return _below(fig, ax, "which_layout_links", f"Seconds of a step by GB/s of a node: {values_text}.")


def _curves(lines: Mapping[str, Mapping], points: Mapping[str, Mapping]) -> tuple[Figure, Axes]:
    fig, ax = new(size=(6.4, 4.2))
    for (name, line), (colour, marker) in zip(lines.items(), _MARKS, strict=False):
        own = "-" if name in points or not points else "--"
        ax.plot(list(line), list(line.values()), color=colour, linestyle=own, linewidth=1.8, label=name)
        if name in points:
            of = points[name]
            ax.scatter(list(of), list(of.values()), s=56, marker=marker, color=colour, zorder=3)
    return fig, ax


def _below(fig: Figure, ax: Axes, name: str, alt: str) -> Picture:
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    return save(fig, name, alt)


def rule_and_search(rows: Sequence[Compared]) -> Picture:
    """How many times as long as the search's best a step takes with the rule's layout; the longest on top."""
    fitting = sorted((row for row in rows if row.chosen is not None), key=lambda row: row.ratio)
    fig, ax = new(size=(7.2, 0.26 * len(fitting) + 1.0))
    places = np.arange(len(fitting))
    ratios = np.array([row.ratio for row in fitting])
    ax.barh(places, 100 * (ratios - 1), 0.66, color=COLOURS["compute"])
    for place, row in zip(places, fitting, strict=True):
        text = row.chosen.kind + (", recomputed" if row.chosen.layout.recompute == "full" else "")
        ax.annotate(text, (100 * (row.ratio - 1), place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, [row.name for row in fitting])
    ax.set(xlabel="longer than the search's best, %")
    ax.set(xlim=(0, max(4.3 * 100 * (ratios.max() - 1), 10)), ylim=(-0.6, len(fitting) - 0.4))
    ax.grid(axis="y", visible=False)
    values_text = "; ".join(f"{row.name}: {row.chosen.kind}, {row.ratio:.2f} times" for row in reversed(fitting))
    return save(fig, "which_layout_rule", f"Steps with the rule's layout, by the search's best: {values_text}.")
