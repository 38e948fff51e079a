"""Pictures of *Fewer bits*: what formats can say, what sums keep, and what tensors have."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from pardemo.draw import palette
from pardemo.draw.charts import predicted
from pardemo.draw.style import COLOURS, Picture, new, save

_INKS = (*palette.WAYS.values(), palette.PREDICTED)
_LINES = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)))
#: Longer lists of numbers than this are a band.
_BAND = 1000


def number_lines(numbers: Mapping[str, Sequence[float]], until: float = 8.0) -> Picture:
    """The positive numbers of each format, as marks: by powers of two, and the smallest of them on an even scale.

    A format with more than a thousand numbers is a band.
    """
    fig, axes = new(2, 1, size=(5.8, 4.6))
    for place, values in enumerate(numbers.values()):
        marks = np.array([value for value in values if value > 0], float)
        for ax in axes:
            _marks(ax, place, marks if ax is axes[0] else marks[marks <= until], dense=len(marks) > _BAND)
    axes[0].set_xscale("log", base=2)
    axes[0].set(xlim=(2.0**-20, 2.0**19), title="all of them, by powers of two")
    axes[1].set(xlim=(-0.02 * until, 1.02 * until), title=f"from 0 to {until:g}")
    for ax in axes:
        ax.set(ylim=(len(numbers) - 0.4, -0.6))
        ax.set_yticks(range(len(numbers)), list(numbers))
        ax.grid(visible=False)
    counts = ", ".join(f"{name} {sum(value > 0 for value in values):,}" for name, values in numbers.items())
    return save(fig, "fewer_bits_lines", f"Positive numbers of each format: {counts}.")


def _marks(ax: Axes, place: int, marks: np.ndarray, dense: bool) -> None:
    if dense:
        ax.barh(place, marks.max(), 0.6, left=marks.min(), color=palette.OTHER)
    else:
        ax.vlines(marks, place - 0.3, place + 0.3, color=palette.INK, linewidth=0.7)


def rounding_error_by_size(sizes: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Picture:
    """The largest relative error of rounding numbers of each size, in per cent, for each format without a scale."""
    fig, ax = new(size=(5.8, 3.6))
    for number, (name, values) in enumerate(errors.items()):
        style = {"color": _INKS[number], "linestyle": _LINES[number], "linewidth": 2}
        ax.step(sizes, [100 * value for value in values], where="post", label=name, **style)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set(xlabel="size of the number", ylabel="off by at most, per cent", ylim=(0.1, 150))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=len(errors))
    values_text = "; ".join(f"{name} {100 * min(values):.2g} per cent at best" for name, values in errors.items())
    return save(fig, "fewer_bits_rounding", f"Relative error of rounding by the number's size: {values_text}.")


def sums_by_addends(errors: Mapping[str, Mapping[int, float]], stands_still: Mapping[int, float]) -> Picture:
    """Relative error of a sum over its addends, for each format it is kept in; a line where it stands still."""
    fig, ax = new(size=(5.8, 3.6))
    for number, (name, by_count) in enumerate(errors.items()):
        ax.plot(list(by_count), list(by_count.values()), "os"[number], color=_INKS[number], label=f"kept in {name}")
    predicted(ax, list(stands_still), list(stands_still.values()), label="if it stands still at 256")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set(xlabel="products in the sum", ylabel="relative error", ylim=(1e-8, 3))
    ax.legend(loc="center right")
    values_text = "; ".join(f"{name} {list(by_count.values())[-1]:.2g}" for name, by_count in errors.items())
    return save(fig, "fewer_bits_sums", f"Relative error of the longest sums: {values_text}.")


def small_updates(
    steps: Sequence[int], means: Mapping[str, Sequence[float]], single: Sequence[Sequence[float]]
) -> Picture:
    """A weight over many small updates: the mean for each way to round, and a few single weights rounded by chance."""
    fig, ax = new(size=(5.8, 3.6))
    for values in single:
        ax.plot(steps, values, color=palette.DONE["idle"], linewidth=0.9, zorder=1)
    ax.plot([], [], color=palette.DONE["idle"], label="single weights, by chance")
    for number, (name, values) in enumerate(means.items()):
        ax.plot(steps, values, color=_INKS[number], linestyle=_LINES[number], linewidth=2.2, label=name)
    ax.set(xlabel="updates", ylabel="weight")
    ax.legend(loc="upper left")
    values_text = ", ".join(f"{name} {values[-1]:.4g}" for name, values in means.items())
    return save(fig, "fewer_bits_updates", f"Weights that began at 1, at the end: {values_text}.")


def losses_apart(curves: Mapping[str, Sequence[float]], plain: Sequence[float]) -> Picture:
    """A training's loss for each format of its gradients, and how far each is from the one in fp32.

    Args:
        curves: name -> a loss for each step. plain: the same in fp32.
    """
    fig, axes = new(1, 2, size=(5.8, 3.9))
    axes[0].plot(plain, color=palette.OTHER, linewidth=4.5, label="fp32")
    for number, (name, values) in enumerate(curves.items()):
        style = {"color": _INKS[number], "linestyle": _LINES[number], "linewidth": 1.7}
        axes[0].plot(values, label=name, **style)
        axes[1].plot(np.abs(np.array(values) - np.array(plain)), **style)
    axes[0].set(xlabel="step", title="loss", ylim=(0, None))
    axes[1].set(xlabel="step", title="distance to fp32's", ylim=(1e-6, 1e-1))
    axes[1].set_yscale("log")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    values_text = ", ".join(f"{name} {values[-1]:.4f}" for name, values in curves.items())
    return save(fig, "fewer_bits_losses", f"Loss after the last step: fp32 {plain[-1]:.4f}, {values_text}.")


def published_precisions(rows: Mapping[str, Mapping[str, tuple[float | None, float]]]) -> Picture:
    """Tokens a second of a GPU by precision: bars published, outlines planned; a panel for each model.

    Args:
        rows: model -> precision -> what was published, or None, and what the planner says.
    """
    fig, axes = new(1, len(rows), size=(5.8, 3.6))
    told = []
    for ax, (model, by_precision) in zip(axes, rows.items(), strict=True):
        for place, (name, (public, planned)) in enumerate(by_precision.items()):
            if public is not None:
                ax.bar(place, public, 0.6, color=COLOURS["compute"], zorder=2)
            ax.bar(place, planned, 0.72, fill=False, edgecolor="black", linewidth=1.2, zorder=3)
            height, shown = max(public or 0, planned), public or planned
            ax.annotate(f"{shown:,.0f}", (place, height), (0, 4), textcoords="offset points", ha="center")
            told.append(
                f"{model}, {name}: {f'{public:,.0f}' if public else 'nothing'} published, {planned:,.0f} planned"
            )
        ax.set_xticks(range(len(by_precision)), list(by_precision))
        ax.set(title=model, ylim=(0, 1.15 * max(max(p or 0, q) for p, q in by_precision.values())))
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("tokens/s of a GPU")
    fig.legend(*_keys(), loc="outside lower center", ncols=2)
    return save(fig, "fewer_bits_published", f"Tokens a second of a GPU. {'; '.join(told)}.")


def _keys() -> tuple[list, list[str]]:
    from matplotlib.patches import Patch

    names = ["published by NVIDIA", "planned"]
    return [Patch(facecolor=COLOURS["compute"]), Patch(fill=False, edgecolor="black")], names
