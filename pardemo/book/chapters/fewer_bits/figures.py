"""Pictures of *Fewer bits*: what formats can say, what sums keep, what real tensors have, and codes on the wire."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, curves, key, line_chart, words
from pardemo.draw.style import COLOURS, Picture, new, save

INKS = (*palette.WAYS.values(), palette.PREDICTED)
LINES = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)))
#: Longer lists of numbers than this are a band.
_BAND = 1000
_LEFT = -42  # powers of two from which on sizes are shown


def number_lines(numbers: Mapping[str, Sequence[float]], until: float = 8.0) -> Picture:
    """The positive numbers of each format, as marks: by powers of two, and the smallest of them on an even scale.

    A format with more than a thousand numbers is a band.
    """
    fig, axes = new(2, 1, size=(5.8, 4.6))
    positive = {name: np.array([value for value in values if value > 0], float) for name, values in numbers.items()}
    for index, marks in enumerate(positive.values()):
        for ax, shown in zip(axes, (marks, marks[marks <= until]), strict=True):
            if len(marks) > _BAND:
                ax.barh(index, shown.max(), 0.6, left=shown.min(), color=palette.OTHER)
            else:
                ax.vlines(shown, index - 0.3, index + 0.3, color=palette.INK, linewidth=0.7)
    axes[0].set_xscale("log", base=2)
    axes[0].set(xlim=(2.0**-20, 2.0**19), title="all of them, by powers of two")
    axes[1].set(xlim=(-0.02 * until, 1.02 * until), title=f"from 0 to {until:g}")
    for ax in axes:
        ax.set(ylim=(len(numbers) - 0.4, -0.6))
        ax.set_yticks(range(len(numbers)), list(numbers))
        ax.grid(visible=False)
    counts = words({name: len(marks) for name, marks in positive.items()}, "{:,.0f}")
    return save(fig, "fewer_bits_lines", f"Positive numbers of each format: {counts}.")


def rounding_error_by_size(sizes: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Picture:
    """The largest relative error of rounding numbers of each size, in per cent, for each format without a scale."""
    fig, ax = new(size=(5.8, 3.6))
    lines = {name: dict(zip(sizes, values, strict=True)) for name, values in errors.items()}
    curves(ax, lines, per=0.01, colours=INKS, dashes=LINES, drawstyle="steps-post", linewidth=2)
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="size of the number", ylabel="off by at most, per cent", ylim=(0.1, 150))
    ax.yaxis.set_major_formatter("{x:g}")
    key(fig, ncols=len(errors))
    summary = words({name: min(values) for name, values in errors.items()}, "{:.2g} per cent at best", per=0.01)
    return save(fig, "fewer_bits_rounding", f"Relative error of rounding by the number's size: {summary}.")


def sums_by_addends(errors: Mapping[str, Mapping[int, float]], stands_still: Mapping[int, float]) -> Picture:
    """Relative error of a sum over its addends, for each format it is kept in; a line where it stands still."""
    fig, ax = new(size=(5.8, 3.6))
    kept = {f"kept in {name}": by_count for name, by_count in errors.items()}
    curves(ax, kept, colours=INKS, dashes=["none"], marks="os", markersize=6)
    curves(ax, {"if it stands still at 256": stands_still}, colours=["predicted"])
    ax.set_xscale("log", base=2)
    ax.set(yscale="log", xlabel="products in the sum", ylabel="relative error", ylim=(1e-8, 3))
    ax.legend(loc="center right")
    summary = "; ".join(f"{name} {list(by_count.values())[-1]:.2g}" for name, by_count in errors.items())
    return save(fig, "fewer_bits_sums", f"Relative error of the longest sums: {summary}.")


def small_updates(
    steps: Sequence[int], means: Mapping[str, Sequence[float]], single: Sequence[Sequence[float]]
) -> Picture:
    """A weight over many small updates: the mean for each way to round, and a few single weights rounded by chance."""
    fig, ax = new(size=(5.8, 3.6))
    for number, values in enumerate(single):
        label = None if number else "single weights, by chance"
        ax.plot(steps, values, color=palette.DONE["idle"], linewidth=0.9, zorder=1, label=label)
    lines = {name: dict(zip(steps, values, strict=True)) for name, values in means.items()}
    curves(ax, lines, colours=INKS, dashes=LINES, linewidth=2.2)
    ax.set(xlabel="updates", ylabel="weight")
    ax.legend(loc="upper left")
    summary = words({name: values[-1] for name, values in means.items()}, "{:.4g}")
    return save(fig, "fewer_bits_updates", f"Weights that began at 1, at the end: {summary}.")


def losses_apart(losses: Mapping[str, Sequence[float]], plain: Sequence[float]) -> Picture:
    """A training's loss for each format of its gradients, and how far each is from the one in fp32.

    Args:
        losses: name -> a loss for each step. plain: the same in fp32.
    """
    fig, axes = new(1, 2, size=(5.8, 3.9))
    curves(axes[0], {"fp32": plain}, colours=[palette.OTHER], linewidth=4.5)
    curves(axes[0], losses, colours=INKS, dashes=LINES)
    apart = {name: np.abs(np.subtract(values, plain)) for name, values in losses.items()}
    curves(axes[1], apart, colours=INKS, dashes=LINES)
    axes[0].set(xlabel="step", title="loss", ylim=(0, None))
    axes[1].set(xlabel="step", title="distance to fp32's", ylim=(1e-6, 1e-1), yscale="log")
    key(fig, ncols=3)
    summary = words({"fp32": plain[-1]} | {name: values[-1] for name, values in losses.items()}, "{:.4f}")
    return save(fig, "fewer_bits_losses", f"Loss after the last step: {summary}.")


def published_precisions(rows: Mapping[str, Mapping[str, tuple[float | None, float]]]) -> Picture:
    """Tokens a second of a GPU by precision: bars published, outlines planned; a panel for each model.

    Args:
        rows: model -> precision -> what was published, or None, and what the planner says.
    """
    panels, summaries = {}, []
    for model, by_precision in rows.items():
        panels[model] = {
            "series": {"published by NVIDIA": {name: public or 0.0 for name, (public, _) in by_precision.items()}},
            "outline": {name: planned for name, (_, planned) in by_precision.items()},
            "text": [f"{public or planned:,.0f}" for public, planned in by_precision.values()],
        }
        summaries += [
            f"{model}, {name}: {f'{public:,.0f}' if public else 'nothing'} published, {planned:,.0f} planned"
            for name, (public, planned) in by_precision.items()
        ]
    return bar_chart(
        "fewer_bits_published", f"Tokens a second of a GPU. {'; '.join(summaries)}.", panels, unit="tokens/s of a GPU",
        fills={"published by NVIDIA": "compute"}, outlined="planned", size=(5.8, 3.6),
    )  # fmt: skip


def tensors_and_formats(
    tensors: Mapping[str, Sequence[float]], formats: Mapping[str, tuple[float, float]], vanished: Mapping[str, float]
) -> Picture:
    """Plots how large each tensor's numbers are, by powers of two, above what each format can say without a scale.

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
    for index, (name, (small, large)) in enumerate(formats.items()):
        below.barh(index + 0.22, large - small, 0.34, left=small, color=palette.OTHER)
        summary = f"{name}: {100 * vanished[name]:.0f} % of the gradients become 0"
        below.annotate(summary, (2.0**_LEFT, index - 0.2), (4, 0), textcoords="offset points", va="center")
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
    """Plots how far off the other numbers are, in per cent, by how large an outlier is among them."""
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
    """Plots what a reduce-scatter sends in each format, in per cent of fp32's, and how far off its sums are."""
    return bar_chart(
        "fewer_bits_sent", "A reduce-scatter, in per cent. {}.",
        {"sent, % of fp32's bytes": {"series": {"communication": sent}, "outline": expected},
         "the sums are off by, %": {"series": {"gradients": {name: errors[name] for name in sent}}}},
        per=0.01, text="{:.1f}", size=(5.8, 3.6), ncols=3,
    )  # fmt: skip
