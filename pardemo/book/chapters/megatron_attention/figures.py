"""Pictures of *Megatron's attention*: cuts of a fused projection, replicas that drift apart, bytes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, curves, patch, words
from pardemo.draw.style import COLOURS, Picture, new, save


def changed_features(panels: Mapping[str, Sequence[float]], per_head: int) -> Picture:
    """Plots how much each feature has changed, over the largest change of its row, with a line between the heads.

    Args:
        panels: title -> the change of each feature. per_head: features of a head.
    """
    fig, axes = new(len(panels), 1, size=(5.8, 1.45 * len(panels)), sharex=True)
    summaries = []
    for ax, (name, changes) in zip(axes, panels.items(), strict=True):
        most = max(changes)
        ax.bar(range(len(changes)), [change / most for change in changes], 1.0, color=COLOURS["activations"])
        for first in range(per_head, len(changes), per_head):
            ax.axvline(first - 0.5, color=COLOURS["wait"], linewidth=0.6, zorder=0)
        moved = f"{sum(change > 0 for change in changes)} of {len(changes)}"
        ax.set(title=f"{name}: {moved} features change", xlim=(-0.5, len(changes) - 0.5), yticks=[])
        ax.grid(visible=False)
        summaries.append(f"{name}: {moved}")
    axes[-1].set(xlabel=f"feature; a line after every {per_head}", xticks=range(0, len(changes) + 1, 4 * per_head))
    return save(fig, "megatron_attention_changed", f"Features that change with one head. {'; '.join(summaries)}.")


def wrong_by_cut(errors: Mapping[str, float]) -> Picture:
    """Plots how far off the attention is for each way to cut and read a fused projection, in per cent."""
    lines = {name.replace(", ", ",\n"): error for name, error in errors.items()}
    return bar_chart(
        "megatron_attention_qkv",
        f"Relative error of the attention by cut of its fused projection. {words(errors, '{:.1e}')}.",
        {"relative error of the attention, per cent": {"series": {"error": lines}}}, across=True, per=0.01,
        fills={"error": "fails"}, room=1.3, size=(5.6, 3.4),
        text=lambda value: f"{value:.0f} % wrong" if value > 1 else f"right, to {value / 100:.0e}",
    )  # fmt: skip


def replicas_drift(runs_by_way: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Training with replicas of a head of keys and values, with and without the sum of their gradients.

    Args:
        runs_by_way: way -> "apart" (how far a replica is from the first one), "trained" and "saved" (the losses of the
            trained model, and of a checkpoint that has the first replicas), a number for each step.
    """
    fig, axes = new(2, 1, size=(5.6, 6.2), sharex=True)
    for (way, runs), kind in zip(runs_by_way.items(), ("torch", "ring"), strict=True):
        by_step = {name: dict(enumerate(values, 1)) for name, values in runs.items()}
        curves(axes[0], {way: by_step["apart"]}, colours=[kind], per=0.01)
        one_line = runs["saved"] == runs["trained"]
        losses = {f"{way}: while training" + (", and saved" if one_line else ""): by_step["trained"]}
        curves(axes[1], losses | ({} if one_line else {f"{way}: saved": by_step["saved"]}), colours=[kind])
    axes[0].set(title="two replicas of a head apart, per cent", ylim=(-2, None))
    axes[1].set(title="loss", xlabel="step", ylim=(0, None))
    for ax in axes:
        ax.legend()
    last = words({way: runs["apart"][-1] for way, runs in runs_by_way.items()}, "{:.0%}")
    alt = f"Replicas of a head of keys and values after training are apart: {last}."
    return save(fig, "megatron_attention_kv_copies", alt)


def sent_by_part(measured: Mapping[str, Mapping[str, float]], expected: Sequence[float], ranks: int) -> Picture:
    """Plots how much a rank sends for attention and for a block, in φ; outlines are the predictions.

    Args:
        measured: part -> way to run it -> φ. expected: predicted φ of all bars, in their order.
    """
    remaining = iter(expected)
    panels = {
        part: {"series": {"measured": ways}, "outline": {way: next(remaining) for way in ways}}
        for part, ways in measured.items()
    }
    return bar_chart(
        "megatron_attention_block_bytes", "Bytes that a rank sends: {}; outlines are predicted.", panels, shared=True,
        fills={"measured": "communication"}, text="{:.1f} φ", unit=f"sent by a rank, φ (t = {ranks})", size=(6.4, 3.8),
    )  # fmt: skip


def blocks_beside(
    weights: Mapping[str, float], activations: Mapping[str, float], sent: Mapping[str, float], ranks: int
) -> Picture:  # fmt: skip
    """Bytes of weights and of activations kept for the backward pass on one rank, for each library's block.

    Args:
        weights, activations: block -> bytes. sent: block -> φ that a rank sends, of the blocks that send.
    """
    names = {name: f"{name}:\n{sent[name]:.1f} φ" if name in sent else name for name in weights}
    kinds = (("weights, MB", "parameters", weights), ("kept for backward, MB", "activations", activations))
    return bar_chart(
        "megatron_attention_blocks_beside", f"Of what a block keeps on one of {ranks} ranks: {{}}.",
        {title: {"series": {kind: {names[name]: sizes[name] for name in weights}}} for title, kind, sizes in kinds},
        across=True, beside=True, per=1e6, text="{:.1f}", room=1.2, size=(6.4, 3.2),
    )  # fmt: skip


def masks(masks_by_rank: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Ranks' dropout masks, one below the other, for each way to draw them; coloured is what is dropped.

    Args:
        masks_by_rank: rank -> way -> a number for each of 200 places, 0 where it is dropped.
    """
    ways = list(next(iter(masks_by_rank.values())))
    fig, axes = new(len(masks_by_rank), len(ways), size=(5.6, 2.6))
    for row, (rank, masks_of) in zip(axes, masks_by_rank.items(), strict=True):
        for ax, way in zip(row, ways, strict=True):
            dropped = np.reshape(masks_of[way], (5, 40)) == 0
            ax.pcolormesh(np.where(dropped, 1.0, np.nan), cmap=ListedColormap([palette.OTHER]))
            ax.set(xlim=(0, 40), ylim=(5, 0), xticks=[], yticks=[])
            ax.grid(visible=False)
            ax.spines[:].set_visible(True)
            if ax in axes[0]:
                ax.set_title(way)
        row[0].set_ylabel(rank)
    fig.legend(handles=[patch("dropped, of the first 200 places", palette.OTHER)], loc="outside lower center")
    return save(
        fig, "megatron_attention_masks", "Places that dropout sets to 0: the same on both ranks, or other ones on each."
    )
