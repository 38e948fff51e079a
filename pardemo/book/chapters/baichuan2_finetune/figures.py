"""Pictures of *Baichuan2: the fine-tune*: batches, losses, ZeRO's stages, LoRA against all parameters, hours."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

_KINDS = {
    "frozen parameters": palette.SHADES["frozen parameters"],
    **{kind: COLOURS[kind] for kind in ("parameters", "gradients", "optimizer states")},
}
_TICKS = (0.01, 0.1, 1, 10)  # of a logarithmic axis
#: Of three groups of rows: what was trained on and what is like it in greys, what is new in colour.
_GROUPS = ((palette.KNOWN[0], "o"), (palette.KNOWN[1], "s"), (palette.NEW, "D"))


def padded_batches(batches: Mapping[str, Sequence[tuple[int, int]]]) -> Picture:
    """Batches of samples as bars: the tokens of the prompt, those with a label, and the padding up to the longest.

    Args:
        batches: name -> (prompt, labelled) tokens of each sample.
    """
    fig, axes = new(1, len(batches), size=(5.6, 3.4), sharex=True, sharey=True)
    kinds = {"prompt": palette.DONE["idle"], "labelled": COLOURS["gradients"], "padding": "white"}
    for ax, (name, rows) in zip(axes, batches.items(), strict=True):
        longest = max(sum(row) for row in rows)
        for place, (prompt, labelled) in enumerate(rows):
            left = 0
            for kind, width in zip(kinds, (prompt, labelled, longest - prompt - labelled), strict=True):
                hatch, edge = ("////", palette.OTHER) if kind == "padding" else ("", "white")
                ax.barh(place, width, 0.8, left=left, color=kinds[kind], hatch=hatch, edgecolor=edge, linewidth=0.5)
                left += width
        empty = 1 - sum(map(sum, rows)) / (longest * len(rows))
        ax.set(title=f"{name}\n{empty:.0%} padding", xlabel="tokens", yticks=[])
        ax.grid(axis="y", visible=False)
    axes[0].set_ylabel("samples of a batch")
    patches = [
        Patch(facecolor=colour, hatch="////" * (kind == "padding"), edgecolor=palette.OTHER, label=kind)
        for kind, colour in kinds.items()
    ]
    fig.legend(handles=patches, loc="outside lower center", ncols=3)
    return save(fig, "baichuan2_finetune_batches", f"Tokens of {' and '.join(batches)}: prompt, labelled and padding.")


def losses_on_groups(losses: Mapping[str, Mapping[int, float]]) -> Picture:
    """The loss of groups of rows over the steps of a fine-tune, on a logarithmic axis.

    Args:
        losses: group -> step -> loss.
    """
    fig, ax = new(size=(5.6, 4.0))
    for (group, by_step), (colour, marker) in zip(losses.items(), _GROUPS, strict=True):
        ax.plot(list(by_step), list(by_step.values()), color=colour, marker=marker, markersize=5, label=group)
    ends = sorted((list(by_step.items())[-1] for by_step in losses.values()), key=lambda end: end[1])
    for place, (step, last) in enumerate(ends):
        below = place > 0 and last < 1.4 * ends[place - 1][1]  # a number is as high as this on the axis
        above = place + 1 < len(ends) and ends[place + 1][1] < 1.4 * last
        apart = (8, 7 * (below - above))
        ax.annotate(f"{last:.2f}", (step, last), apart, textcoords="offset points", va="center")
    ax.set_yscale("log")
    ticks = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    last = max(step for by_step in losses.values() for step in by_step)
    ax.set(xlabel="optimizer step", ylabel="loss per labelled token (logarithmic)", xlim=(-2, 1.12 * last))
    fig.legend(loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{group} from {by_step[min(by_step)]:.2f} to {by_step[max(by_step)]:.2f}" for group, by_step in losses.items()
    )
    return save(fig, "baichuan2_finetune_loss", f"Loss by optimizer step: {values_text}.")


def losses_by_token(losses: Mapping[str, Mapping[int, Mapping[str, float]]]) -> Picture:
    """A panel for each group of rows: over the steps, the loss of each kind of token in a headline.

    Args:
        losses: group -> step -> kind of token -> loss.
    """
    fig, axes = new(1, len(losses), size=(5.6, 4.2), sharey=True)
    styles = ((palette.OTHER, ":", "s"), (COLOURS["gradients"], "--", "^"), (COLOURS["parameters"], "-", "o"))
    for ax, (group, by_step) in zip(axes, losses.items(), strict=True):
        kinds = list(next(iter(by_step.values())))
        for kind, (colour, line, marker) in zip(kinds, styles, strict=True):
            course = [of[kind] for of in by_step.values()]
            ax.plot(list(by_step), course, line, color=colour, marker=marker, markersize=4, label=kind)
        ax.set_yscale("log")
        ax.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        ax.minorticks_off()
        ax.set(title=group, xlabel="optimizer step")
    axes[0].set(ylabel="loss per token (logarithmic)", ylim=(0.004, None))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    ends = {group: by_step[max(by_step)] for group, by_step in losses.items()}
    values_text = "; ".join(f"{g}: " + ", ".join(f"{k} {v:.2g}" for k, v in of.items()) for g, of in ends.items())
    return save(fig, "baichuan2_finetune_tokens", f"Loss by kind of token at the end: {values_text}.")


def lora_by_stage(kept: Mapping[str, Mapping[int, float]], sent: Mapping[int, float], frozen: float) -> Picture:
    """What a rank keeps under each stage of ZeRO with LoRA, by kind, and what it sends in a step.

    Args:
        kept: kind -> stage -> bytes. sent: stage -> bytes. frozen: the share of the parameters that is frozen.
    """
    stages, of = list(sent), kept["parameters"]
    kinds = {
        "frozen parameters": [frozen * of[stage] for stage in stages],
        "parameters": [(1 - frozen) * of[stage] for stage in stages],
        **{kind: [kept[kind][stage] for stage in stages] for kind in ("gradients", "optimizer states")},
    }
    fig, ((left, right), (below, empty)) = new(2, 2, size=(5.6, 5.4), height_ratios=(3, 2))
    empty.set_axis_off()
    base, own = [0.0] * len(stages), [0.0] * len(stages)
    for kind, values in kinds.items():
        values = [value / 1e6 for value in values]
        style = {"color": _KINDS[kind], "label": kind, "edgecolor": "white", "linewidth": 0.5}
        left.bar(stages, values, 0.66, bottom=base, **style)
        base = [low + value for low, value in zip(base, values, strict=True)]
        if kind != "frozen parameters":
            below.bar(stages, values, 0.66, bottom=own, **style)
            own = [low + value for low, value in zip(own, values, strict=True)]
    sends = [value / 1e6 for value in sent.values()]
    right.bar(stages, sends, 0.66, color=COLOURS["communication"], zorder=2)
    panels = (
        (left, base, "kept by a rank, MB"),
        (right, sends, "sent in a step, MB"),
        (below, own, "of it for LoRA, MB"),
    )
    for ax, values, title in panels:
        for stage, value in zip(stages, values, strict=True):
            ax.annotate(f"{value:.2f}", (stage, value), (0, 3), textcoords="offset points", ha="center")
        ax.set(ylim=(0, 1.2 * max(values)), title=title, xlabel="ZeRO stage", xticks=stages)
        ax.grid(axis="x", visible=False)
    empty.legend(*left.get_legend_handles_labels(), loc="center")
    pairs = zip(stages, base, sends, strict=True)
    values_text = "; ".join(f"ZeRO-{stage} keeps {low:.2f} MB and sends {value:.2f}" for stage, low, value in pairs)
    return save(fig, "baichuan2_finetune_zero", f"With LoRA on two ranks: {values_text}.")


def losses_by_format(losses: Mapping[tuple[str, int], float]) -> Picture:
    """Losses of short formats for a few largest activations; a loss that is no number is labelled so.

    Args:
        losses: (format, largest activation) -> loss.
    """
    formats, sizes = (list(dict.fromkeys(part)) for part in zip(*losses, strict=True))
    fig, ax = new(size=(5.6, 2.6))
    for row, name in enumerate(formats):
        for size in sizes:
            loss = losses[name, size]
            good = math.isfinite(loss)
            ax.plot([size], [row], "o" if good else "X", color=COLOURS["holds" if good else "fails"], markersize=11)
            label = f"loss {loss:.3f}" if good else "no number"
            ax.annotate(label, (size, row), (0, 9), textcoords="offset points", ha="center")
    ax.axvline(65_504, color="black", linestyle="--", linewidth=1.2)
    ax.annotate("fp16 ends: 65,504", (65_504, len(formats) - 0.45), (-5, 0), textcoords="offset points", ha="right")
    ax.set_xscale("log")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    ax.set_yticks(range(len(formats)), formats)
    ax.set(
        xlabel="largest activation (logarithmic)",
        xlim=(min(sizes) / 2.5, max(sizes) * 2.5),
        ylim=(len(formats) - 0.3, -0.7),
    )
    ax.grid(visible=False)
    values_text = "; ".join(f"{name} at {size:,}: {loss:.3f}" for (name, size), loss in losses.items())
    return save(fig, "baichuan2_finetune_formats", f"Losses by format and largest activation: {values_text}.")


#: The same model before training, and trained in three ways.
_WAYS = (("white", "////"), (palette.KNOWN[0], ""), (palette.KNOWN[1], ""), (palette.NEW, ""))


def losses_of_ways(losses: Mapping[str, Mapping[str, float]]) -> Picture:
    """A cluster of bars for each group of texts, one bar for each way to train, on a logarithmic axis.

    Args:
        losses: way -> group -> loss at the end.
    """
    groups = list(next(iter(losses.values())))
    fig, ax = new(size=(5.6, 4.4))
    high = 0.84 / len(losses)
    for place, ((way, of), (colour, hatch)) in enumerate(zip(losses.items(), _WAYS, strict=False)):
        at = [row + (place - (len(losses) - 1) / 2) * high for row in range(len(groups))]
        ax.barh(at, list(of.values()), 0.9 * high, color=colour, hatch=hatch, edgecolor=palette.OTHER, label=way)
        for y, value in zip(at, of.values(), strict=True):
            ax.annotate(f"{value:.2g}", (value, y), (5, 0), textcoords="offset points", va="center")
    ax.set_xscale("log")
    ax.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    ax.minorticks_off()
    ax.set_yticks(range(len(groups)), [group.replace(" of ", "\nof ").replace("plain ", "plain\n") for group in groups])
    most, least = (end(value for of in losses.values() for value in of.values()) for end in (max, min))
    ax.set(
        xlabel="loss per labelled token (logarithmic)",
        xlim=(min(least, 0.01) / 2, 3 * most),
        ylim=(len(groups) - 0.45, -0.55),
    )
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=2)
    values_text = "; ".join(f"{way}: " + ", ".join(f"{g} {v:.2g}" for g, v in of.items()) for way, of in losses.items())
    return save(fig, "baichuan2_finetune_ways", f"Losses at the end. {values_text}.")


def costs_of_ways(ways: Mapping[str, tuple[Mapping[str, float], float]], frozen: float) -> Picture:
    """What a rank keeps, by kind, and what it sends in a step, for LoRA (the first way) and for all parameters.

    Args:
        ways: way -> (kind -> bytes kept, bytes sent). frozen: the share of LoRA's parameters that is frozen.
    """
    fig, (left, right) = new(2, 1, size=(5.6, 4.2))
    names, ends = list(ways), dict.fromkeys(ways, 0.0)
    for row, (way, (kept, sent)) in enumerate(ways.items()):
        kinds = dict(kept)
        if not row:
            of = kinds["parameters"]
            kinds = {"frozen parameters": frozen * of, **kinds, "parameters": (1 - frozen) * of}
        for kind in _KINDS:
            width = kinds.get(kind, 0.0) / 1e6
            left.barh(row, width, 0.6, left=ends[way], color=_KINDS[kind], edgecolor="white", linewidth=0.5)
            ends[way] += width
        right.barh(row, sent / 1e6, 0.6, color=COLOURS["communication"])
        for ax, value in ((left, ends[way]), (right, sent / 1e6)):
            ax.annotate(f"{value:.2f}", (value, row), (5, 0), textcoords="offset points", va="center")
    for ax, most, title in (
        (left, max(ends.values()), "kept by a rank, MB"),
        (right, max(sent for _, sent in ways.values()) / 1e6, "sent by a rank in a step, MB"),
    ):
        ax.set_yticks(range(len(names)), names)
        ax.set(title=title, xlim=(0, 1.15 * most), ylim=(len(names) - 0.5, -0.5))
        ax.grid(axis="y", visible=False)
    fig.legend(handles=[Patch(facecolor=c, label=k) for k, c in _KINDS.items()], loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{way} keeps {ends[way]:.2f} MB and sends {sent / 1e6:.2f}" for way, (_, sent) in ways.items()
    )
    return save(fig, "baichuan2_finetune_costs", f"Under ZeRO-2: {values_text}.")


def hours_by_length(
    tokens: Sequence[float], hours: Mapping[str, Sequence[float]], marked: Mapping[str, float]
) -> Picture:
    """Planned hours of a job over the mean length of its samples, a line for each kind of job.

    Args:
        marked: what to say at a length -> tokens; on the first line.
    """
    fig, ax = new(size=(5.6, 3.6))
    styles = ("-", "--", ":")
    for (name, values), style in zip(hours.items(), styles, strict=False):
        ax.plot(tokens, values, style, color="black", label=name)
    first = next(iter(hours.values()))
    for name, at in marked.items():
        place = min(range(len(tokens)), key=lambda i: abs(tokens[i] - at))
        ax.plot([tokens[place]], [first[place]], "o", color=COLOURS["compute"], markersize=8)
        label, point = f"{name}, {first[place]:.1f} h", (tokens[place], first[place])
        ax.annotate(label, point, (10, -4), textcoords="offset points", va="top")
    ax.set(xlabel="tokens of a sample, on average", ylabel="hours", ylim=(0, None), xlim=(0, 1.55 * max(tokens)))
    ax.legend(loc="upper left")
    return save(
        fig, "baichuan2_finetune_hours", "Planned hours over the mean length of the samples: a straight line, nearly."
    )
