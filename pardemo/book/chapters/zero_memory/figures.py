"""Pictures of *ZeRO's memory*: what ZeRO-1, 2 and 3 keep, what a step holds moment by moment, smaller states."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pardemo.book.chapters.zero_memory.drawings_bytes import states_by_ranks
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, draw, new, save
from pardemo.formulas import memory
from pardemo.project import is_headless

MODEL_STATES = ("parameters", "gradients", "optimizer states")
_HATCHES = {"parameters": "", "gradients": "//", "optimizer states": "..", "everything else": ""}


def kept_by_stage(states: Mapping[str, Mapping[str, float]], expected: Sequence[float], peaks: Mapping[str, float],
                  ranks: int) -> Picture:  # fmt: skip
    """Stacked bars of bytes for each parameter, measured, with the formulas' sums as outlines, and the step's peak.

    Args:
        states: "plain", "ZeRO-1", … -> kind -> bytes for each parameter.
        expected: the sums that are predicted, in the same order.
        peaks: the same names -> the most that a rank holds in the step.
    """
    fig, ax = new(size=(5.8, 4.0))
    bottom = [0.0] * len(states)
    for kind in MODEL_STATES:
        values = [of[kind] for of in states.values()]
        style = {"color": COLOURS[kind], "hatch": _HATCHES[kind], "edgecolor": "white"}
        ax.bar(range(len(states)), values, 0.6, bottom=bottom, label=kind, zorder=2, **style)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    ax.bar(
        range(len(states)), expected, 0.68, fill=False, edgecolor="black", linewidth=1.3, label="predicted", zorder=3
    )
    for place, (way, total) in enumerate(zip(states, bottom, strict=True)):
        ax.bar([place], [peaks[way] - total], 0.22, bottom=total, color=palette.OTHER, zorder=2,
               label="in the step, for a moment" if place == 0 else None)  # fmt: skip
        above = {"xytext": (0, 3), "textcoords": "offset points"}
        ax.annotate(f"{total:.3g}", (place - 0.33, total), fontweight="bold", **above)
        ax.annotate(f"{peaks[way]:.3g}", (place - 0.11, peaks[way]), **above)
    ax.set_xticks(range(len(states)), list(states))
    ax.set_yticks(range(0, int(max(peaks.values())) + 1, 4))
    ax.set(ylabel=f"bytes for each parameter (N = {ranks})", ylim=(0, 1.12 * max(peaks.values())))
    ax.grid(axis="x", visible=False)
    ax.legend()
    kept_text = ", ".join(
        f"{stage.replace(chr(10), ' ')} {total:.3g}" for stage, total in zip(states, bottom, strict=True)
    )
    peaks_text = ", ".join(f"{peak:.3g}" for peak in peaks.values())
    return save(
        fig,
        "zero_memory_kept",
        f"Bytes that a rank keeps for each parameter, measured on {ranks} ranks: {kept_text}; in the step at most "
        f"{peaks_text}.",
    )


def held_over_a_step(courses: Mapping[str, tuple[Sequence[Mapping[str, int]], Mapping[str, int]]], params: int,
                     name: str = "zero_memory_held", larger: str = "") -> Picture:  # fmt: skip
    """What a rank holds besides Adam's states while a step goes on, a panel for each way, all on one scale.

    Args:
        courses: way -> states (bytes by kind after each change) and marks, of a ``MemoryTimeline``.
        params: the parameters that the bytes are divided by.
        name: of the file. larger: a way that is drawn once more below, on a scale of its own.
    """
    panels = [*courses.items()] + ([(larger, courses[larger])] if larger else [])
    heights = [1.4 if larger else 2.2] * len(courses) + [2.4] * bool(larger)
    fig, axes = new(len(panels), size=(5.8, sum(heights) + 0.4), height_ratios=heights)
    peaks: dict[str, float] = {}
    for number, (ax, (way, (states, marks))) in enumerate(zip(axes, panels, strict=True)):
        kinds = [[state.get(kind, 0) / params for state in states] for kind in ("parameters", "gradients")]
        kinds.append([state["activations"] / params for state in states])
        kinds = [[*values, values[-1]] for values in kinds]  # the last one's end
        fills = [COLOURS["parameters"], COLOURS["gradients"], palette.OTHER]
        at, ends = _by_phase(len(states), marks)
        ax.stackplot(at, kinds, colors=fills, step="post", zorder=2)
        peaks[way] = max(map(sum, zip(*kinds, strict=True)))
        for phase, (phase_name, end) in enumerate(ends.items()):
            ax.axvline(phase, color="black", linewidth=0.8, zorder=3)
            ax.annotate(phase_name, ((phase + end) / 2, 1), (0, -3), xycoords=("data", "axes fraction"),
                        textcoords="offset points", ha="center", va="top")  # fmt: skip
        again = number == len(courses)
        title = f"{way} drawn larger" if again else f"{way}: at most {peaks[way]:.3g} beside Adam's"
        ax.set(title=title, xlim=(0, max(ends.values())), xticks=[])
        ax.grid(axis="x", visible=False)
    for ax in axes[: len(courses)]:
        ax.set_ylim(0, 1.25 * max(peaks.values()))
        ax.set_yticks(range(0, int(1.25 * max(peaks.values())) + 1, 2))
    if larger:
        axes[-1].set_ylim(0, 1.25 * peaks[larger])
    fig.supylabel("bytes for each parameter", fontsize="medium")
    fills = {"parameters": COLOURS["parameters"], "gradients": COLOURS["gradients"], "for a moment": palette.OTHER}
    handles = [Patch(color=colour, label=kind) for kind, colour in fills.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    values_text = ", ".join(f"{way} {peak:.3g}" for way, peak in peaks.items())
    return save(
        fig, name, f"Bytes for each parameter that a rank holds besides Adam's states; the peaks: {values_text}."
    )


def _by_phase(count: int, marks: Mapping[str, int]) -> tuple[list[float], dict[str, float]]:
    """The place of each change and of the end, all phases equally wide; and where each phase ends.

    Phases without changes are left out.
    """
    begins = [*marks.values(), count]
    lengths = {name: end - begin for name, begin, end in zip(marks, begins, begins[1:], strict=False)}
    lengths = {name: length for name, length in lengths.items() if length > 1}
    at = [phase + k / length for phase, length in enumerate(lengths.values()) for k in range(length)]
    at += [float(len(lengths))] * (count + 1 - len(at))
    return at, {name: phase + 1.0 for phase, name in enumerate(lengths)}


def losses_by_states(losses: Mapping[str, Sequence[float]], lost: Mapping[str, str]) -> Picture:
    """Losses of one training with optimizer states in several formats.

    Args:
        losses: format -> a loss for each step. lost: format -> what to say of a training that leaves the picture.
    """
    fig, ax = new(size=(5.8, 4.2))
    styles = ("-", "--", (0, (1, 2)), "-.", "-")
    dark, red, light, _ = palette.WAYS.values()
    colours = (palette.PREDICTED, dark, light, red, palette.OTHER)  # light dots show on what they lie on
    top = 1.25 * max(of[0] for of in losses.values())
    for (way, values), style, colour in zip(losses.items(), styles, colours, strict=False):
        mean = [sum(values[max(0, k - 4) : k + 1]) / len(values[max(0, k - 4) : k + 1]) for k in range(len(values))]
        label = f"{way}: {lost[way]}" if way in lost else f"{way}: ends at {sum(values[-10:]) / 10:.2f}"
        ax.plot([min(value, 2 * top) if value == value else 2 * top for value in mean], color=colour, linestyle=style,
                linewidth=2, label=label)  # fmt: skip
    ax.set(xlabel="step", ylabel="loss, smoothed", ylim=(0, top))
    ax.legend(title="Adam's states are kept in")
    values_text = "; ".join(f"{way} {lost.get(way, f'{sum(values[-10:]) / 10:.2f}')}" for way, values in losses.items())
    return save(fig, "zero_memory_low_bits", f"Loss by what Adam's states are kept in; at the end: {values_text}.")


def room_on_a_gpu(states: Mapping[int, Mapping[str, float]], gathered: Mapping[int, float],
                  in_step: Mapping[int, float], sample_bytes: float, room_bytes: float,
                  params: float = 7.5e9) -> Picture:  # fmt: skip
    """Model states on a GPU, and as many samples' activations as fit beside them, a bar for each of ZeRO-1, 2 and 3.

    Args:
        states: 1, 2, 3 -> kind -> bytes. gathered: 3 -> bytes of layers that are whole for a moment.
        in_step: 1, 2, 3 -> the most that the step holds, in bytes for each of ``params`` parameters.
    """
    fig, ax = new(size=(5.8, 3.6))
    counts = {}
    for place, (stage, kinds) in enumerate(states.items()):
        left, styles = 0.0, {kind: (COLOURS[kind], _HATCHES[kind]) for kind in MODEL_STATES}
        pieces = [(kinds[kind], *styles[kind], kind) for kind in MODEL_STATES]
        pieces.append((gathered.get(stage, 0.0), palette.OTHER, "", "gathered layers"))
        counts[stage] = int((room_bytes - sum(nbytes for nbytes, *_ in pieces)) // sample_bytes)
        pieces += [(sample_bytes, COLOURS["activations"], "", "a sample's activations")] * counts[stage]
        for nbytes, colour, hatch, _ in pieces:
            ax.barh([place], [nbytes / 1e9], 0.55, left=left, color=colour, hatch=hatch, edgecolor="white", zorder=2)
            left += nbytes / 1e9
        peak = in_step[stage] * params / 1e9
        ax.plot([peak, peak], [place - 0.4, place + 0.4], color="black", linewidth=2, zorder=4)
        ax.annotate(
            f"{counts[stage]} samples", (room_bytes / 1e9, place), (6, 0), textcoords="offset points", va="center"
        )
    ax.axvline(room_bytes / 1e9, color=palette.VERDICTS["fails"], linewidth=2, zorder=3)
    ax.set_yticks(range(len(states)), [f"ZeRO-{stage}" for stage in states])
    ax.set(xlabel="GB on each GPU", xlim=(0, 1.17 * room_bytes / 1e9), ylim=(len(states) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    fills = {**{kind: COLOURS[kind] for kind in MODEL_STATES}, "gathered layers": palette.OTHER,
             "a sample's activations": COLOURS["activations"]}  # fmt: skip
    handles = [Patch(facecolor=colour, hatch=_HATCHES.get(kind, ""), edgecolor="white", label=kind)
               for kind, colour in fills.items()]  # fmt: skip
    handles += [Line2D([], [], color="black", linewidth=2, label="peak in the step"),
                Line2D([], [], color=palette.VERDICTS["fails"], linewidth=2, label="92 % of the memory")]  # fmt: skip
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    values_text = ", ".join(f"ZeRO-{stage} {count}" for stage, count in counts.items())
    return save(
        fig, "zero_memory_room", f"Samples whose activations fit beside the model states on a GPU: {values_text}."
    )


def saved_by_ranks(small: memory.StateBytes, stages: Sequence[int] = (1, 2, 3)) -> Picture:
    """Per cent of all model states that smaller states of Adam save, over N: a line for each of ZeRO-1, 2 and 3."""
    fig, ax = new(size=(5.8, 2.9))
    ranks, shares = [2**k for k in range(11)], {}
    styles, colours = ("-", "--", "-."), list(palette.WAYS.values())
    for stage, style, colour in zip(stages, styles, colours, strict=False):
        of = (memory.ADAM, small)
        sums = [[memory.model_states_bytes(10**6, n, stage, states) for n in ranks] for states in of]
        shares[stage] = [100 * (1 - less / full) for full, less in zip(*sums, strict=True)]
        ax.plot(ranks, shares[stage], style, color=colour, linewidth=2, label=f"ZeRO-{stage}")
        if stage != 2:
            at = (64, shares[stage][6])
            ax.annotate(f"{at[1]:.2g} %", at, (0, 4 if stage == 3 else -12), textcoords="offset points", ha="center")
    ax.set_xscale("log", base=2)
    ax.set_xticks([1, 8, 64, 1024], ["1", "8", "64", "1024"])
    ax.minorticks_off()
    ax.set(xlabel="N, data-parallel ranks", ylabel="of all model states, saved, %", ylim=(-4, 45))
    ax.legend(loc="center right")
    values_text = "; ".join(
        f"ZeRO-{stage} {of[0]:.2g} on one rank, {of[-1]:.2g} on 1024" for stage, of in shares.items()
    )
    return save(
        fig, "zero_memory_saved", f"Per cent of the model states that smaller states of Adam save: {values_text}."
    )


def states_chart(billions: float, world_size: int, k: int, stage: int) -> Picture:
    """Bars of the model states for Ψ = ``billions``·10⁹, plain and under ZeRO-1, 2 and 3, the chosen one outlined."""
    fig, ax = new(size=(7.5, 3.2))
    bottom = [0.0] * 4
    states = memory.StateBytes(optimizer=k)
    rows = [memory.model_states(round(billions * 1e9), world_size, s, states) for s in memory.STAGES]
    for kind in ("parameters", "gradients", "optimizer states"):
        values = [row[kind] / 1e9 for row in rows]
        ax.bar(range(4), values, 0.6, bottom=bottom, color=COLOURS[kind], label=kind, edgecolor="white")
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    ax.bar([stage], [bottom[stage]], 0.68, fill=False, edgecolor="black", linewidth=1.8)
    for place, total in enumerate(bottom):
        ax.annotate(f"{total:,.1f}", (place, total), ha="center", va="bottom")
    ax.set_xticks(range(4), ["plain", "ZeRO-1", "ZeRO-2", "ZeRO-3"])
    ax.set(ylabel="GB per rank", ylim=(0, max(bottom) * 1.15), title=f"Ψ = {billions:.3g}B, N = {world_size}, K = {k}")
    ax.grid(axis="x", visible=False)
    ax.legend()
    values_text = ", ".join(f"{total:,.1f}" for total in bottom)
    return draw(
        fig,
        f"Model states of {billions:.3g}·10⁹ parameters on {world_size} ranks, plain and under ZeRO-1, 2 and 3: "
        f"{values_text} GB each.",
    )


def states_explorer(billions: float = 7.5, world_size: int = 64, k: int = 12, stage: int = 2) -> Any:
    """Sliders and a chart that follows them; where no Python runs to redraw it, in a page, a player over N."""
    if is_headless():
        return states_by_ranks(billions, start=world_size)
    import ipywidgets as widgets
    from IPython.display import display

    def redraw(**chosen: Any) -> None:
        display(states_chart(**chosen))  # interactive shows what is displayed, not what is returned

    return widgets.interactive(
        redraw,
        # 0.025 of a decade: a step lies on 10^0.875 = 7.499, the paper's 7.5
        billions=widgets.FloatLogSlider(
            billions, min=-1, max=3, step=0.025, description="Ψ, 10⁹", readout_format=".3g"
        ),
        world_size=widgets.IntSlider(world_size, min=1, max=1024, description="N"),
        k=widgets.Dropdown(options=[12, 8, 6, 4], value=k, description="K"),
        stage=widgets.IntSlider(stage, min=0, max=3, description="ZeRO stage"),
    )
