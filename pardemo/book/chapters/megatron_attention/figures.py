"""Pictures of *Megatron's attention*: cuts of a fused projection, replicas that drift apart, bytes and seconds."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch, Rectangle

from pardemo.draw import palette
from pardemo.draw.charts import bars
from pardemo.draw.style import COLOURS, Picture, new, save

_PREDICTED = Patch(fill=False, edgecolor="black", label="predicted")


def changed_features(panels: Mapping[str, Sequence[float]], per_head: int) -> Picture:
    """How much each feature has changed, over the largest change of its row, with a line between the heads.

    Args:
        panels: title -> the change of each feature. per_head: features of a head.
    """
    fig, axes = new(len(panels), 1, size=(5.8, 1.45 * len(panels)), sharex=True)
    for ax, (name, changes) in zip(axes, panels.items(), strict=True):
        most = max(changes)
        ax.bar(range(len(changes)), [change / most for change in changes], 1.0, color=COLOURS["activations"])
        for first in range(per_head, len(changes), per_head):
            ax.axvline(first - 0.5, color=COLOURS["wait"], linewidth=0.6, zorder=0)
        moved = sum(change > 0 for change in changes)
        ax.set(title=f"{name}: {moved} of {len(changes)} features change", xlim=(-0.5, len(changes) - 0.5), yticks=[])
        ax.grid(visible=False)
    axes[-1].set(xlabel=f"feature; a line after every {per_head}", xticks=range(0, len(changes) + 1, 4 * per_head))
    values_text = "; ".join(
        f"{name}: {sum(c > 0 for c in feature_changes)} of {len(feature_changes)}"
        for name, feature_changes in panels.items()
    )
    return save(fig, "megatron_attention_changed", f"Features that change with one head. {values_text}.")


def wrong_by_cut(errors: Mapping[str, float]) -> Picture:
    """How far off the attention is for each way to cut and read a fused projection, in per cent."""
    fig, ax = new(size=(5.6, 3.4))
    places = range(len(errors))
    ax.barh(places, [100 * error for error in errors.values()], height=0.6, color=palette.VERDICTS["fails"], zorder=2)
    for place, error in zip(places, errors.values(), strict=True):
        label = f"{error:.0%} wrong" if error > 0.01 else f"right, to {error:.0e}"
        ax.annotate(label, (100 * error, place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, list(errors))
    ax.invert_yaxis()
    ax.set(xlabel="relative error of the attention, per cent", xlim=(0, 130 * max(errors.values())))
    ax.grid(axis="y", visible=False)
    values_text = "; ".join(f"{name.replace(chr(10), ' ')}: {error:.1e}" for name, error in errors.items())
    return save(
        fig, "megatron_attention_qkv", f"Relative error of the attention by cut of its fused projection. {values_text}."
    )


def replicas_drift(runs_by_way: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Training with replicas of a head of keys and values, with and without the sum of their gradients.

    Args:
        runs_by_way: way -> "apart" (how far a replica is from the first one), "trained" and "saved" (the losses of the
            trained model, and of a checkpoint that has the first replicas), a number for each step.
    """
    fig, axes = new(2, 1, size=(5.6, 6.2), sharex=True)
    for (way, runs), kind in zip(runs_by_way.items(), ("torch", "ring"), strict=True):
        steps = range(1, len(runs["apart"]) + 1)
        axes[0].plot(steps, [100 * distance for distance in runs["apart"]], color=COLOURS[kind], linewidth=2, label=way)
        one_line = runs["saved"] == runs["trained"]
        label = f"{way}: while training" + (", and saved" if one_line else "")
        axes[1].plot(steps, runs["trained"], color=COLOURS[kind], linewidth=2, label=label)
        if not one_line:
            axes[1].plot(steps, runs["saved"], "--", color=COLOURS[kind], label=f"{way}: saved")
    axes[0].set(title="two replicas of a head apart, per cent", ylim=(-2, None))
    axes[1].set(title="loss", xlabel="step", ylim=(0, None))
    for ax in axes:
        ax.legend()
    last = {way: runs["apart"][-1] for way, runs in runs_by_way.items()}
    values_text = ", ".join(f"{way} {apart:.0%}" for way, apart in last.items())
    return save(
        fig,
        "megatron_attention_kv_copies",
        f"Replicas of a head of keys and values after training are apart: {values_text}.",
    )


def sent_by_part(measured: Mapping[str, Mapping[str, float]], expected: Sequence[float], ranks: int) -> Picture:
    """How much a rank sends for attention and for a block, in φ; outlines are the predictions.

    Args:
        measured: part -> way to run it -> φ. expected: predicted φ of all bars, in their order.
    """
    fig, axes = new(
        1, len(measured), size=(6.4, 3.6), sharey=True, width_ratios=[len(ways) for ways in measured.values()]
    )
    remaining = list(expected)
    for ax, (part, ways) in zip(axes, measured.items(), strict=True):
        theory, remaining = remaining[: len(ways)], remaining[len(ways) :]
        bars(ax, list(ways), {"communication": list(ways.values())}, {"communication": theory})
        for place, value in enumerate(ways.values()):
            ax.annotate(f"{value:.1f} φ", (place, value), (0, 6), textcoords="offset points", ha="center")
        ax.set(title=part, ylim=(0, 1.2 * max(expected)))
    axes[0].set_ylabel(f"sent by a rank, φ (t = {ranks})")
    axes[0].legend(handles=[_PREDICTED], loc="upper left")
    values_text = ", ".join(
        f"{part}, {way.replace(chr(10), ' ')} {value:.1f} φ"
        for part, ways in measured.items()
        for way, value in ways.items()
    )
    return save(
        fig, "megatron_attention_block_bytes", f"Bytes that a rank sends: {values_text}; outlines are predicted."
    )


