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


def kept_against_products(
    kept: Mapping[str, float], products: Mapping[str, float], expected: Mapping[str, tuple[float, float]]
) -> Picture:
    """What a block keeps for its backward pass against the products of a step, a point for each way to recompute.

    Args:
        kept: way -> activations. products: way -> times those without recomputation. expected: way -> both predicted.
    """
    fig, ax = new(size=(5.8, 3.9))
    for way, value in kept.items():
        ax.scatter(*expected[way], s=190, facecolors="none", edgecolors="black", linewidths=1.2, zorder=2)
        ax.scatter(value, products[way], s=60, color=COLOURS["activations"], zorder=3)
        text = f"{way}\n{value:.1f}; {products[way]:.2f}"
        ax.annotate(text, (value, products[way]), (11, 2), textcoords="offset points", va="center")
    ax.set(xlabel="kept by a block, activations", ylabel="products of a step, × those without")
    ax.set(xlim=(0, 1.32 * max(kept.values())), ylim=(0.96, 1.04 * max(products.values())))
    handles = [
        ax.scatter([], [], s=60, color=COLOURS["activations"], label="measured"),
        ax.scatter([], [], s=130, facecolors="none", edgecolors="black", label="predicted"),
    ]
    ax.legend(handles=handles, loc="upper right")
    values_text = "; ".join(f"{way}: {value:.1f} activations, {products[way]:.2f}" for way, value in kept.items())
    return save(
        fig, "zero_r_recomputed", f"Kept by a block and products of a step, by what is recomputed. {values_text}."
    )


def kept_and_sent(
    kept: Mapping[str, float], sent: Mapping[str, float], expected: Mapping[str, tuple[float, float]], ranks: int
) -> Picture:
    """What a block keeps on a tensor-parallel rank and what it sends, a bar for each way to keep its input.

    Args:
        kept: way -> activations. sent: way -> φ. expected: way -> both predicted.
    """
    fig, axes = new(2, 1, size=(5.8, 1.9 + 0.66 * len(kept)), sharey=True)
    panels = (
        (kept, 0, "activations", "kept for each block on a rank, activations"),
        (sent, 1, "communication", "sent for each block by a rank, φ"),
    )
    places, names = np.arange(len(kept)), list(kept)
    for ax, (measured, which, colour, label) in zip(axes, panels, strict=True):
        values, outline = [measured[name] for name in names], [expected[name][which] for name in names]
        ax.barh(places, values, 0.55, color=COLOURS[colour])
        ax.barh(places, outline, 0.7, fill=False, edgecolor="black", linewidth=1.2)
        for place, (value, line) in enumerate(zip(values, outline, strict=True)):
            at = (max(value, line), place)
            ax.annotate(f"{value:.3g}", at, (5, 0), textcoords="offset points", va="center")
        ax.set_yticks(places, names)
        ax.set(xlabel=f"{label} (N = {ranks})", xlim=(0, 1.14 * max(values + outline)), ylim=(len(names) - 0.4, -0.6))
        ax.grid(axis="y", visible=False)
    handles = [Patch(color=COLOURS["activations"], label="kept"), Patch(color=COLOURS["communication"], label="sent")]
    fig.legend(handles=[*handles, _OUTLINE], loc="outside lower center", ncols=3)
    values_text = "; ".join(f"{name}: {kept[name]:.3g} kept, {sent[name]:.3g} φ sent" for name in names)
    return save(fig, "zero_r_partitioned", f"For each block, on one of {ranks} tensor-parallel ranks: {values_text}.")


def beside_products(shares: Mapping[int, tuple[float, float]]) -> Picture:
    """What tensor parallelism's 12φ and P_a's φ take of the time of a block's products, by the hidden size."""
    fig, ax = new(size=(5.8, 1.4 + 0.42 * len(shares)))
    places = np.arange(len(shares))
    twelve, more = (100 * np.array([of[at] for of in shares.values()]) for at in (0, 1))
    ax.barh(places, twelve, 0.55, color=COLOURS["communication"], label="12φ")
    style = {"color": COLOURS["receive"], "hatch": "///", "edgecolor": "white"}
    ax.barh(places, more, 0.55, left=twelve, **style, label="P_a's φ")
    for place, (all_reduces, gather) in enumerate(zip(twelve, more, strict=True)):
        text = f"{all_reduces:.0f} + {gather:.1f} %"
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # or the line goes through the number
        at = (all_reduces + gather, place)
        ax.annotate(text, at, (5, 0), textcoords="offset points", va="center", bbox=behind)
    ax.axvline(100, color="black", linewidth=1.6, label="the block's products", zorder=1)
    ax.set_yticks(places, [f"h = {size:,}" for size in shares])
    ax.set(xlabel="of the time of a block's products, %", xlim=(0, 1.25 * max(twelve + more)))
    ax.set_ylim(len(shares) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    values_text = "; ".join(f"h = {size:,}: {100 * of[0]:.0f} % and {100 * of[1]:.1f} %" for size, of in shares.items())
    return save(fig, "zero_r_beside_products", f"12φ and P_a's φ, of the time of a block's products: {values_text}.")


def can_leave(ways: Mapping[str, Sequence[float]], sizes: Sequence[int]) -> Picture:
    """How many activations can go to the host while their block computes, over the hidden size, a line for each link.

    Args:
        ways: link -> activations, one for each of ``sizes``.
    """
    fig, ax = new(size=(5.8, 3.6))
    for (name, numbers), line in zip(ways.items(), ("-", "--"), strict=True):
        ax.plot(sizes, numbers, line, color=COLOURS["communication"], linewidth=2.2, label=name)
    for number, label, end in ((1, "a checkpoint", "right"), (17, "all that a block keeps", "left")):
        ax.axhline(number, color=COLOURS["activations"], linewidth=1.8)
        at = (sizes[-1 if end == "right" else 0], number)
        ax.annotate(label, at, (0, 4), textcoords="offset points", ha=end)
    ax.set(
        xlabel="hidden size h, s = 4,096",
        ylabel="activations that can leave",
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
    ax.set(ylabel="milliseconds for each sample", xlabel=" \n ", ylim=(0, 1.15 * max(values + outline)))
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
    fig, ax = new(size=(5.8, 1.2 + 0.95 * len(rows)))
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
        ax.text(12, row - 0.3, f"{name}: {end}", va="bottom")
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
    ax.set(xlabel="to the host for each block, activations", xlim=(0, 1.14 * max(values + outline)))
    ax.set_ylim(len(measured) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = ", ".join(f"{name.replace(chr(10), ' ')} {value:.3g}" for name, value in measured.items())
    return save(fig, "zero_r_host", f"Activations to the host for each block: {values_text}.")
