"""Pictures of *Long sequences*: memory by tokens, work by rank, bytes by number of ranks, seconds by link."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.charts import bars, numbers
from pardemo.draw.style import COLOURS, Picture, new, save

GB = 1e9
_STYLES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "D")


def tokens_in_memory(per_token: Mapping[str, float], room_bytes: float) -> Picture:
    """GB over the tokens of one sequence, a line for each thing that is kept, and what a GPU has.

    Args:
        per_token: name -> bytes for each token.
    """
    fig, ax = new(size=(6.4, 3.8))
    tokens = np.array([2.0**k for k in range(12, 21)])
    colours = (COLOURS["activations"], palette.SHADES["logits"], COLOURS["activations"])
    for (name, each), colour, style in zip(per_token.items(), colours, _STYLES, strict=False):
        ax.plot(tokens, tokens * each / GB, color=colour, linestyle=style, linewidth=2, label=name)
    ax.axhline(room_bytes / GB, color=palette.INK, linewidth=1)
    ax.annotate(f"{room_bytes / GB:.0f} GB", (tokens[0], room_bytes / GB), (0, 4),
                textcoords="offset points")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="tokens of one sequence", ylabel="GB")
    marks = [4096, 16_384, 65_536, 262_144, 1_048_576]
    ax.set_xticks(marks, [f"{mark // 1024}K" if mark < 2**20 else "1M" for mark in marks])
    ax.minorticks_off()
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    told = ", ".join(f"{name} {room_bytes / each:,.0f} tokens" for name, each in per_token.items())
    return save(fig, "long_sequences_tokens", f"What fills {room_bytes / GB:.0f} GB alone: {told}.")


def blocks_by_rank(measured: Mapping[str, Sequence[float]], predicted: Mapping[str, Sequence[float]]) -> Picture:
    """Blocks that each rank multiplied over a whole ring, for each order; outlines are predicted."""
    fig, axes = new(1, len(measured), size=(6.4, 3.0), sharey=True)
    for ax, (order, values) in zip(axes, measured.items(), strict=True):
        bars(ax, [str(rank) for rank in range(len(values))], {"compute": values}, {"compute": predicted[order]})
        numbers(ax, range(len(values)), values, "{:.0f}")
        ax.axhline(sum(values) / len(values), color=palette.INK, linestyle="--", linewidth=1)
        ax.set(title=order, xlabel="rank")
    axes[0].set(ylabel="blocks computed", ylim=(0, 1.15 * max(max(values) for values in measured.values())))
    handles = [Patch(fill=False, edgecolor="black", label="predicted")]
    handles += [axes[0].lines[-1]]
    fig.legend(handles, ["predicted", "mean"], loc="outside lower right", ncols=2)
    told = "; ".join(f"{order}: {', '.join(f'{value:.0f}' for value in v)}" for order, v in measured.items())
    return save(fig, "long_sequences_blocks", f"Blocks computed by each rank: {told}.")


def sent_by_ranks(
    lines: Mapping[str, Mapping[str, Mapping[int, float]]], measured: Mapping[str, Mapping[str, float]], ranks: int
) -> Picture:
    """What a rank sends in a layer over the number of ranks: a panel for each kind of heads, a line for each way.

    Args:
        lines: heads -> way -> {ranks: A}. measured: heads -> way -> A at ``ranks``.
    """
    fig, axes = new(1, len(lines), size=(6.4, 3.6), sharey=True)
    for ax, (heads, ways) in zip(axes, lines.items(), strict=True):
        for place, (way, values) in enumerate(ways.items()):
            colour = (palette.WAYS["ring"], palette.WAYS["torch"])[place]
            ax.plot(
                list(values), list(values.values()), color=colour, linestyle=_STYLES[place], label=f"{way}, formula"
            )
            ax.scatter([ranks], [measured[heads][way]], s=52, marker=_MARKS[place], color=colour, zorder=3,
                       label=f"{way}, counted")  # fmt: skip
        ax.set(title=heads, xlabel="ranks", xscale="log", ylim=(0, None))
        marks = [n for n in (2, 4, 8, 16, 32) if n <= max(max(values) for values in ways.values())]
        ax.set_xticks(marks, marks)
        ax.minorticks_off()
    axes[0].set_ylabel("sent by a rank, A")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    told = "; ".join(
        f"{heads}, {way}: {', '.join(f'{value:.2f} on {n}' for n, value in values.items())}"
        for heads, ways in lines.items()
        for way, values in ways.items()
    )
    return save(fig, "long_sequences_sent", f"Activations that a rank sends, forward and backward: {told}.")


def attention_on_links(tokens: Sequence[int], slower: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """How many times as long attention takes as its computing alone, over the sequence's length, for each link.

    Args:
        slower: link -> way -> a factor for each of ``tokens``.
    """
    fig, axes = new(1, len(slower), size=(6.4, 3.6), sharey=True)
    for ax, (link, ways) in zip(axes, slower.items(), strict=True):
        for place, (way, factors) in enumerate(ways.items()):
            colour = (palette.WAYS["ring"], palette.WAYS["torch"])[place]
            ax.plot(tokens, factors, color=colour, linestyle=_STYLES[place], marker=_MARKS[place], label=way)
        ax.set(title=link, xscale="log", xlabel="tokens of the sequence")
        marks = [n for n in tokens if n.bit_length() % 2 == tokens[0].bit_length() % 2]
        ax.set_xticks(marks, [f"{n // 1024}K" if n < 2**20 else "1M" for n in marks])
        ax.minorticks_off()
    axes[0].set(ylabel="time / computing alone", ylim=(0.9, None))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    told = "; ".join(
        f"{link}, {way}: {factors[0]:.2f} to {factors[-1]:.2f}"
        for link, ways in slower.items()
        for way, factors in ways.items()
    )
    return save(
        fig, "long_sequences_links",
        f"Attention's time over that of its computing, from {tokens[0]:,} to {tokens[-1]:,} tokens: {told}.",
    )  # fmt: skip


def wrong_at_cuts(errors: Mapping[str, float], losses: Mapping[str, float]) -> Picture:
    """The gradient's relative error with each mistake, on a logarithmic scale, and the loss that it reports."""
    fig, ax = new(size=(6.4, 3.4))
    places = np.arange(len(errors))
    least = 1e-8
    colours = [palette.VERDICTS["holds"] if error < 1e-4 else palette.VERDICTS["fails"] for error in errors.values()]
    ax.barh(places, [max(error, least) for error in errors.values()], 0.62, color=colours, zorder=2)
    for place, name in enumerate(errors):
        ax.annotate(f"loss {losses[name]:.3f}", (max(errors[name], least), place), (4, 0), textcoords="offset points",
                    va="center")  # fmt: skip
    ax.set_yticks(places, list(errors))
    ax.set(xscale="log", xlabel="relative error of the gradient", xlim=(least, 90), ylim=(len(errors) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    told = ", ".join(f"{name.replace(chr(10), ' ')} {error:.1e} (loss {losses[name]:.3f})"
                     for name, error in errors.items())  # fmt: skip
    return save(fig, "long_sequences_wrong", f"Relative error of the gradient: {told}.")


def loss_in_chunks(measured: Mapping[str, Mapping[int, float]], predicted: Mapping[int, float]) -> Picture:
    """Peak memory of a loss over the number of its chunks, ours and DeepSpeed's; the line is predicted. In bytes."""
    fig, ax = new(size=(6.4, 3.4))
    ax.plot(list(predicted), [value / 1e6 for value in predicted.values()], color=palette.PREDICTED, label="predicted")
    colours = (palette.SHADES["logits"], palette.WAYS["torch"])
    for (name, values), colour, mark in zip(measured.items(), colours, _MARKS, strict=False):
        ax.scatter(list(values), [value / 1e6 for value in values.values()], s=52, marker=mark, facecolors="none",
                   edgecolors=colour, linewidths=1.8, zorder=3, label=name)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="chunks", ylabel="peak, MB")
    ax.set_xticks(list(predicted), list(predicted))
    marks = [round(value / 1e6) for value in predicted.values()]
    ax.set_yticks(marks, marks)
    ax.minorticks_off()
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    told = "; ".join(
        f"{name}: {', '.join(f'{value / 1e6:.0f} MB in {n}' for n, value in values.items())}"
        for name, values in measured.items()
    )
    return save(fig, "long_sequences_loss", f"Peak memory of the loss by its chunks. {told}.")


def remedies_for_length(steps: Mapping[str, Mapping[str, float]], room_bytes: float) -> Picture:
    """GB on one GPU after one remedy and the next, by what takes them."""
    fig, ax = new(size=(6.4, 3.6))
    places, left = np.arange(len(steps)), np.zeros(len(steps))
    kinds = (
        ("logits, their gradient", palette.SHADES["logits"], ""),
        ("checkpoints", COLOURS["activations"], ""),
        ("one layer, computed again", COLOURS["activations"], "///"),
    )
    for name, colour, hatch in kinds:
        values = np.array([step[name] / GB for step in steps.values()])
        ax.barh(places, values, 0.62, left=left, color=colour, hatch=hatch, edgecolor="white", label=name, zorder=2)
        left += values
    for place, value in enumerate(left):
        ax.annotate(f"{value:,.0f}", (value, place), (6, 0), textcoords="offset points", va="center",
                    bbox={"facecolor": palette.PAPER, "edgecolor": "none", "pad": 1})  # fmt: skip
    room = {"color": palette.INK, "linewidth": 1.2, "linestyle": "--", "zorder": 1}
    ax.axvline(room_bytes / GB, label="a GPU's memory", **room)
    ax.set_yticks(places, list(steps))
    ax.set(xlabel="GB on the GPU", ylim=(len(steps) - 0.5, -0.5), xlim=(0, 1.12 * max(left)))
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    told = ", ".join(f"{name.replace(chr(10), ' ')} {value:,.0f}" for name, value in zip(steps, left, strict=True))
    return save(fig, "long_sequences_remedies", f"GB on one GPU after one remedy and the next: {told}.")
