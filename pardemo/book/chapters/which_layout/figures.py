"""Pictures of *Which layout?*: where a step's time goes, what predictions miss, where one way to cut is the better."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pardemo.book.page.rule import added, what_each_adds
from pardemo.draw import palette
from pardemo.draw.charts import MARKS, WAYS, bar_chart, bars, curves, key, log, words
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.planner.layouts.charts import LINES
from pardemo.planner.layouts.procedure import Candidate, Compared, taken_of


def memory_of_layouts(layouts: Mapping[str, Mapping[str, float]], room_bytes: float, name: str) -> Picture:
    """GB of the fullest GPU, line by line, against what may be filled of it."""
    room, fills = room_bytes / 1e9, {**LINES, "overhead": (palette.OTHER, "///")}
    return bar_chart(
        name, f"With room for {room:.1f} GB: {{}}.",
        {"GB of the fullest GPU": {
            "series": {line: {case: lines.get(line, 0.0) for case, lines in layouts.items()} for line in fills}}},
        across=True, stacked=True, per=1e9, fills=fills, ncols=3, line=(f"room: {room:.1f} GB", room),
        text=lambda end: f"{end:.0f} GB{' ✗' if end > room else ''}",
    )  # fmt: skip


def _predicted_and_published(ax: Any, lines: Mapping[str, Mapping], points: Mapping[str, Mapping]) -> None:
    """A line for each name; where some have points, those without are dashed."""
    dashes = ["-" if name in points or not points else "--" for name in lines]
    curves(ax, lines, dashes=dashes)
    published = {f"_{name}": points.get(name, {}) for name in lines}
    for (name, runs), colour, mark in zip(published.items(), WAYS, MARKS, strict=False):
        if runs:
            curves(ax, {name: runs}, colours=[colour], dashes=["none"], marks=mark, markersize=7.5)


def tokens_by_tp(lines: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]]) -> Picture:
    """Tokens/s of a GPU against the ranks that share a layer: lines predicted, points published; a node, of eight GPUs,
    ends at the dotted line."""
    fig, ax = new(size=(6.4, 4.0))
    _predicted_and_published(ax, lines, points)
    end = 8 * 2**0.5
    ax.axvline(end, color=palette.OTHER, linestyle=":", linewidth=1.6)
    ax.annotate("one node | two", (end, ax.get_ylim()[1]), (0, 2), textcoords="offset points", ha="center")
    log(ax, x=sorted({tp for line in lines.values() for tp in line}))
    ax.set(xlabel="ranks that share a layer (TP); points: published", ylabel="tokens/s of a GPU", ylim=(0, None))
    ax.legend(loc="lower left")
    return save(fig, "which_layout_cliff", f"Tokens/s of a GPU, predicted, by TP: {words(lines, '{:,.0f}')}.")


def rates_of_two_ways(
    lines: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]]
) -> Picture:  # fmt: skip
    """TFLOP/s of a GPU against GPUs, the samples of a step fixed: lines predicted, points published."""
    fig, ax = new(size=(6.4, 4.2))
    _predicted_and_published(ax, lines, points)
    log(ax, x=sorted({n for line in lines.values() for n in line}))
    ax.set(xlabel="GPUs, 1,536 samples a step; points: published", ylabel="TFLOP/s of a GPU", ylim=(0, None))
    key(fig, ncols=1)
    return save(fig, "which_layout_published_pair", f"Published TFLOP/s of a GPU: {words(points, '{:.0f}')}.")


def seconds_by_link(lines: Mapping[str, Mapping[float, float]], crossing: float) -> Picture:
    """Seconds of a step against what a node's network cards carry; dotted where ZeRO-3's gathers fill all the time."""
    fig, ax = new(size=(6.4, 4.2))
    curves(ax, lines, dashes=["-"])
    label = "gathers as long as multiplications, by hand"
    ax.axvline(crossing, color=palette.OTHER, linestyle=":", linewidth=1.6, label=label)
    log(ax, x=sorted({link for line in lines.values() for link in line}))
    ax.set(xlabel="GB/s of a node's network cards", ylabel="seconds a step", ylim=(0, None))
    key(fig, ncols=1)
    return save(fig, "which_layout_links", f"Seconds of a step by GB/s of a node: {words(lines, '{:.0f}')}.")


def rule_and_search(rows: Sequence[Compared]) -> Picture:
    """Plots how many times as long as the search's best a step takes with the rule's layout; the longest on top."""
    fitting = sorted((row for row in rows if row.chosen is not None), key=lambda row: -row.ratio)
    texts = [row.chosen.kind + " *" * (row.chosen.layout.recompute == "full") for row in fitting]
    summary = "; ".join(f"{row.name}: {row.chosen.kind}, {row.ratio:.2f} times" for row in fitting)
    return bar_chart(
        "which_layout_rule", f"Steps with the rule's layout, by the search's best: {summary}.",
        {"longer, % (* recomputed)": {"series": {"ratio": {_short_job(row.name): row.ratio - 1 for row in fitting}}}},
        text=texts, fills={"ratio": "compute"}, across=True, per=0.01, size=(5.7, 0.26 * len(fitting) + 1.0),
        room=max(3.2, 10 / max(100 * (fitting[0].ratio - 1), 1)),
    )  # fmt: skip


def _short_job(job: str) -> str:
    """A job's name that fits a phone: ``70B, 64 H100, 8k, 12.5 GB/s``; a model without a name is Llama 3."""
    name, rest = re.sub(r"^llama[\d.]+-|(?<=[a-z])[\d.]+(?=-)", "", job).replace("-80GB", "").split(",", 1)
    *family, size = name.split("-")
    return " ".join([*(word.capitalize() for word in family), size.upper()]) + "," + rest


