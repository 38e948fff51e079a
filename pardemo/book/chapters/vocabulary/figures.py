"""Pictures of *The vocabulary*: what is whole on each GPU, and what a loss over a cut vocabulary sends and keeps."""

from collections.abc import Mapping

import numpy as np
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.charts import sent_and_kept
from pardemo.draw.style import COLOURS, Picture, new, save

_KIND_LABELS = ("weights, gradients, Adam", "activations", "logits, their gradient")  # in :func:`on_each_gpu`


def on_each_gpu(held: Mapping[str, float], if_cut: Mapping[str, float]) -> Picture:
    """GB that each GPU holds, by kind; outlines are the GB if all of that kind were cut."""
    fig, ax = new(size=(6.4, 3.2))
    places = np.arange(len(held))
    kinds = {
        "weights": COLOURS["parameters"],
        "activations": COLOURS["activations"],
        "logits": palette.SHADES["logits"],
    }
    colours = [next(colour for kind, colour in kinds.items() if kind in name) for name in held]
    ax.barh(places, list(held.values()), 0.64, color=colours, zorder=2)
    ax.barh(places, [if_cut[name] for name in held], 0.78, fill=False, edgecolor="black", linewidth=1.2, zorder=3)
    for place, value in enumerate(held.values()):
        ax.annotate(f"{value:.1f}", (value, place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, list(held))
    ax.set(xlabel="on each of eight GPUs, GB", ylim=(len(held) - 0.5, -0.5), xlim=(0, 1.12 * max(held.values())))
    ax.grid(axis="y", visible=False)
    named = zip(_KIND_LABELS, kinds.values(), strict=True)
    handles = [Patch(facecolor=colour, label=label) for label, colour in named if colour in colours]
    handles.append(Patch(fill=False, edgecolor="black", label="if all of it were cut"))
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    values_text = ", ".join(f"{name.replace(chr(10), ' ')} {value:.1f}" for name, value in held.items())
    return save(
        fig,
        "vocabulary_whole",
        f"GB on each of eight GPUs: {values_text}; outlines: if it were cut.",
    )


def loss_bytes(
    gathered: Mapping[int, float], reduced: Mapping[int, float], ranks: int, real: Mapping[str, int]
) -> Picture:  # fmt: skip
    """Bytes that a rank sends per token against the size of the vocabulary; lines predicted, points measured.

    Args:
        gathered, reduced: vocabulary -> bytes per token, of logits gathered and of three numbers all-reduced.
        real: names and sizes of vocabularies that models have.
    """
    fig, ax = new(size=(6.4, 4.2))
    share, sizes = (ranks - 1) / ranks, np.array([64, 262_144])
    ways = (
        ("all logits gathered", gathered, 4 * sizes * share, palette.SHADES["logits"], "o"),
        ("three numbers all-reduced", reduced, np.full(2, 2 * 12 * share), COLOURS["communication"], "s"),
    )
    for label, measured, line, colour, marker in ways:
        ax.plot(sizes, line, color=COLOURS["predicted"], linewidth=1.4, zorder=2)
        ax.scatter(list(measured), list(measured.values()), s=60, color=colour, marker=marker, label=label, zorder=3)
    for name, size in real.items():
        ax.axvline(size, color=COLOURS["wait"], linewidth=1.2, zorder=1)
        ax.annotate(name, (size, 45), (-2, 0), textcoords="offset points", ha="right", va="bottom", rotation=90)
    ax.set(xscale="log", yscale="log", xlabel="words in the vocabulary, V", ylim=(8, 2e6))
    ax.set_ylabel(f"sent by a rank per token, bytes (t = {ranks})")
    ax.plot([], [], color=COLOURS["predicted"], label="predicted")
    ax.legend(loc="upper left")
    alt_text = "Gathered logits grow with the vocabulary, three all-reduced numbers do not: both lie on their lines."
    return save(fig, "vocabulary_loss_bytes", alt_text)


def library_losses(sent: Mapping[str, float], predicted: Mapping[str, float], kept: Mapping[str, float]) -> Picture:
    """What each library's loss sends for each token, and what it keeps beside the logits.

    Args:
        sent, predicted, kept: library -> a number in the unit of its panel.
    """
    titles = "sent, numbers per token", "kept, × own logits"
    fig, values_text = sent_and_kept(sent, predicted, kept, titles, "predicted")
    return save(fig, "vocabulary_libraries", f"{values_text}; outlines: three numbers a token.")
