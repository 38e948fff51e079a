"""Pictures of *What an optimizer costs*: bytes kept, singular values, bytes sent, and training."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.charts import bars, numbers
from pardemo.draw.style import COLOURS, Picture, new, save

_OUTLINE = Patch(fill=False, edgecolor="black", label="predicted")
_SENT = COLOURS["communication"]
#: An optimizer's line: a grey or a colour that no kind of tensor has, and dashes for print.
_LINES = {
    "Adam": (palette.WAYS["ring"], "-"),
    "8-bit Adam": (palette.WAYS["torch"], "--"),
    "Adafactor": (palette.WAYS["parameter server"], "-."),
    "Muon": (palette.INK, "-"),
}


def kept_per_parameter(
    measured: Mapping[str, float], predicted: Mapping[str, float], large: Mapping[str, float]
) -> Picture:
    """Bytes of states for each parameter of a small model, and GB of a large one by the formulas.

    Args:
        measured, predicted: optimizer -> bytes a parameter. large: optimizer -> GB.
    """
    fig, axes = new(1, 2, size=(6.8, 3.9), sharey=True)
    names = list(large)
    places = np.arange(len(names))
    colour = COLOURS["optimizer states"]
    axes[0].barh(places, [measured.get(name, 0) for name in names], 0.64, color=colour, edgecolor="white")
    axes[0].barh(places, [predicted[name] for name in names], 0.78, fill=False, edgecolor="black", linewidth=1.2)
    axes[1].barh(places, list(large.values()), 0.78, fill=False, edgecolor="black", linewidth=1.2)
    for ax, values, template in ((axes[0], predicted, "{:.3g}"), (axes[1], large, "{:.3g}")):
        for place, name in enumerate(names):
            text = template.format(measured.get(name, values[name]) if ax is axes[0] else values[name])
            ax.annotate(text, (values[name], place), (4, 0), textcoords="offset points", va="center")
        ax.set(xlim=(0, 1.22 * max(values.values())), ylim=(len(names) - 0.4, -0.6))
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(places, names)
    axes[0].set(title="the small GPT", xlabel="bytes a parameter")
    axes[1].set(title="Llama 3 8B", xlabel="GB")
    fig.legend(handles=[Patch(color=colour, label="measured"), _OUTLINE], loc="outside lower center", ncols=2)
    text = "; ".join(f"{name} {measured.get(name, predicted[name]):.3g} B, {large[name]:.3g} GB" for name in names)
    return save(fig, "optimizers_kept", f"States a parameter of the small GPT, and of Llama 3 8B: {text}.")


def singular_values(by_round: Sequence[Sequence[float]], band: tuple[float, float]) -> Picture:
    """What each round of the iteration makes of a matrix's singular values; the shaded band is where they end."""
    fig, ax = new(size=(6.2, 3.6))
    values = np.asarray(by_round)
    rounds = np.arange(len(values))
    shades = np.linspace(0.15, 0.75, values.shape[1])
    for place in range(values.shape[1]):
        ax.plot(rounds, values[:, place], color=str(shades[place]), linewidth=0.9, marker=".", markersize=4)
    ax.axhspan(*band, color=COLOURS["optimizer states"], alpha=0.25, zorder=0)
    seen = values[0][values[0] > 1e-6 * values[0].max()]  # what is zero but for rounding has no place in the picture
    ax.set(yscale="log", xlabel="round", ylabel="singular value", xticks=rounds, ylim=(0.5 * seen.min(), 2))
    ends = f"{values[0].min():.2g} to {values[0].max():.2g} before, {values[-1].min():.2g} to {values[-1].max():.2g}"
    return save(fig, "optimizers_singular_values", f"Singular values of a gradient: {ends} after the last round.")


def rows_alone(whole: Sequence[float], stacked: Mapping[int, Sequence[float]], off: Mapping[int, float]) -> Picture:
    """Singular values of an update: of the whole matrix, and of updates that each rank made of its own rows."""
    fig, ax = new(size=(6.2, 3.4))
    ax.plot(sorted(whole, reverse=True), color="black", linewidth=2, label="the whole matrix")
    for place, (ranks, values) in enumerate(stacked.items()):
        shade, style = (("0.35", "--"), ("0.6", ":"))[place]
        label = f"rows of {ranks} ranks, each alone ({off[ranks]:.0%} off)"
        ax.plot(sorted(values, reverse=True), style, color=shade, linewidth=1.8, label=label)
    ax.set(xlabel="singular value, from the largest on", ylabel="its size in the update", ylim=(0, None))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    text = ", ".join(f"{ranks} ranks {value:.0%}" for ranks, value in off.items())
    return save(fig, "optimizers_rows_alone", f"Updates made of each rank's rows alone are off by so much: {text}.")


