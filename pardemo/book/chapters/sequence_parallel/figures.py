"""Pictures of *Sequence parallelism*: what it sends, and what a block keeps for its backward pass."""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.charts import bars, numbers, sent_and_kept
from pardemo.draw.style import COLOURS, Picture, new, save

_OUTLINE = Patch(fill=False, edgecolor="black", label="predicted")


def sequence_cost(
    kept: Mapping[str, float], kept_predicted: Sequence[float], sent: Mapping[str, float],
    sent_predicted: Sequence[float], ranks: int,
) -> Picture:  # fmt: skip
    """Activations that a block keeps for its backward pass, and φ that a rank sends, for each way to run it."""
    fig, axes = new(1, 2, size=(6.4, 3.6))
    for ax, kind, by_way, theory, title in (
        (axes[0], "activations", kept, kept_predicted, "kept, tensors [b, s, h]"),
        (axes[1], "communication", sent, sent_predicted, "sent, φ"),
    ):
        values, labels = list(by_way.values()), [textwrap.fill(way, 10) for way in by_way]
        bars(ax, labels, {kind: values}, {kind: list(theory)})
        numbers(ax, range(len(values)), values, "{:.1f}")
        ax.set(title=f"{title} (t = {ranks})", ylim=(0, 1.18 * max(theory)))
    fig.legend(handles=[_OUTLINE], loc="outside lower right")
    values_text = "; ".join(f"{way}: {kept[way]:.1f} kept, {sent[way]:.1f} φ sent" for way in kept)
    return save(fig, "sequence_parallel_sequence_cost", f"{values_text}; outlines are predicted.")


