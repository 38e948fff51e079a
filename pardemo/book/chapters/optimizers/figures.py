"""Pictures of *What an optimizer costs*: bytes kept, singular values, bytes sent, and training."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, bars, curves, key, words
from pardemo.draw.style import COLOURS, Picture, new, save

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
    small = {name: measured.get(name, 0.0) for name in large}
    texts = [f"{measured.get(name, predicted[name]):.3g}" for name in large]
    summary = "; ".join(f"{name} {text} B, {large[name]:.3g} GB" for name, text in zip(large, texts, strict=True))
    return bar_chart(
        "optimizers_kept", f"States a parameter of the small GPT, and of Llama 3 8B: {summary}.",
        {"the small GPT,\nbytes a parameter": {"series": {"measured": small}, "outline": predicted, "text": texts},
         "Llama 3 8B,\nGB": {"series": {"measured": dict.fromkeys(large, 0.0)}, "outline": large,
                            "text": [f"{value:.3g}" for value in large.values()]}},
        across=True, beside=True, fills={"measured": "optimizer states"}, room=1.22, size=(6.8, 3.9),
    )  # fmt: skip


def singular_values(by_round: Sequence[Sequence[float]], band: tuple[float, float]) -> Picture:
    """Plots what each round of the iteration makes of a matrix's singular values; the shaded band is where they end."""
    fig, ax = new(size=(6.2, 3.6))
    values = np.asarray(by_round)
    shades = [str(shade) for shade in np.linspace(0.15, 0.75, values.shape[1])]
    lines = dict(enumerate(values.T))
    curves(ax, lines, colours=shades, dashes=["-"], marks=".", linewidth=0.9, markersize=4)
    ax.axhspan(*band, color=COLOURS["optimizer states"], alpha=0.25, zorder=0)
    seen = values[0][values[0] > 1e-6 * values[0].max()]  # what is zero but for rounding has no place in the picture
    ax.set(yscale="log", xlabel="round", ylabel="singular value", ylim=(0.5 * seen.min(), 2))
    ax.set_xticks(range(len(values)))
    ends = f"{values[0].min():.2g} to {values[0].max():.2g} before, {values[-1].min():.2g} to {values[-1].max():.2g}"
    return save(fig, "optimizers_singular_values", f"Singular values of a gradient: {ends} after the last round.")


def rows_alone(whole: Sequence[float], stacked: Mapping[int, Sequence[float]], off: Mapping[int, float]) -> Picture:
    """Singular values of an update: of the whole matrix, and of updates that each rank made of its own rows."""
    fig, ax = new(size=(6.2, 3.4))
    lines = {"the whole matrix": sorted(whole, reverse=True)}
    for ranks, values in stacked.items():
        lines[f"rows of {ranks} ranks, each alone ({off[ranks]:.0%} off)"] = sorted(values, reverse=True)
    curves(ax, lines, colours=("black", "0.35", "0.6"))
    ax.set(xlabel="singular value, from the largest on", ylabel="its size in the update", ylim=(0, None))
    key(fig, ncols=1)
    summary = words({f"{ranks} ranks": value for ranks, value in off.items()}, "{:.0%}")
    return save(fig, "optimizers_rows_alone", f"Updates made of each rank's rows alone are off by so much: {summary}.")


def sent_by_products(
    measured: Mapping[str, Sequence[float]], predicted: Mapping[str, Sequence[float]], owned: Mapping[str, float]
) -> Picture:
    """Plots what a step of torch's Muon sends for matrices of three shapes, by product, beside a matrix that is put
    together once; in numbers of 16 bits for each parameter.

    Args:
        measured, predicted: shape -> what a round's three products send. owned: shape -> put together on its owner.
    """
    fig, ax = new(size=(6.4, 3.8))
    places, rounds = np.arange(len(measured)), 5
    fills = {
        "x xᵀ": ("communication", ""), "its square": ("communication", "///"), "applied to x": ("communication", "...")
    }  # fmt: skip
    series = {name: {shape: rounds * sends[at] for shape, sends in measured.items()} for at, name in enumerate(fills)}
    sums = {name: rounds * sum(values) for name, values in predicted.items()}
    style = {"wide": 0.36, "text": "{:.2f}"}
    summary = bars(ax, series, sums, stacked=True, fills=fills, at=places - 0.2, **style)
    top = ax.get_ylim()[1]
    once = bars(ax, {"put together once": owned}, fills={"put together once": palette.OTHER}, at=places + 0.26, **style)
    ax.set_xticks(places, list(measured))
    ax.set(ylabel="numbers sent / parameter", ylim=(0, top))
    key(fig, ncols=3)
    alt = f"Numbers that a rank sends for each parameter, by products: {summary}; once: {once}."
    return save(fig, "optimizers_sent", alt)


def across_hosts(sent: Mapping[str, tuple[float, float]], predicted: Mapping[str, tuple[float, float]]) -> Picture:
    """Bytes for each parameter over a node's card in one step: gradients and weights, and the optimizer's own."""
    fills = {"forward and backward": ("communication", ""), "the optimizer": ("communication", "///")}
    series = {part: {name: parts[at] for name, parts in sent.items()} for at, part in enumerate(fills)}
    summary = words({name: f"{a:.1f} + {b:.1f}" for name, (a, b) in sent.items()})
    return bar_chart(
        "optimizers_across_hosts", f"Bytes a parameter that leave a node, model + optimizer: {summary}.",
        {"bytes a parameter over a node's card": {
            "series": series, "outline": {name: sum(parts) for name, parts in predicted.items()}}},
        across=True, stacked=True, fills=fills, text="{:.1f}", ncols=3,
    )  # fmt: skip


def training(losses: Mapping[str, Sequence[float]], step_ms: Mapping[str, float]) -> Picture:
    """Losses over the steps of a training, and milliseconds that each optimizer's step takes."""
    fig, axes = new(1, 2, size=(6.8, 3.6), width_ratios=(5, 3))
    for name, values in losses.items():
        colour, dash = _LINES[name]
        smooth = dict(enumerate(np.convolve(values, np.ones(5) / 5, "valid"), 3))  # the mean of five steps
        curves(axes[0], {name: smooth}, colours=[colour], dashes=[dash])
    axes[0].set(xlabel="step", ylabel="loss, mean of five steps")
    colours = [_LINES[name][0] for name in step_ms]
    bars(axes[1], {"_step": step_ms}, fills={"_step": colours}, text="{:.0f}")
    axes[1].set_title("optimizer step, ms")
    axes[1].tick_params(axis="x", rotation=30)
    key(fig, ncols=4)
    summary = "; ".join(f"{name} {np.mean(values[-5:]):.2f}, {step_ms[name]:.0f} ms" for name, values in losses.items())
    return save(fig, "optimizers_training", f"Loss at the end, and an optimizer step: {summary}.")
