"""Pictures of *Fewer bits*: real tensors against formats, outliers, scales that come late, and codes on the wire."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.charts import bars, numbers
from pardemo.draw.style import COLOURS, Picture, new, save

_INKS = (*palette.WAYS.values(), palette.PREDICTED)
_LINES = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)))
_MARKS = "os^vD"
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
        told = f"{name}: {100 * vanished[name]:.0f} % of the gradients become 0"
        below.annotate(told, (2.0**_LEFT, place - 0.2), (4, 0), textcoords="offset points", va="center")
    below.set(ylim=(len(formats) - 0.4, -0.6), xlabel="size of a number", yticks=[])
    below.set_xscale("log", base=2)
    below.set_xlim(2.0**_LEFT, 2.0**18)
    below.grid(axis="y", visible=False)
    values_text = ", ".join(f"{kind} {np.median(np.asarray(values)):.1e}" for kind, values in tensors.items())
    return save(fig, "fewer_bits_tensors", f"Sizes of numbers, and ranges of formats; medians: {values_text}.")


def error_by_format(errors: Mapping[str, Mapping[str, float]]) -> Picture:
    """Relative error of each tensor in each format, in per cent.

    Args:
        errors: kind -> format -> error.
    """
    fig, ax = new(size=(5.8, 3.6))
    formats = list(next(iter(errors.values())))
    bars(ax, formats, {kind: [100 * of[name] for name in formats] for kind, of in errors.items()})
    ax.set(ylabel="off by, per cent")
    ax.legend(loc="upper left")
    values_text = "; ".join(
        f"{kind}: " + ", ".join(f"{name} {100 * value:.1f}" for name, value in of.items())
        for kind, of in errors.items()
    )
    return save(fig, "fewer_bits_errors", f"Error of each tensor in each format, in per cent. {values_text}.")


def outlier_errors(sizes: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Picture:
    """How far off the other numbers are, in per cent, by how large an outlier is among them."""
    fig, ax = new(size=(5.8, 3.8))
    for number, (name, values) in enumerate(errors.items()):
        style = {"color": _INKS[number], "linestyle": _LINES[number], "marker": _MARKS[number], "markersize": 5}
        ax.plot(sizes, [100 * value for value in values], label=name, **style)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set(xlabel="the outlier, in times the others' size", ylabel="the others are off by, per cent", ylim=(0.4, 160))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    values_text = "; ".join(f"{name} {100 * v[0]:.2g} to {100 * v[-1]:.2g}" for name, v in errors.items())
    return save(fig, "fewer_bits_outlier", f"Error of the other numbers beside an outlier, per cent: {values_text}.")


def scaling_over_steps(errors: Mapping[str, Sequence[float]], outliers: Sequence[int], history: int) -> Picture:
    """The error of a tensor in E4M3 over steps, its scale from itself or from the last steps; outliers are marked."""
    fig, ax = new(size=(5.8, 3.4))
    steps = range(len(next(iter(errors.values()))))
    for number, (name, values) in enumerate(errors.items()):
        values = [100 * value for value in values]
        ax.plot(steps, values, _MARKS[number], color=_INKS[number], markersize=(8, 4)[number], label=name)
    for step in outliers:
        ax.annotate("outlier", (step, 42), (-3, 0), textcoords="offset points", ha="right", va="center", rotation=90)
        ax.axvline(step, color=palette.OTHER, linewidth=0.9, linestyle=":", zorder=1)
    ax.set(xlabel=f"step; the history is of {history}", ylabel="off by, per cent", ylim=(-3, 104))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(f"{name} at most {100 * max(values):.1f}" for name, values in errors.items())
    return save(fig, "fewer_bits_scaling", f"Error of a tensor over steps, in per cent: {values_text}.")


def sent_by_format(sent: Mapping[str, float], expected: Mapping[str, float], errors: Mapping[str, float]) -> Picture:
    """What a reduce-scatter sends in each format, in per cent of fp32's, and how far off its sums are."""
    fig, axes = new(1, 2, size=(5.8, 3.5))
    names = list(sent)
    bars(axes[0], names, {"communication": [100 * sent[name] for name in names]},
         {"communication": [100 * expected[name] for name in names]})  # fmt: skip
    numbers(axes[0], range(len(names)), [100 * sent[name] for name in names], "{:.1f}")
    bars(axes[1], names, {"gradients": [100 * errors[name] for name in names]})
    numbers(axes[1], range(len(names)), [100 * errors[name] for name in names], "{:.1f}")
    axes[0].set(title="sent, % of fp32's bytes", ylim=(0, 30))
    axes[1].set(title="the sums are off by, %", ylim=(0, 1.15 * 100 * max(errors.values())))
    fig.legend(handles=[Patch(fill=False, edgecolor="black", label="predicted")], loc="outside lower right")
    values_text = "; ".join(f"{name} {100 * sent[name]:.1f} sent, {100 * errors[name]:.1f} off" for name in names)
    return save(fig, "fewer_bits_sent", f"A reduce-scatter, in per cent: {values_text}.")