def parts_of_gradient(parts: Sequence[Sequence[float]], whole: Sequence[float], alone: Sequence[float]) -> Picture:
    """The parts of a gradient that each rank computes, one upon the other, and the gradient in one process.

    Args:
        parts: by rank, its part of the gradient for each of some features. whole: the right gradient. alone: by rank,
            the relative error of its part alone.
    """
    fig, ax = new(size=(6.2, 3.4))
    places = np.arange(len(whole))
    over, under = np.zeros(len(whole)), np.zeros(len(whole))
    for rank, (gradients, off) in enumerate(zip(parts, alone, strict=True)):
        values = np.asarray(gradients)
        begin = np.where(values > 0, over, under)
        style = {"color": palette.rank_colour(rank), "edgecolor": palette.INK, "linewidth": 0.5}
        ax.bar(places, values, 0.62, bottom=begin, label=f"rank {rank}'s, alone {off:.0%} off", **style)
        over, under = over + values.clip(0), under + values.clip(None, 0)
    ax.scatter(places, whole, s=42, marker="D", color=palette.PREDICTED, zorder=3, label="the plain block's")
    ax.axhline(0, color=palette.INK, linewidth=0.8)
    ax.set_xticks(places, places)
    ax.set(xlabel="feature of the norm", ylabel="gradient of its weight")
    ax.grid(axis="x", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = ", ".join(f"rank {rank} {off:.0%}" for rank, off in enumerate(alone))
    return save(
        fig,
        "sequence_parallel_norm",
        f"Each rank has a part of a norm's gradient; alone it is so far off: {values_text}.",
    )


def activation_terms(measured: Mapping[str, float], predicted: Mapping[str, float], scores: Sequence[str]) -> Picture:
    """Bytes that each step of a block keeps, per number of the block's input; steps with scores are hatched."""
    fig, ax = new(size=(6.4, 4.6))
    places = np.arange(len(measured))
    colour = COLOURS["activations"]
    for place, (name, value) in enumerate(measured.items()):
        hatch = "///" if name in scores else ""
        ax.barh(place, value, 0.66, color=colour, hatch=hatch, edgecolor="white", zorder=2)
        ax.annotate(
            f"{value:.3g}", (max(value, predicted[name]), place), (4, 0), textcoords="offset points", va="center"
        )
    ax.barh(
        places, [predicted[name] for name in measured], 0.78, fill=False, edgecolor="black", linewidth=1.2, zorder=3
    )
    ax.set_yticks(places, list(measured))
    ax.set(xlabel="kept, bytes / sbh", ylim=(len(measured) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)
               for hatch, label in (("", "measured"), ("///", "measured, has s × s scores"))]  # fmt: skip
    ax.legend(handles=[*handles, _OUTLINE], loc="lower right", frameon=True, framealpha=1, edgecolor="white")
    values_text = ", ".join(f"{name} {value:.3g}" for name, value in measured.items())
    return save(
        fig,
        "sequence_parallel_activation_terms",
        f"Bytes that a block keeps per number of its input: {values_text}.",
    )


def activation_memory(
    measured: Mapping[tuple[str, str], float], predicted: Mapping[tuple[str, str], float], ways: Sequence[str]
) -> Picture:  # fmt: skip
    """Activations that a block keeps: a panel for each way to treat the attention's core, a bar for each cut.

    Args:
        measured, predicted: (way, cut) -> bytes / sbh. ways: those to show; the first has a scale of its own.
    """
    fig, axes = new(1, len(ways), size=(6.4, 3.8))
    tops = [max(value for (core, _), value in predicted.items() if core == way) for way in ways]
    tops[1:] = [max(tops[1:])] * len(tops[1:])
    for ax, way, top in zip(axes, ways, tops, strict=True):
        cuts = {cut: value for (core, cut), value in measured.items() if core == way}
        theory = [predicted[way, cut] for cut in cuts]
        short = [textwrap.fill(cut.removesuffix(" parallel"), 6, break_long_words=False) for cut in cuts]
        bars(ax, short, {"activations": list(cuts.values())}, {"activations": theory})
        numbers(ax, range(len(cuts)), list(cuts.values()), "{:.3g}")
        ax.set(title=way, ylim=(0, 1.1 * top))
    axes[0].set_ylabel("kept by a block, bytes / sbh")
    fig.legend(handles=[_OUTLINE], loc="outside lower right")
    values_text = "; ".join(f"{way}, {cut}: {value:.3g}" for (way, cut), value in measured.items() if way in ways)
    return save(
        fig,
        "sequence_parallel_memory",
        f"Bytes that a block keeps per number of its input: {values_text}; outlines are predicted.",
    )


def remedies(steps: Mapping[str, Sequence[float]]) -> Picture:
    """GB on each GPU after one remedy and the next.

    Args:
        steps: name -> GB of the blocks' states, of the vocabulary's, of logits with their gradient, of activations.
    """
    fig, ax = new(size=(6.4, 3.8))
    places, left = np.arange(len(steps)), np.zeros(len(steps))
    kinds = (
        ("blocks: weights, Adam", COLOURS["parameters"], ""),
        ("embedding, output head", COLOURS["parameters"], "///"),
        ("logits, their gradient", palette.SHADES["logits"], ""),
        ("activations", COLOURS["activations"], ""),
    )
    for (name, colour, hatch), values in zip(kinds, np.array(list(steps.values())).T, strict=True):
        ax.barh(places, values, 0.64, left=left, color=colour, hatch=hatch, edgecolor="white", label=name, zorder=2)
        left += values
    for place, value in enumerate(left):
        ax.annotate(f"{value:.1f}", (value, place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, list(steps))
    ax.set(xlabel="GB on each of eight GPUs", ylim=(len(steps) - 0.5, -0.5), xlim=(0, 1.1 * max(left)))
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = ", ".join(
        f"{name.replace(chr(10), ' ')} {value:.1f}" for name, value in zip(steps, left, strict=True)
    )
    return save(
        fig,
        "sequence_parallel_remedies",
        f"GB on each of eight GPUs after one remedy and the next: {values_text}.",
    )


def library_layers(sent: Mapping[str, float], predicted: Mapping[str, float], kept: Mapping[str, float]) -> Picture:
    """What each library's sequence-parallel layer sends and keeps; outlines are what a ring would send.

    Args:
        sent, predicted, kept: library -> a number in the unit of its panel.
    """
    titles = "sent, φ", "kept, tensors [b, s, h]"
    fig, values_text = sent_and_kept(sent, predicted, kept, titles, "with a ring, or nccl")
    return save(fig, "sequence_parallel_libraries", f"{values_text}; outlines: what a ring would send.")
