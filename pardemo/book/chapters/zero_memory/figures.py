"""Pictures of *ZeRO's memory*: what ZeRO-1, 2 and 3 keep, what a step holds moment by moment."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.lines import Line2D

from pardemo.draw import palette
from pardemo.draw.charts import bars, key, patch, words
from pardemo.draw.style import COLOURS, Picture, new, save

MODEL_STATES = ("parameters", "gradients", "optimizer states")
_FILLS = {"parameters": ("parameters", ""), "gradients": ("gradients", "//"),
          "optimizer states": ("optimizer states", "..")}  # fmt: skip


def kept_by_stage(states: Mapping[str, Mapping[str, float]], expected: Sequence[float], peaks: Mapping[str, float],
                  ranks: int) -> Picture:  # fmt: skip
    """Stacked bars of bytes for each parameter, measured, with the formulas' sums as outlines, and the step's peak.

    Args:
        states: "plain", "ZeRO-1", … -> kind -> bytes for each parameter.
        expected: the sums that are predicted, in the same order.
        peaks: the same names -> the most that a rank holds in the step.
    """
    fig, ax = new(size=(5.8, 4.0))
    series = {kind: {way: kinds[kind] for way, kinds in states.items()} for kind in MODEL_STATES}
    summary = bars(ax, series, dict(zip(states, expected, strict=True)), stacked=True, fills=_FILLS)
    sums = [sum(kinds[kind] for kind in MODEL_STATES) for kinds in states.values()]
    more = np.subtract([peaks[way] for way in states], sums)
    ax.bar(range(len(sums)), more, 0.22, bottom=sums, color=palette.OTHER, zorder=2, label="in the step, for a moment")
    for index, (total, peak) in enumerate(zip(sums, peaks.values(), strict=True)):
        above = {"xytext": (0, 3), "textcoords": "offset points"}
        ax.annotate(f"{total:.3g}", (index - 0.33, total), fontweight="bold", **above)
        ax.annotate(f"{peak:.3g}", (index - 0.11, peak), **above)
    ax.set_yticks(range(0, int(max(peaks.values())) + 1, 4))
    ax.set(ylabel=f"bytes for each parameter (N = {ranks})", ylim=(0, 1.12 * max(peaks.values())))
    ax.legend()
    return save(
        fig, "zero_memory_kept",
        f"Bytes that a rank keeps for each parameter, measured on {ranks} ranks: {summary}; in the step at most "
        f"{', '.join(f'{peak:.3g}' for peak in peaks.values())}.",
    )  # fmt: skip


def held_over_a_step(courses: Mapping[str, tuple[Sequence[Mapping[str, int]], Mapping[str, int]]], params: int,
                     name: str = "zero_memory_held", larger: str = "") -> Picture:  # fmt: skip
    """Plots what a rank holds besides Adam's states while a step goes on, a panel for each way, all on one scale.

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
    entries = {"parameters": "parameters", "gradients": "gradients", "for a moment": palette.OTHER}
    key(fig, *(patch(label, kind) for label, kind in entries.items()), ncols=3)
    alt = f"Bytes for each parameter that a rank holds besides Adam's states; the peaks: {words(peaks)}."
    return save(fig, name, alt)


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


def room_on_a_gpu(states: Mapping[int, Mapping[str, float]], gathered: Mapping[int, float],
                  in_step: Mapping[int, float], sample_bytes: float, room_bytes: float) -> Picture:  # fmt: skip
    """Model states on a GPU, and as many samples' activations as fit beside them, a bar for each of ZeRO-1, 2 and 3.

    Args:
        states: 1, 2, 3 -> kind -> bytes. gathered: 3 -> bytes of layers that are whole for a moment.
        in_step: 1, 2, 3 -> the most that the step holds, in bytes for each of 7.5·10⁹ parameters.
    """
    fig, ax = new(size=(5.8, 3.6))
    names = {stage: f"ZeRO-{stage}" for stage in states}
    series = {kind: {names[stage]: kinds[kind] for stage, kinds in states.items()} for kind in MODEL_STATES}
    series["gathered layers"] = {names[stage]: gathered.get(stage, 0.0) for stage in states}
    counts = {
        stage: int((room_bytes - sum(kinds[name] for kinds in series.values())) // sample_bytes)
        for stage, name in names.items()
    }
    fills = _FILLS | {"gathered layers": (palette.OTHER, "")}
    for sample in range(max(counts.values())):
        series[f"_{sample}"] = {names[stage]: sample_bytes * (sample < count) for stage, count in counts.items()}
        fills[f"_{sample}"] = "activations"
    bars(ax, series, per=1e9, across=True, stacked=True, fills=fills)
    for index, stage in enumerate(states):
        peak = in_step[stage] * 7.5
        ax.plot([peak, peak], [index - 0.4, index + 0.4], color="black", linewidth=2, zorder=4)
        at = (room_bytes / 1e9, index)
        ax.annotate(f"{counts[stage]} samples", at, (6, 0), textcoords="offset points", va="center")
    line = {"color": palette.VERDICTS["fails"], "linewidth": 2}
    ax.axvline(room_bytes / 1e9, label="92 % of the memory", zorder=3, **line)
    ax.set(xlabel="GB on each GPU", xlim=(0, 1.17 * room_bytes / 1e9))
    peaks = Line2D([], [], color="black", linewidth=2, label="peak in the step")
    key(fig, patch("a sample's activations", "activations"), peaks)
    summary = ", ".join(f"ZeRO-{stage} {count}" for stage, count in counts.items())
    return save(fig, "zero_memory_room", f"Samples whose activations fit beside the model states on a GPU: {summary}.")
