"""Pictures of *Sequence parallelism*: what it sends, and what a block keeps for its backward pass."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, key, words
from pardemo.draw.style import Picture, new, save


def sequence_cost(
    kept: Mapping[str, float], kept_predicted: Sequence[float], sent: Mapping[str, float],
    sent_predicted: Sequence[float], ranks: int,
) -> Picture:  # fmt: skip
    """Activations that a block keeps for its backward pass, and φ that a rank sends, for each way to run it."""
    panels = {
        f"{title} (t = {ranks})": {"series": {kind: by_way}, "outline": dict(zip(by_way, theory, strict=True))}
        for title, kind, by_way, theory in (
            ("kept, tensors [b, s, h]", "activations", kept, kept_predicted),
            ("sent, φ", "communication", sent, sent_predicted),
        )
    }
    alt = "{}; outlines are predicted."
    return bar_chart("sequence_parallel_sequence_cost", alt, panels, text="{:.1f}", ncols=3, size=(6.4, 3.8))


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
    ax.set(xlabel="feature of the norm", ylabel="gradient of its weight", xticks=places)
    ax.grid(axis="x", visible=False)
    key(fig)
    summary = words({f"rank {rank}": off for rank, off in enumerate(alone)}, "{:.0%}")
    alt = f"Each rank has a part of a norm's gradient; alone it is so far off: {summary}."
    return save(fig, "sequence_parallel_norm", alt)


def activation_terms(measured: Mapping[str, float], predicted: Mapping[str, float], scores: Sequence[str]) -> Picture:
    """Bytes that each step of a block keeps, per number of the block's input; steps with scores are hatched."""
    fills = {"measured": "activations", "measured, has s × s scores": ("activations", "///")}
    series = {
        label: {name: value * ((name in scores) == hatched) for name, value in measured.items()}
        for label, hatched in zip(fills, (False, True), strict=True)
    }
    return bar_chart(
        "sequence_parallel_activation_terms", "Bytes that a block keeps per number of its input: {}.",
        {"kept, bytes / sbh": {"series": series, "outline": predicted}}, across=True, stacked=True, fills=fills,
        text="{:.3g}", size=(6.4, 4.8), ncols=3,
    )  # fmt: skip


def activation_memory(
    measured: Mapping[tuple[str, str], float], predicted: Mapping[tuple[str, str], float], ways: Sequence[str]
) -> Picture:  # fmt: skip
    """Activations that a block keeps: a panel for each way to treat the attention's core, a bar for each cut.

    Args:
        measured, predicted: (way, cut) -> bytes / sbh. ways: those to show, all on one scale.
    """
    panels = {}
    for way in ways:
        cuts, theory = (
            {cut.removesuffix(" parallel"): value for (core, cut), value in table.items() if core == way}
            for table in (measured, predicted)
        )
        panels[way] = {"series": {"activations": cuts}, "outline": theory}
    return bar_chart(
        "sequence_parallel_memory", "Bytes that a block keeps per number of its input: {}; outlines are predicted.",
        panels, shared=True, text="{:.3g}", unit="kept by a block, bytes / sbh", size=(6.4, 3.8),
    )  # fmt: skip


def library_layers(sent: Mapping[str, float], predicted: Mapping[str, float], kept: Mapping[str, float]) -> Picture:
    """Plots what each library's sequence-parallel layer sends and keeps; outlines are what a ring would send.

    Args:
        sent, predicted, kept: library -> a number in the unit of its panel.
    """
    return bar_chart(
        "sequence_parallel_libraries", "{}; outlines: what a ring would send.",
        {"sent, φ": {"series": {"communication": sent}, "outline": predicted, "text": "{:.1f}"},
         "kept, tensors [b, s, h]": {"series": {"activations": kept}, "text": "{:.2f}"}},
        outlined="with a ring, or nccl", ncols=3,
    )  # fmt: skip
