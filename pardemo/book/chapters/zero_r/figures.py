"""Pictures of *ZeRO-R*: what fills a GPU beside the model states, and what each answer leaves of it."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.book.chapters.zero_r.drawings import Filled
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

#: What lies in a GPU's memory -> its colour and hatch.
_BYTES = {
    "model states": (COLOURS["optimizer states"], ""),
    "activations": (COLOURS["activations"], ""),
    "one block at work": (COLOURS["activations"], "///"),
    "buffer": (palette.SHADES["buckets"], ""),
}
_OUTLINE = Patch(fill=False, edgecolor="black", label="predicted")


def remaining_bytes(
    rows: Mapping[str, Mapping[str, float]], room: float, small: Mapping[str, Mapping[str, float]] | None = None
) -> Picture:
    """GB in a GPU by what they are, a bar for each way to train; a line is the GPU's memory.

    Args:
        rows: way -> one of model states, activations, one block at work, buffer -> bytes. room: bytes of the GPU.
        small: more rows, below on a scale of their own.
    """
    panels = [rows, small] if small else [rows]
    count = sum(map(len, panels))
    ratios = {"height_ratios": [len(panel) for panel in panels]} if small else {}
    fig, axes = new(len(panels), 1, size=(5.8, 1.0 + 0.5 * len(panels) + 0.5 * count), squeeze=False, **ratios)
    sums, entries = {}, {}
    for ax, panel in zip(axes[:, 0], panels, strict=True):
        places, left = np.arange(len(panel)), np.zeros(len(panel))
        for kind, (colour, hatch) in _BYTES.items():
            values = np.array([of.get(kind, 0.0) / 1e9 for of in panel.values()])
            if values.any():
                ax.barh(places, values, 0.62, left=left, color=colour, hatch=hatch, edgecolor="white", label=kind)
            left += values
        most = 1.12 * max(*left, room / 1e9 if panel is rows else 0)
        if panel is rows:
            ax.axvline(room / 1e9, color="black", linewidth=1.6, label=f"the GPU's {room / 1e9:.1f} GB")
        for place, value in enumerate(left):
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # or the line goes through the number
            ax.annotate(f"{value:.1f}", (value, place), (5, 0), textcoords="offset points", va="center", bbox=behind)
        ax.set_yticks(places, list(panel))
        ax.set(xlim=(0, most), ylim=(len(panel) - 0.4, -0.6), xlabel="on each GPU, GB")
        ax.grid(axis="y", visible=False)
        sums |= dict(zip(panel, left, strict=True))
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    fig.legend(entries.values(), entries, loc="outside lower center", ncols=3)
    values_text = "; ".join(f"{name.replace(chr(10), ' ')} {value:.1f}" for name, value in sums.items())
    return save(fig, f"zero_r_remaining_{count}", f"GB on each GPU: {values_text}; it has {room / 1e9:.0f}.")


def kept_against_flops(
    kept: Mapping[str, float], flops: Mapping[str, float], expected: Mapping[str, tuple[float, float]]
) -> Picture:
    """What a block keeps for its backward pass against the operations of a step, a point for each way to recompute.

    Args:
        kept: way -> activations. flops: way -> times those without recomputation. expected: way -> both predicted.
    """
    fig, ax = new(size=(5.8, 3.9))
    for way, value in kept.items():
        ax.scatter(*expected[way], s=190, facecolors="none", edgecolors="black", linewidths=1.2, zorder=2)
        ax.scatter(value, flops[way], s=60, color=COLOURS["activations"], zorder=3)
        text = f"{way}\n{value:.1f}; {flops[way]:.2f}"
        ax.annotate(text, (value, flops[way]), (11, 2), textcoords="offset points", va="center")
    ax.set(xlabel="kept by a block, A", ylabel="operations of a step, × those without")
    ax.set(xlim=(0, 1.32 * max(kept.values())), ylim=(0.96, 1.04 * max(flops.values())))
    handles = [
        ax.scatter([], [], s=60, color=COLOURS["activations"], label="measured"),
        ax.scatter([], [], s=130, facecolors="none", edgecolors="black", label="predicted"),
    ]
    ax.legend(handles=handles, loc="upper right")
    values_text = "; ".join(f"{way}: {value:.1f} activations, {flops[way]:.2f}" for way, value in kept.items())
    return save(
        fig, "zero_r_recomputed", f"Kept by a block and operations of a step, by what is recomputed. {values_text}."
    )


def can_leave(ways: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> Picture:
    """How many activations can go to the host while their block computes, over the hidden size, a line for each link.

    Args:
        ways: link -> activations, one for each of ``sizes``.
    """
    fig, ax = new(size=(5.8, 3.6))
    for (name, numbers), line in zip(ways.items(), ("-", "--"), strict=True):
        ax.plot(sizes, numbers, line, color=COLOURS["communication"], linewidth=2.2, label=name)
    for number, label, end in ((1, "a checkpoint: 1 A", "right"), (17, "all that a block keeps: 17 A", "left")):
        ax.axhline(number, color=COLOURS["activations"], linewidth=1.8)
        at = (sizes[-1 if end == "right" else 0], number)
        ax.annotate(label, at, (0, 4), textcoords="offset points", ha=end)
    ax.set(
        xlabel="width h, s = 4,096",
        ylabel="A that can leave",
        ylim=(0, 1.1 * max(map(max, ways.values()))),
    )
    ax.legend(loc="center left")
    values_text = "; ".join(
        f"{name}: {of[0]:.1f} at h = {sizes[0]:,}, {of[-1]:.1f} at {sizes[-1]:,}" for name, of in ways.items()
    )
    return save(
        fig,
        "zero_r_can_leave",
        f"Activations that can leave while their block computes, by the hidden size. {values_text}.",
    )


def seconds_of_samples(measured: Mapping[tuple[str, int], float], expected: Mapping[tuple[str, int], float]) -> Picture:
    """Milliseconds of a step for each of its samples, by (what there is to compute, batch); outlines are predicted."""
    fig, ax = new(size=(5.8, 3.2))
    groups, names = list(measured), list(dict.fromkeys(name for name, _ in measured))
    places = np.arange(len(groups)) + 0.5 * np.array([names.index(name) for name, _ in groups])
    values, outline = ([1e3 * of[group] for group in groups] for of in (measured, expected))
    ax.bar(places, values, 0.62, color=COLOURS["compute"], label="measured")
    ax.bar(places, outline, 0.76, fill=False, edgecolor="black", linewidth=1.2, label="predicted")
    for place, value, line in zip(places, values, outline, strict=True):
        ax.annotate(f"{value:.0f}", (place, max(value, line)), (0, 4), textcoords="offset points", ha="center")
    ax.set_xticks(places, [f"batch {batch}" for _, batch in groups])
    for name in names:
        middle = np.mean([place for place, group in zip(places, groups, strict=True) if group[0] == name])
        ax.annotate(name, (middle, 0), (0, -24), textcoords="offset points", ha="center", va="top")
    ax.set(ylabel="ms for each sample", xlabel=" \n ", ylim=(0, 1.15 * max(values + outline)))
    ax.grid(axis="x", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = ", ".join(f"{name}, batch {batch}: {1e3 * value:.0f}" for (name, batch), value in measured.items())
    return save(fig, "zero_r_samples", f"Milliseconds for each sample: {values_text}.")


def buffers(measured: Mapping[tuple[str, int], float], expected: Mapping[tuple[str, int], float]) -> Picture:
    """MiB that summing gradients makes beside them, by (kind of buffer, layers of the model); lines are predicted."""
    fig, ax = new(size=(5.8, 3.2))
    styles = (("s", "--", palette.SHADES["buckets"]), ("o", "-", COLOURS["gradients"]), ("x", "", palette.PREDICTED))
    sizes = sorted({layers for _, layers in measured})
    for name, (marker, line, colour) in zip(dict.fromkeys(name for name, _ in measured), styles, strict=False):
        if line:
            ax.plot(sizes, [expected[name, n] / 2**20 for n in sizes], line, color=colour, linewidth=1.6)
        style = {"s": 56, "color": colour}
        if marker == "o":  # a ring, in which the cross is seen
            style = {"s": 170, "facecolor": "none", "edgecolor": colour, "linewidth": 2}
        mebibytes = [measured[name, n] / 2**20 for n in sizes]
        ax.scatter(sizes, mebibytes, marker=marker, label=name, zorder=3, **style)
    ax.set(xlabel="layers of the model", ylabel="made beside the gradients, MiB")
    ax.set_xticks(sizes)
    ax.set_ylim(bottom=0)
    ax.legend(title="lines: predicted", loc="upper left")
    values_text = ", ".join(
        f"{name}, {layers} layers: {value / 2**20:.1f}" for (name, layers), value in measured.items()
    )
    return save(fig, "zero_r_buffers", f"MiB made beside the gradients. {values_text}.")


def segments(rows: Mapping[str, Filled], room: int) -> Picture:
    """Where tensors lie in the segments that the allocator has asked of CUDA, a row for each way.

    Args:
        rows: way -> what became of it. room: MiB of the memory.
    """
    fig, ax = new(size=(5.8, 1.2 + 1.1 * len(rows)))
    for row, (name, outcome) in enumerate(rows.items()):
        begin = 0
        for size, taken in outcome.segments:
            ax.broken_barh([(begin, size)], (row - 0.2, 0.5), facecolor=COLOURS["idle"], edgecolor="black", linewidth=1)
            ax.text(begin + size / 2, row + 0.32, f"a segment of {size}", ha="center", va="top")
            spans = [(begin + place, length) for _, place, length in taken]
            style = {"facecolor": COLOURS["activations"], "edgecolor": "white", "linewidth": 0.8}
            ax.broken_barh(spans, (row - 0.2, 0.5), **style)
            begin += size
        end = "all layers pass" if outcome.failed is None else f"{outcome.wanted} MiB for an {outcome.failed}: no room"
        ax.text(12, row - 0.25, f"{name}: {end}", va="bottom")
    ax.axvline(room, color="black", linewidth=1.6)
    ax.set(xlabel="MiB asked of CUDA, one segment after the other", xlim=(0, 1.01 * room), yticks=[])
    ax.set_ylim(len(rows) - 0.4, -0.75)
    ax.grid(visible=False)
    handles = [Patch(facecolor=COLOURS["activations"], label="checkpoints"),
               Patch(facecolor=COLOURS["idle"], edgecolor="black", label="free in a segment")]  # fmt: skip
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{name}: {outcome.taken} MiB taken of {outcome.reserved} in {len(outcome.segments)} segments, "
        + ("all layers pass" if outcome.failed is None else f"no room for {outcome.wanted}")
        for name, outcome in rows.items()
    )
    return save(fig, "zero_r_segments", f"Memory at the end of the forward pass. {values_text}.")


def host_traffic(measured: Mapping[str, float], expected: Mapping[str, float]) -> Picture:
    """Activations that go to the host for each block, by the way they are chosen; outlines are predicted."""
    fig, ax = new(size=(5.8, 1.1 + 0.55 * len(measured)))
    places, values = np.arange(len(measured)), list(measured.values())
    outline = [expected[name] for name in measured]
    ax.barh(places, values, 0.55, color=COLOURS["communication"], label="measured")
    ax.barh(places, outline, 0.7, fill=False, edgecolor="black", linewidth=1.2, label="predicted")
    for place, value in enumerate(values):
        at = (max(value, outline[place]), place)
        ax.annotate(f"{value:.3g}", at, (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, list(measured))
    ax.set(xlabel="to the host for each block, A", xlim=(0, 1.14 * max(values + outline)))
    ax.set_ylim(len(measured) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = ", ".join(f"{name.replace(chr(10), ' ')} {value:.3g}" for name, value in measured.items())
    return save(fig, "zero_r_host", f"Activations to the host for each block: {values_text}.")


def step_and_peak(
    seconds: Mapping[str, float], predicted: Mapping[str, float], peaks: Mapping[str, float], computing_s: float
) -> Picture:
    """Milliseconds of a step and what is kept at its peak, a bar for each way; outlines are predicted.

    Args:
        seconds, predicted: way -> seconds of a step. peaks: way -> A at the peak. computing_s: of the step without
            any wait, as a line.
    """
    fig, axes = new(
        2, 1, size=(5.8, 2.3 + 0.42 * (len(seconds) + len(peaks))), height_ratios=[len(seconds), len(peaks)]
    )
    for ax, values, colour, label, unit in (
        (axes[0], {way: 1e3 * of for way, of in seconds.items()}, "compute", "milliseconds of a step", "ms"),
        (axes[1], peaks, "activations", "activations on the device at the peak, A", "A"),
    ):
        places = np.arange(len(values))
        ax.barh(places, list(values.values()), 0.55, color=COLOURS[colour])
        most = max(values.values())
        if unit == "ms":
            outline = [1e3 * predicted[way] for way in values]
            ax.barh(places, outline, 0.7, fill=False, edgecolor="black", linewidth=1.2)
            ax.axvline(1e3 * computing_s, color="black", linestyle="--", linewidth=1.2, zorder=1)
            most = max(most, *outline)
        for place, (way, value) in enumerate(values.items()):
            end = max(value, 1e3 * predicted[way]) if unit == "ms" else value
            behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            at = (end, place)
            ax.annotate(f"{value:.0f}", at, (6, 0), textcoords="offset points", va="center", bbox=behind)
        ax.set_yticks(places, list(values))
        ax.set(xlabel=label, xlim=(0, 1.14 * most), ylim=(len(values) - 0.4, -0.6))
        ax.grid(axis="y", visible=False)
    handles = [Patch(color=COLOURS["compute"], label="step"), Patch(color=COLOURS["activations"], label="peak")]
    fig.legend(handles=[*handles, _OUTLINE], loc="outside lower center", ncols=3)
    values_text = "; ".join(f"{way} {1e3 * value:.0f} ms" for way, value in seconds.items())
    peaks_text = "; ".join(f"{way} {value:.0f} A" for way, value in peaks.items())
    return save(fig, "zero_r_step_and_peak", f"A step takes: {values_text}. At the peak it keeps: {peaks_text}.")


def offloaded_steps(seconds: Mapping[str, float], parts: Mapping[str, Mapping[str, float]]) -> Picture:
    """Milliseconds of a step with Adam on the host, a bar for each link, by what the step is predicted to wait for.

    Args:
        seconds: link -> measured. parts: link -> what the step does -> predicted seconds.
    """
    fig, ax = new(size=(5.8, 1.9 + 0.6 * len(seconds)))
    places, left = np.arange(len(seconds)), np.zeros(len(seconds))
    styles = {
        "computation": (COLOURS["compute"], ""),
        "gradients out": (COLOURS["gradients"], "//"),
        "Adam": (COLOURS["optimizer states"], ""),
        "parameters back": (COLOURS["parameters"], "\\\\"),
    }
    for kind, (colour, hatch) in styles.items():
        values = np.array([1e3 * of[kind] for of in parts.values()])
        ax.barh(places, values, 0.55, left=left, color=colour, hatch=hatch, edgecolor="white", label=kind)
        left += values
    measured = [1e3 * of for of in seconds.values()]
    ax.scatter(measured, places, s=52, color="black", zorder=3, label="measured")
    for place, value in enumerate(measured):
        at = (max(value, left[place]), place)
        ax.annotate(f"{value:.0f}", at, (8, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, list(seconds))
    ax.set(xlabel="milliseconds of a step; bars are predicted", xlim=(0, 1.16 * max(*left, *measured)))
    ax.set_ylim(len(seconds) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    values_text = "; ".join(f"{name}: {value:.0f} ms" for name, value in zip(seconds, measured, strict=True))
    return save(fig, "zero_r_adam_on_host", f"A step with Adam on the host takes {values_text}.")
