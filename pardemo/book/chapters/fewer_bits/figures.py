"""Pictures of *Fewer bits*: what formats can say, what sums keep, and what tensors have."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, curves, key, words
from pardemo.draw.style import Picture, new, save

INKS = (*palette.WAYS.values(), palette.PREDICTED)
LINES = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)))
#: Longer lists of numbers than this are a band.
_BAND = 1000


def number_lines(numbers: Mapping[str, Sequence[float]], until: float = 8.0) -> Picture:
    """The positive numbers of each format, as marks: by powers of two, and the smallest of them on an even scale.

    A format with more than a thousand numbers is a band.
    """
    fig, axes = new(2, 1, size=(5.8, 4.6))
    positive = {name: np.array([value for value in values if value > 0], float) for name, values in numbers.items()}
    for place, marks in enumerate(positive.values()):
        for ax, shown in zip(axes, (marks, marks[marks <= until]), strict=True):
            if len(marks) > _BAND:
                ax.barh(place, shown.max(), 0.6, left=shown.min(), color=palette.OTHER)
            else:
                ax.vlines(shown, place - 0.3, place + 0.3, color=palette.INK, linewidth=0.7)
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