def sent_by_products(
    measured: Mapping[str, Sequence[float]], predicted: Mapping[str, Sequence[float]], owned: Mapping[str, float]
) -> Picture:
    """What a step of torch's Muon sends for matrices of three shapes, by product, beside a matrix that is put together
    once; in numbers of 16 bits for each parameter.

    Args:
        measured, predicted: shape -> what a round's three products send. owned: shape -> put together on its owner.
    """
    fig, ax = new(size=(6.4, 3.8))
    places, rounds = np.arange(len(measured)), 5
    bottom = np.zeros(len(measured))
    names = ("x xᵀ", "its square", "applied to x")
    for values, name, hatch in zip(np.array(list(measured.values())).T, names, ("", "///", "..."), strict=True):
        style = {"color": _SENT, "hatch": hatch, "edgecolor": "white"}
        ax.bar(places - 0.2, rounds * values, 0.36, bottom=bottom, label=name, **style)
        bottom += rounds * values
    sums = [rounds * sum(values) for values in predicted.values()]
    ax.bar(places - 0.2, sums, 0.44, fill=False, edgecolor="black", linewidth=1.2, label="predicted")
    ax.bar(places + 0.26, list(owned.values()), 0.36, color=palette.OTHER, label="put together once")
    numbers(ax, places - 0.2, np.maximum(bottom, sums), "{:.2f}")
    numbers(ax, places + 0.26, list(owned.values()), "{:.2f}")
    ax.set_xticks(places, list(measured))
    ax.set(ylabel="numbers sent / parameter", ylim=(0, 1.15 * max(sums)))
    ax.grid(axis="x", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    text = "; ".join(f"{name}: {rounds * sum(measured[name]):.2f}, once {owned[name]:.2f}" for name in measured)
    text = text.replace(chr(10), " ")
    return save(fig, "optimizers_sent", f"Numbers that a rank sends for each parameter: {text}.")


def across_hosts(sent: Mapping[str, tuple[float, float]], predicted: Mapping[str, tuple[float, float]]) -> Picture:
    """Bytes for each parameter over a node's card in one step: gradients and weights, and the optimizer's own."""
    fig, ax = new(size=(6.4, 3.4))
    places, left = np.arange(len(sent)), np.zeros(len(sent))
    for name, hatch, values in zip(
        ("forward and backward", "the optimizer"), ("", "///"), np.array(list(sent.values())).T, strict=True
    ):
        ax.barh(places, values, 0.6, left=left, color=_SENT, hatch=hatch, edgecolor="white", label=name)
        left += values
    sums = [sum(of) for of in predicted.values()]
    ax.barh(places, sums, 0.74, fill=False, edgecolor="black", linewidth=1.2, label="predicted")
    for place, value in enumerate(left):
        ax.annotate(f"{value:.1f}", (max(value, sums[place]), place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, list(sent))
    ax.set(xlabel="bytes a parameter over a node's card", ylim=(len(sent) - 0.4, -0.6), xlim=(0, 1.12 * max(sums)))
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    text = "; ".join(f"{name.replace(chr(10), ' ')} {a:.1f} + {b:.1f}" for name, (a, b) in sent.items())
    return save(fig, "optimizers_across_hosts", f"Bytes a parameter that leave a node, model + optimizer: {text}.")


def training(losses: Mapping[str, Sequence[float]], step_ms: Mapping[str, float]) -> Picture:
    """Losses over the steps of a training, and milliseconds that each optimizer's step takes."""
    fig, axes = new(1, 2, size=(6.8, 3.6), width_ratios=(5, 3))
    for name, values in losses.items():
        colour, style = _LINES[name]
        smooth = np.convolve(values, np.ones(5) / 5, "valid")  # the mean of five steps
        axes[0].plot(np.arange(len(smooth)) + 3, smooth, style, color=colour, linewidth=1.8, label=name)
    axes[0].set(xlabel="step", ylabel="loss, mean of five steps")
    bars(axes[1], ["" for _ in step_ms], {"optimizer states": list(step_ms.values())})
    for patch, name in zip(axes[1].patches, step_ms, strict=True):
        patch.set_facecolor(_LINES[name][0])
    numbers(axes[1], range(len(step_ms)), list(step_ms.values()), "{:.0f}")
    labels = [name.replace("8-bit Adam", "8-bit\nAdam") for name in step_ms]
    axes[1].set_xticks(range(len(step_ms)), labels, rotation=30)
    axes[1].set(title="optimizer step, ms", ylim=(0, 1.15 * max(step_ms.values())))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    text = "; ".join(f"{name} {np.mean(values[-5:]):.2f}, {step_ms[name]:.0f} ms" for name, values in losses.items())
    return save(fig, "optimizers_training", f"Loss at the end, and an optimizer step: {text}.")
