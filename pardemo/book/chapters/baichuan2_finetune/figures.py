"""Pictures of *Baichuan2: the fine-tune*: what LoRA saves, batches and their padding, losses on three groups, ZeRO's stages, hours."""

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


def full_and_lora(states: Mapping[str, Mapping[str, float]], room: float) -> Picture:
    """Bars of model states in GB, one for each way to train; a line is what a GPU holds.

    Args:
        states: way -> kind -> bytes. room: bytes of the GPU.
    """
    fig, ax = new(size=(5.6, 2.8))
    left = dict.fromkeys(states, 0.0)
    for kind, colour in _KINDS.items():
        values = [states[way].get(kind, 0.0) / 1e9 for way in states]
        ax.barh(list(states), values, 0.55, left=list(left.values()), color=colour, label=kind, edgecolor="white")
        left = {way: left[way] + value for way, value in zip(states, values, strict=True)}
    for way, total in left.items():
        label = f"{total:,.1f} GB"
        if "frozen parameters" in states[way]:  # what is trained is too thin to be seen
            label += f", {total - states[way]['frozen parameters'] / 1e9:.1f} of them for A and B"
        ax.annotate(label, (total, way), (7, 0), textcoords="offset points", va="center")
    ax.plot([room / 1e9] * 2, [-0.85, 0.55], color="black", linestyle="--", linewidth=1.2)  # above the words
    ax.annotate(f"{room / 1e9:.0f} GB: one GPU", (room / 1e9, -0.62), (4, 0), textcoords="offset points", va="center")
    ax.invert_yaxis()
    ax.set(xlabel="GB", xlim=(0, 1.22 * max(left.values())), ylim=(1.5, -0.85))
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=2, fontsize=10)
    values_text = ", ".join(f"{way} {total:.1f} GB" for way, total in left.items())
    return save(
        fig, "baichuan2_finetune_states", f"Model states of the 13B: {values_text}; a GPU holds {room / 1e9:.0f} GB."
    )


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
        step, last = list(by_step.items())[-1]
        ax.annotate(f"{last:.2f}", (step, last), (8, 0), textcoords="offset points", va="center")
    ax.set_yscale("log")
    ticks = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    last = max(step for by_step in losses.values() for step in by_step)
    ax.set(xlabel="optimizer step", ylabel="loss per labelled token (logarithmic)", xlim=(-2, 1.12 * last))
    ax.legend(loc="lower left")
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
        (below, own, "of it for A and B, MB"),
    )
    for ax, values, title in panels:
        for stage, value in zip(stages, values, strict=True):
            ax.annotate(f"{value:.2f}", (stage, value), (0, 3), textcoords="offset points", ha="center")
        ax.set(ylim=(0, 1.2 * max(values)), title=title, xlabel="ZeRO's stage", xticks=stages)
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


def planned_memory(lines: Mapping[str, float], room: float) -> Picture:
    """What the planner expects on a GPU, line by line, in one bar, beside what there is room for."""
    fig, ax = new(size=(5.6, 3.3))
    left, shades = 0.0, {**palette.KEPT, **palette.SHADES}
    drawn = {name: nbytes for name, nbytes in lines.items() if name in shades}
    drawn["program"] = sum(lines.values()) - sum(drawn.values())
    for name, nbytes in drawn.items():
        if nbytes >= 2e8:
            style = {"color": shades.get(name, palette.OTHER), "hatch": "" if name in shades else "///"}
            label = f"{name} {nbytes / 1e9:.1f}"
            ax.barh([0], [nbytes / 1e9], 0.5, left=left, edgecolor="white", label=label, **style)
            left += nbytes / 1e9
    ax.annotate(f"{left:.0f} GB", (left, 0), (6, 0), textcoords="offset points", va="center")
    ax.axvline(room / 1e9, color="black", linestyle="--", linewidth=1.2)
    ax.annotate(f"room: {room / 1e9:.1f} GB", (room / 1e9, 0.36), (-5, 0), textcoords="offset points", ha="right")
    ax.set(xlabel="GB on each GPU at the peak", yticks=[], xlim=(0, 1.05 * room / 1e9), ylim=(-0.4, 0.5))
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=2, fontsize=10)
    values_text = ", ".join(f"{name} {nbytes / 1e9:.1f}" for name, nbytes in drawn.items() if nbytes >= 2e8)
    return save(fig, "baichuan2_finetune_planned", f"Planned GB on a GPU: {values_text}; room {room / 1e9:.1f}.")


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
        label, point = f"{name}\n{first[place]:.1f} h", (tokens[place], first[place])
        ax.annotate(label, point, (10, -4), textcoords="offset points", va="top")
    ax.set(xlabel="tokens of a sample, on average", ylabel="hours", ylim=(0, None), xlim=(0, 1.3 * max(tokens)))
    ax.legend(loc="upper left")
    return save(
        fig, "baichuan2_finetune_hours", "Planned hours over the mean length of the samples: a straight line, nearly."
    )
