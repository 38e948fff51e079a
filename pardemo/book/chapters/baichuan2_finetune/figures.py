"""Pictures of *Baichuan2: the fine-tune*: batches, losses, ZeRO's stages, LoRA against all parameters."""

import math
from collections.abc import Mapping, Sequence

from pardemo.draw import palette
from pardemo.draw.charts import bars, curves, key, log, words
from pardemo.draw.style import COLOURS, Picture, new, save

_KINDS = ("frozen parameters", "parameters", "gradients", "optimizer states")
_TICKS = (0.01, 0.1, 1, 10)  # of a logarithmic axis
_GROUPS = (*palette.KNOWN, palette.NEW)  # what was trained on and what is like it in greys, what is new in colour


def padded_batches(batches: Mapping[str, Sequence[Sequence[int]]]) -> Picture:
    """Batches of samples as bars: the tokens of the prompt, those with a label, and the padding up to the longest.

    Args:
        batches: name -> the labels of each row, −100 where a token has none.
    """
    fig, axes = new(1, len(batches), size=(5.6, 3.4), sharex=True, sharey=True)
    fills = {"prompt": ("idle", ""), "labelled": "gradients", "padding": ("white", "////")}
    counted = {name: [(row.count(-100), len(row) - row.count(-100)) for row in rows] for name, rows in batches.items()}
    longest = {name: max(map(sum, rows)) for name, rows in counted.items()}
    for ax, (name, rows) in zip(axes, counted.items(), strict=True):
        parts = zip(*((*row, longest[name] - sum(row)) for row in rows), strict=True)
        bars(ax, dict(zip(fills, parts, strict=True)), across=True, stacked=True, fills=fills, wide=0.8)
        empty = 1 - sum(map(sum, rows)) / (longest[name] * len(rows))
        ax.set(title=f"{name}\n{empty:.0%} padding", xlabel="tokens", yticks=[])
    count = max(map(len, batches.values()))
    axes[0].set(ylabel="rows of a batch", xlim=(0, 1.02 * max(longest.values())), ylim=(count - 0.4, -0.6))
    key(fig, ncols=3)
    return save(fig, "baichuan2_finetune_batches", f"Tokens of {' and '.join(batches)}: prompt, labelled and padding.")


def losses_on_groups(losses: Mapping[str, Mapping[int, float]]) -> Picture:
    """The loss of groups of rows over the steps of a fine-tune, on a logarithmic axis.

    Args:
        losses: group -> step -> loss.
    """
    fig, ax = new(size=(5.6, 4.0))
    curves(ax, losses, colours=_GROUPS, dashes=["-"], marks="osD")
    ends = sorted((list(by_step.items())[-1] for by_step in losses.values()), key=lambda end: end[1])
    for index, (step, last) in enumerate(ends):
        below = index > 0 and last < 1.4 * ends[index - 1][1]  # a number is as high as this on the axis
        above = index + 1 < len(ends) and ends[index + 1][1] < 1.4 * last
        apart = (8, 7 * (below - above))
        ax.annotate(f"{last:.2f}", (step, last), apart, textcoords="offset points", va="center")
    log(ax, y=(0.05, 0.1, 0.2, 0.5, 1, 2, 5))
    last = max(step for by_step in losses.values() for step in by_step)
    ax.set(xlabel="optimizer step", ylabel="loss per labelled token (logarithmic)", xlim=(-2, 1.12 * last))
    key(fig)
    text = "; ".join(f"{group} from {loss[min(loss)]:.2f} to {loss[max(loss)]:.2f}" for group, loss in losses.items())
    return save(fig, "baichuan2_finetune_loss", f"Loss by optimizer step: {text}.")


