"""Pictures of *Fewer bits*: real tensors against formats, outliers, scales that come late, and codes on the wire."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.book.chapters.fewer_bits.figures import INKS, LINES
from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, curves, key, line_chart, words
from pardemo.draw.style import COLOURS, Picture, new, save

_LEFT = -42  # powers of two from which on sizes are shown


def tensors_and_formats(
    tensors: Mapping[str, Sequence[float]], formats: Mapping[str, tuple[float, float]], vanished: Mapping[str, float]
) -> Picture:
    """How large the numbers of each tensor are, by powers of two, above what each format can say without a scale.

    Args:
        tensors: kind -> its numbers' sizes. formats: name -> the smallest and the largest number above 0.
    """
    fig, (ax, below) = new(2, 1, size=(5.8, 5.2), sharex=True, height_ratios=(3, 1.9))
    octaves = np.arange(_LEFT, 18)
    for kind, values in tensors.items():
        counts, _ = np.histogram(np.log2(np.clip(values, 2.0**_LEFT, None)), bins=octaves)
        shares = 100 * counts / len(values)
        ax.stairs(shares, 2.0**octaves, fill=True, color=COLOURS[kind], alpha=0.55)
        ax.stairs(shares, 2.0**octaves, color=COLOURS[kind], linewidth=1.6, label=kind)
        top = int(shares.argmax())
        side = {"parameters": "right", "activations": "left"}.get(kind, "center")  # their hills overlap
        ax.annotate(kind, (2.0 ** (octaves[top] + 0.5), shares[top]), (0, 4), textcoords="offset points", ha=side)
    ax.set(ylabel="per cent of the numbers", ylim=(0, 46))
    for place, (name, (small, large)) in enumerate(formats.items()):
        below.barh(place + 0.22, large - small, 0.34, left=small, color=palette.OTHER)
        summary = f"{name}: {100 * vanished[name]:.0f} % of the gradients become 0"
        below.annotate(summary, (2.0**_LEFT, place - 0.2), (4, 0), textcoords="offset points", va="center")
    below.set(ylim=(len(formats) - 0.4, -0.6), xlabel="size of a number", yticks=[])
    below.set_xscale("log", base=2)
    below.set_xlim(2.0**_LEFT, 2.0**18)
    below.grid(axis="y", visible=False)
    medians = words({kind: np.median(np.asarray(values)) for kind, values in tensors.items()}, "{:.1e}")
    return save(fig, "fewer_bits_tensors", f"Sizes of numbers, and ranges of formats; medians: {medians}.")


def error_by_format(errors: Mapping[str, Mapping[str, float]]) -> Picture:
    """Relative error of each tensor in each format, in per cent.

    Args:
        errors: kind -> format -> error.
    """
    return bar_chart(
        "fewer_bits_errors",
        f"Error of each tensor in each format, in per cent. {words(errors, '{:.1f}', per=0.01)}.",
        {"off by, per cent": {"series": errors}}, per=0.01, size=(5.8, 3.6), ncols=3,
    )  # fmt: skip


def outlier_errors(sizes: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Picture:
    """How far off the other numbers are, in per cent, by how large an outlier is among them."""
    return line_chart(
        "fewer_bits_outlier", "Error of the other numbers beside an outlier, per cent: {}.",
        {name: dict(zip(sizes, values, strict=True)) for name, values in errors.items()}, per=0.01, text="{:.2g}",
        x="the outlier, in times the others' size", y="the others are off by, per cent", size=(5.8, 3.8), ncols=3,
        colours=INKS, dashes=LINES, marks="os^vD", log_x=(), log_y=(),
    )  # fmt: skip


def scaling_over_steps(errors: Mapping[str, Sequence[float]], outliers: Sequence[int], history: int) -> Picture:
    """The error of a tensor in E4M3 over steps, its scale from itself or from the last steps; outliers are marked."""
    fig, ax = new(size=(5.8, 3.4))
    for number, (name, values) in enumerate(errors.items()):
        looks = {"colours": [INKS[number]], "dashes": ["none"], "marks": "os"[number], "markersize": (8, 4)[number]}
        curves(ax, {name: values}, per=0.01, **looks)
    for step in outliers:
        ax.annotate("outlier", (step, 42), (-3, 0), textcoords="offset points", ha="right", va="center", rotation=90)
        ax.axvline(step, color=palette.OTHER, linewidth=0.9, linestyle=":", zorder=1)
    ax.set(xlabel=f"step; the history is of {history}", ylabel="off by, per cent", ylim=(-3, 104))
    key(fig)
    summary = words({name: max(values) for name, values in errors.items()}, "at most {:.1f}", per=0.01)
    return save(fig, "fewer_bits_scaling", f"Error of a tensor over steps, in per cent: {summary}.")


def sent_by_format(sent: Mapping[str, float], expected: Mapping[str, float], errors: Mapping[str, float]) -> Picture:
    """What a reduce-scatter sends in each format, in per cent of fp32's, and how far off its sums are."""
    return bar_chart(
        "fewer_bits_sent", "A reduce-scatter, in per cent. {}.",
        {"sent, % of fp32's bytes": {"series": {"communication": sent}, "outline": expected},
         "the sums are off by, %": {"series": {"gradients": {name: errors[name] for name in sent}}}},
        per=0.01, text="{:.1f}", size=(5.8, 3.6), ncols=3,
    )  # fmt: skip