def kinds_of_layouts(fitting: Sequence[Candidate], job: str) -> Picture:
    """Plots what the best layout of each kind adds to the time of the multiplications.

    A kind is what the replicas share, where no layer is cut; else which cuts there are.

    Args:
        fitting: what fits, the one that adds least first. job: in words.
    """
    kinds: dict[tuple, Candidate] = {}
    for candidate in fitting:
        layout = candidate.layout
        uncut = layout.tp == layout.pp == 1
        kinds.setdefault((layout.sharding, layout.shard_group) if uncut else (layout.tp > 1, layout.pp > 1), candidate)
    taken = taken_of(fitting)
    shown = {_kind(way): way.adds for way in kinds.values()} | {_kind(taken): taken.adds}
    by_total = dict(sorted(shown.items(), key=lambda item: sum(item[1].values())))
    return what_each_adds(by_total, "which_layout_kinds", _kind(taken), job)


def _kind(candidate: Candidate) -> str:
    return candidate.kind + (", recomputed" if candidate.layout.recompute == "full" else "")


#: Dimension -> the field of a layout, and its colour in the drawing of the cube; there the pipeline has the page's own.
_DIMENSIONS = {
    "tensor, t": ("tp", COLOURS["activations"]),
    "stages, p": ("pp", palette.OTHER),
    "replicas, d": ("dp", COLOURS["gradients"]),
}


def chosen_layouts(chosen: Mapping[str, Candidate]) -> Picture:
    """For each job what the rule's layout adds, and how its GPUs are split.

    Args:
        chosen: job -> what the rule takes.
    """
    fig, (upper, lower) = new(2, 1, size=(5.6, 1.0 * len(chosen) + 2.0))
    jobs = {",\n".join(name.rsplit(", ", 1)): way for name, way in chosen.items()}
    of_parts = added({job: way.adds for job, way in jobs.items()})
    bars(upper, **of_parts, across=True, stacked=True, text="{:.0f} %", room=1.2)
    upper.set(xlabel="added, %")
    sizes = {name: [getattr(way.layout, field) for way in jobs.values()] for name, (field, _) in _DIMENSIONS.items()}
    wide = {name: dict(zip(jobs, np.log2(cuts), strict=True)) for name, cuts in sizes.items()}
    shared = [
        (way.kind.rsplit(", ", 1)[-1] if way.layout.dp > 1 else "one replica")
        + ("\nrecomputed" if way.layout.recompute == "full" else "") for way in jobs.values()
    ]  # fmt: skip
    fills = {name: colour for name, (_, colour) in _DIMENSIONS.items()}
    bars(lower, wide, across=True, stacked=True, text=shared, fills=fills, room=1.4)
    for index, job in enumerate(jobs):
        end = 0.0
        for name, cuts in sizes.items():
            if cuts[index] > 1:
                text = f"{name[-1]} {cuts[index]}" if cuts[index] > 2 else "2"  # its box is too narrow for the letter
                ink = palette.ink_on(fills[name])
                lower.text(end + wide[name][job] / 2, index, text, ha="center", va="center", color=ink)
            end += wide[name][job]
    ticks = range(0, int(lower.get_xlim()[1] / 1.4) + 1, 3)
    lower.set_xticks(list(ticks), [f"{2**tick:,}" for tick in ticks])
    lower.set(xlabel="GPUs")
    key(fig, ncols=3)
    summary = "; ".join(f"{name}: {way.layout}, adds {way.added:.0%}" for name, way in chosen.items())
    return save(fig, "which_layout_chosen", f"Layouts that the rule takes. {summary}.")