def losses_by_token(losses: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Picture:
    """A panel for each group of rows: over the steps, the loss of each kind of token in a headline.

    Args:
        losses: group -> step -> kind of token -> loss.
    """
    fig, axes = new(1, len(losses), size=(5.6, 4.2), sharey=True)
    for ax, (group, by_step) in zip(axes, losses.items(), strict=True):
        kinds = {kind: {step: row[kind] for step, row in by_step.items()} for kind in next(iter(by_step.values()))}
        looks = {"colours": (palette.OTHER, "gradients", "parameters"), "dashes": (":", "--", "-"), "marks": "s^o"}
        curves(ax, kinds, **looks)
        ax.set(title=group, xlabel="optimizer step")
    log(axes[0], y=_TICKS)
    axes[0].set(ylabel="loss per token (logarithmic)", ylim=(0.004, None))
    key(fig, ncols=3)
    ends = {group: by_step[max(by_step)] for group, by_step in losses.items()}
    return save(fig, "baichuan2_finetune_tokens", f"Loss by kind of token at the end: {words(ends, '{:.2g}')}.")


def lora_by_stage(kept: Mapping[str, Mapping[int, float]], sent: Mapping[int, float], frozen: float) -> Picture:
    """Plots what a rank keeps under each stage of ZeRO with LoRA, by kind, and what it sends in a step.

    Args:
        kept: kind -> stage -> bytes. sent: stage -> bytes. frozen: the share of the parameters that is frozen.
    """
    fig, ((left, right), (below, empty)) = new(2, 2, size=(5.6, 5.4), height_ratios=(3, 2))
    empty.set_axis_off()
    states = _frozen_apart(kept, frozen)
    style = {"per": 1e6, "text": "{:.2f}", "room": 1.2}
    states_text = bars(left, states, stacked=True, fills=dict(zip(_KINDS, _KINDS, strict=True)), **style)
    sends = bars(right, {"_sent": sent}, fills={"_sent": ("communication", "")}, **style)
    bars(below, states, stacked=True, fills=dict(zip(_KINDS[1:], _KINDS[1:], strict=True)), **style)
    for ax, title in ((left, "kept by a rank, MB"), (right, "sent in a step, MB"), (below, "of it for LoRA, MB")):
        ax.set(title=title, xlabel="ZeRO stage")
    empty.legend(*left.get_legend_handles_labels(), loc="center")
    alt = f"With LoRA on two ranks, by ZeRO's stage, MB that a rank keeps: {states_text}; and sends: {sends}."
    return save(fig, "baichuan2_finetune_zero", alt)


def _frozen_apart(kept: Mapping[str, Mapping], frozen: float) -> dict[str, dict]:
    """A table of kinds, of whose parameters a share is frozen."""
    parameters = kept["parameters"]
    parts = {"frozen parameters": frozen, "parameters": 1 - frozen}
    return {
        **{kind: {at: share * nbytes for at, nbytes in parameters.items()} for kind, share in parts.items()},
        **{kind: dict(kept[kind]) for kind in _KINDS[2:]},
    }


def losses_by_format(losses: Mapping[tuple[str, int], float]) -> Picture:
    """Losses of short formats for a few largest activations; a loss that is no number is labelled so.

    Args:
        losses: (format, largest activation) -> loss.
    """
    formats, sizes = (list(dict.fromkeys(part)) for part in zip(*losses, strict=True))
    fig, ax = new(size=(5.6, 2.6))
    for (name, size), loss in losses.items():
        good, row = math.isfinite(loss), formats.index(name)
        ax.plot([size], [row], "o" if good else "X", color=COLOURS["holds" if good else "fails"], markersize=11)
        label = f"loss {loss:.3f}" if good else "no number"
        ax.annotate(label, (size, row), (0, 9), textcoords="offset points", ha="center")
    ax.axvline(65_504, color="black", linestyle="--", linewidth=1.2)
    ax.annotate("fp16 ends: 65,504", (65_504, len(formats) - 0.45), (-5, 0), textcoords="offset points", ha="right")
    log(ax, x=sizes)
    ax.set_yticks(range(len(formats)), formats)
    ax.set(xlabel="largest activation (logarithmic)", xlim=(min(sizes) / 2.5, max(sizes) * 2.5))
    ax.set_ylim(len(formats) - 0.3, -0.7)
    ax.grid(visible=False)
    summary = "; ".join(f"{name} at {size:,}: {loss:.3f}" for (name, size), loss in losses.items())
    return save(fig, "baichuan2_finetune_formats", f"Losses by format and largest activation: {summary}.")


def losses_of_ways(losses: Mapping[str, Mapping[str, float]]) -> Picture:
    """A cluster of bars for each group of texts, one bar for each way to train, on a logarithmic axis.

    Args:
        losses: way -> group -> loss at the end.
    """
    fig, ax = new(size=(5.6, 4.4))
    looks = (("white", "////"), *_GROUPS)  # the same model before training, and trained in three ways
    summary = bars(ax, losses, across=True, text="{:.2g}", fills=dict(zip(losses, looks, strict=False)))
    log(ax, x=_TICKS)
    values = [value for by_way in losses.values() for value in by_way.values()]
    ax.set(xlabel="loss per labelled token (logarithmic)", xlim=(min(*values, 0.01) / 2, 3 * max(values)))
    key(fig)
    return save(fig, "baichuan2_finetune_ways", f"Losses at the end. {summary}.")
