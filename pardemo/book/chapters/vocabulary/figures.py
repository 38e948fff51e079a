"""Pictures of *The vocabulary*: what is whole on each GPU, and what a loss over a cut vocabulary sends and keeps."""

from collections.abc import Mapping

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, curves, log
from pardemo.draw.style import COLOURS, Picture, new, save

#: What a bar's name contains -> its label in the legend, and its kind, in :func:`on_each_gpu`.
_KINDS = {
    "weights": ("weights, gradients, Adam", "parameters"),
    "activations": ("activations", "activations"),
    "logits": ("logits, their gradient", "logits"),
}


def on_each_gpu(held: Mapping[str, float], if_cut: Mapping[str, float]) -> Picture:
    """GB that each GPU holds, by kind; outlines are the GB if all of that kind were cut."""
    series = {
        label: {name: value * (kind in name) for name, value in held.items()} for kind, (label, _) in _KINDS.items()
    }
    return bar_chart(
        "vocabulary_whole", "GB on each of eight GPUs: {}; outlines: if it were cut.",
        {"on each of eight GPUs, GB": {"series": series, "outline": if_cut}}, across=True, stacked=True,
        fills=dict(_KINDS.values()), text="{:.1f}", outlined="if all of it were cut",
    )  # fmt: skip


def loss_bytes(
    gathered: Mapping[int, float], reduced: Mapping[int, float], ranks: int, real: Mapping[str, int]
) -> Picture:  # fmt: skip
    """Bytes that a rank sends per token against the size of the vocabulary; lines predicted, points measured.

    Args:
        gathered, reduced: vocabulary -> bytes per token, of logits gathered and of three numbers all-reduced.
        real: names and sizes of vocabularies that models have.
    """
    fig, ax = new(size=(6.4, 4.2))
    share, ends = (ranks - 1) / ranks, (64, 262_144)
    lines = {"predicted": {size: 4 * size * share for size in ends}, "_reduced": dict.fromkeys(ends, 2 * 12 * share)}
    curves(ax, lines, colours=["predicted"], dashes=["-"])
    points = {"all logits gathered": gathered, "three numbers all-reduced": reduced}
    colours = (palette.SHADES["logits"], "communication")
    curves(ax, points, colours=colours, dashes=["none"], marks="os", markersize=8, zorder=3)
    for name, size in real.items():
        ax.axvline(size, color=COLOURS["wait"], linewidth=1.2, zorder=1)
        ax.annotate(name, (size, 45), (-2, 0), textcoords="offset points", ha="right", va="bottom", rotation=90)
    log(ax, x=(), y=())
    ax.set(xlabel="words in the vocabulary, V", ylabel=f"sent by a rank per token, bytes (t = {ranks})", ylim=(8, 2e6))
    ax.legend(loc="upper left")
    alt = "Gathered logits grow with the vocabulary, three all-reduced numbers do not: both lie on their lines."
    return save(fig, "vocabulary_loss_bytes", alt)


def library_losses(sent: Mapping[str, float], predicted: Mapping[str, float], kept: Mapping[str, float]) -> Picture:
    """Plots what each library's loss sends for each token, and what it keeps beside the logits.

    Args:
        sent, predicted, kept: library -> a number in the unit of its panel.
    """
    return bar_chart(
        "vocabulary_libraries", "{}; outlines: three numbers a token.",
        {"sent, numbers per token": {"series": {"communication": sent}, "outline": predicted, "text": "{:.1f}"},
         "kept, × own logits": {"series": {"activations": kept}, "text": "{:.2f}"}}, ncols=3,
    )  # fmt: skip