def blocks_beside(
    weights: Mapping[str, float], activations: Mapping[str, float], sent: Mapping[str, float], ranks: int
) -> Picture:  # fmt: skip
    """Bytes of weights and of activations kept for the backward pass on one rank, for each library's block.

    Args:
        weights, activations: block -> bytes. sent: block -> φ that a rank sends, of the blocks that send.
    """
    fig, axes = new(1, 2, size=(6.4, 3.0), sharey=True)
    places = range(len(weights))
    for ax, kind, by_block, title in (
        (axes[0], "parameters", weights, "weights, MB"),
        (axes[1], "activations", activations, "kept for backward, MB"),
    ):
        values = [nbytes / 1e6 for nbytes in by_block.values()]
        ax.barh(places, values, 0.6, color=COLOURS[kind], zorder=2)
        for place, value in enumerate(values):
            ax.annotate(f"{value:.1f}", (value, place), (4, 0), textcoords="offset points", va="center")
        ax.set(title=title, xlim=(0, 1.2 * max(values)))
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(places, [f"{name}:\n{sent[name]:.1f} φ" if name in sent else name for name in weights])
    axes[0].invert_yaxis()
    values_text = "; ".join(f"{name} {weights[name] / 1e6:.1f} and {activations[name] / 1e6:.1f}" for name in weights)
    return save(
        fig,
        "megatron_attention_blocks_beside",
        f"MB of weights and of what is kept on one of {ranks} ranks: {values_text}.",
    )


def masks(masks_by_rank: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Ranks' dropout masks, one below the other, for each way to draw them; coloured is what is dropped.

    Args:
        masks_by_rank: rank -> way -> a number for each of 200 places, 0 where it is dropped.
    """
    ways = list(next(iter(masks_by_rank.values())))
    fig, axes = new(len(masks_by_rank), len(ways), size=(5.6, 2.6))
    for row, (rank, masks_of) in zip(axes, masks_by_rank.items(), strict=True):
        for ax, way in zip(row, ways, strict=True):
            for place, mask_value in enumerate(masks_of[way]):
                if not mask_value:
                    ax.add_patch(Rectangle((place % 40, place // 40), 1, 1, color=palette.OTHER))
            ax.set(xlim=(0, 40), ylim=(5, 0), xticks=[], yticks=[])
            ax.grid(visible=False)
            for side in ax.spines.values():
                side.set_visible(True)
            if ax in axes[0]:
                ax.set_title(way)
        row[0].set_ylabel(rank)
    dropped = Patch(color=palette.OTHER, label="dropped, of the first 200 places")
    fig.legend(handles=[dropped], loc="outside lower center")
    return save(
        fig, "megatron_attention_masks", "Places that dropout sets to 0: the same on both ranks, or other ones on each."
    )


def seconds_of_block(seconds: Mapping[str, tuple[float, float]]) -> Picture:
    """Milliseconds of a block's step by the number of ranks, from data sheets: computing, then waiting.

    Args:
        seconds: ranks and their links -> (seconds of computing, seconds of waiting for all-reduces).
    """
    fig, ax = new(size=(5.6, 3.6))
    places = list(range(len(seconds)))
    low = [1e3 * computes for computes, _ in seconds.values()]
    high = [1e3 * waits for _, waits in seconds.values()]
    ax.bar(places, low, 0.6, color=COLOURS["compute"], zorder=2)
    ax.bar(places, high, 0.6, bottom=low, color=COLOURS["communication"], hatch="///", edgecolor="white", zorder=2)
    for place, below, above in zip(places, low, high, strict=True):
        label = f"{below + above:.1f} ms,\n{above / (below + above):.0%} waits"
        ax.annotate(label, (place, below + above), (0, 3), textcoords="offset points", ha="center")
    ax.set_xticks(places, list(seconds))
    ax.set(ylabel="milliseconds", ylim=(0, 1.3 * max(a + b for a, b in zip(low, high, strict=True))))
    ax.grid(axis="x", visible=False)
    handles = [
        Patch(facecolor=COLOURS["compute"], label="computes"),
        Patch(facecolor=COLOURS["communication"], hatch="///", edgecolor="white", label="waits for all-reduces"),
    ]
    ax.legend(handles=handles, loc="upper center")
    values_text = ", ".join(f"{name.replace(chr(10), ' ')}: {1e3 * (a + b):.1f} ms" for name, (a, b) in seconds.items())
    return save(fig, "megatron_attention_block_seconds", f"A block's step computed from data sheets. {values_text}.")
