"""Pictures of *Hybrid parallelism*: which rank is in which group, what each dimension sends, Megatron's scaling."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from pardemo.cluster import Cluster
from pardemo.draw import palette
from pardemo.draw.charts import bars
from pardemo.draw.rule import PARTS as PARTS_layouts
from pardemo.draw.rule import what_each_adds
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.draw.traffic import square
from pardemo.groups import ParallelDims
from pardemo.planner.layouts.choice.procedure import Candidate, taken_of
from pardemo.planner.layouts.published.megatron_2019 import PARTS

#: Why a step takes longer than with linear scaling -> its colour and its hatch, which tells the two kinds of
#: communication apart.
STEP_PARTS = dict(zip(PARTS, (("compute", "..."), ("communication", "///"), ("communication", "xxx")), strict=True))
_CURVES = (("parameter server", "o"), ("ring", "s"), ("torch", "^"), ("every few steps", "D"))


def map_of_groups(layout: ParallelDims, host_gpus: int, shown: int) -> Picture:
    """The ranks of the first ``shown`` nodes, a row for each.

    A colour is a data-parallel group, a frame a tensor-parallel one. The ranks of rank 0's data-parallel
    group have their numbers.
    """
    size = shown * host_gpus
    part = np.array([layout.coordinates(rank)["tp"] for rank in range(size)]).reshape(shown, host_gpus)
    fig, ax = new(size=(6.2, 0.28 * shown + 0.9))
    ax.imshow(part, cmap=ListedColormap(palette.RANKS[: layout.tp]), vmin=-0.5, vmax=layout.tp - 0.5, aspect="auto")
    for rank in (rank for rank in layout.groups("dp")[0] if rank < size):
        ax.text(rank % host_gpus, rank // host_gpus, rank, ha="center", va="center", color=palette.INK)
    for first in (group[0] for group in layout.groups("tp") if group[0] < size):
        corner = (first % host_gpus - 0.5, first // host_gpus - 0.5)
        ax.add_patch(Rectangle(corner, layout.tp, 1, fill=False, edgecolor=palette.INK, linewidth=1.2))
    ax.set(xlabel="GPU of the node", ylabel="node", xticks=range(0, host_gpus, 2), yticks=range(shown))
    ax.grid(visible=False)
    groups = f"of {layout.size // layout.tp} tensor-parallel groups of {layout.tp} and "
    groups += f"{layout.size // layout.dp} data-parallel groups of {layout.dp}"
    return save(fig, "hybrid_parallel_map", f"The first {shown} of {layout.size // host_gpus} nodes: {groups}.")


def sent_by_dimension(expected: Mapping[str, float], measured: Mapping[str, float]) -> Picture:
    """MiB that a rank sends along each dimension; outlines are the predictions."""
    fig, ax = new(size=(6.0, 3.2))
    values, outline = ([sent[name] / 2**20 for name in measured] for sent in (measured, expected))
    bars(ax, list(measured), {"communication": values}, {"communication": outline})
    for place, value in enumerate(values):
        ax.annotate(f"{value:.1f} MiB", (place, value), (0, 4), textcoords="offset points", ha="center")
    ax.set(ylabel="sent by rank 0 in a step, MiB", ylim=(0, 1.15 * max(values + outline)))
    counted = Patch(facecolor=COLOURS["communication"], hatch="///", edgecolor="white", label="counted")
    ax.legend(handles=[counted, Patch(fill=False, edgecolor="black", label="predicted")], loc="upper right")
    values_text = ", ".join(f"{name} {value:.1f} MiB" for name, value in zip(measured, values, strict=True))
    return save(fig, "hybrid_parallel_cube", f"Sent by rank 0 in a step: {values_text}; outlines are predicted.")


def sent_by_megatron(of_gpu: Mapping[str, float], of_node: Mapping[str, float]) -> Picture:
    """GB that a GPU sends in a step by dimension, and that a node sends to others by order of the ranks; by formula.

    Args:
        of_gpu: dimension -> bytes. of_node: order -> bytes.
    """
    fig, axes = new(1, 2, size=(6.4, 2.8))
    for ax, sent, title in ((axes[0], of_gpu, "a GPU sends, GB"), (axes[1], of_node, "a node sends to others, GB")):
        values = [nbytes / 1e9 for nbytes in sent.values()]
        ax.bar(range(len(values)), values, 0.6, color=COLOURS["communication"], hatch="///", edgecolor="white")
        for place, value in enumerate(values):
            label = f"{value:.0f}" if value > 10 else f"{value:.1g}"
            ax.annotate(label, (place, value), (0, 3), textcoords="offset points", ha="center")
        ax.set_xticks(range(len(values)), list(sent))
        ax.set(title=title, ylim=(0, 1.15 * max(values)))
        ax.grid(axis="x", visible=False)
    values_text = ", ".join(
        f"{name.replace(chr(10), ' ')} {nbytes / 1e9:.2f}" for name, nbytes in (of_gpu | of_node).items()
    )
    return save(
        fig, "hybrid_parallel_megatron", f"GB sent in a step of Megatron's 8.3B model, by formula: {values_text}."
    )


def orders_of_ranks(matrices: Mapping[str, Sequence[Sequence[float]]], cluster: Cluster) -> Picture:
    """MiB from each rank to each other, for each order of the ranks; frames are nodes."""
    fig, axes = new(1, len(matrices), size=(3.2 * len(matrices), 3.7))
    most = max(float(np.max(matrix)) for matrix in matrices.values()) / 2**20
    crossing = {}
    for ax, (name, matrix) in zip(axes, matrices.items(), strict=True):
        values = np.asarray(matrix, dtype=float) / 2**20
        square(ax, values.round(), cluster, most, size=8)
        where = np.arange(cluster.size) // cluster.ranks_per_host
        crossing[name] = values[where[:, None] != where].sum()
        ax.set(xlabel="to rank", ylabel="from rank", title=f"{name}: {crossing[name]:.0f} MiB cross")
    values_text = "; ".join(f"{name}: {value:.0f} MiB between nodes" for name, value in crossing.items())
    return save(fig, "hybrid_parallel_orders", f"MiB from rank to rank; frames are nodes. {values_text}.")


def parts_of_steps(excess: Mapping[int, tuple[Mapping[str, float], float]]) -> Picture:
    """How much longer a step takes than with linear scaling: bars by the planner, diamonds from the paper.

    The number over a bar is the paper's less the planner's.

    Args:
        excess: GPUs -> (part of :data:`STEP_PARTS` -> per cent, per cent in all in the paper).
    """
    fig, ax = new(size=(6.4, 4.6))
    places, bottom = np.arange(len(excess)), np.zeros(len(excess))
    for part, (kind, hatch) in STEP_PARTS.items():
        values = np.array([parts[part] for parts, _ in excess.values()])
        style = {"color": COLOURS[kind], "hatch": hatch, "edgecolor": "white"}
        ax.bar(places, values, 0.62, bottom=bottom, label=f"{part}, by the planner", **style)
        bottom += values
    points = [paper for _, paper in excess.values()]
    ax.scatter(places, points, s=60, marker="D", color=palette.PREDICTED, zorder=3, label="all of it, in the paper")
    for place, (computed, in_paper) in enumerate(zip(bottom, points, strict=True)):
        missed = round(in_paper - computed)
        label = f"{missed:+}".replace("-", "−") if missed else "0"
        ax.annotate(label, (place, max(computed, in_paper)), (0, 8), textcoords="offset points", ha="center")
    kinds = [
        "MP" if gpus < 64 else "MP+DP" if parts[PARTS[-1]] else "MP+DP,\nhidden" for gpus, (parts, _) in excess.items()
    ]
    names = [f"{gpus}\n{kind}" for gpus, kind in zip(excess, kinds, strict=True)]
    ax.set_xticks(places, names)
    ax.set(xlabel="GPUs", ylabel="longer than linear, per cent", ylim=(0, 1.25 * max(*bottom, *points)))
    ax.grid(axis="x", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    pairs = zip(excess, bottom, points, strict=True)
    values_text = "; ".join(f"{gpus} GPUs {computed:.0f}, paper {in_paper:.0f}" for gpus, computed, in_paper in pairs)
    return save(fig, "hybrid_parallel_parts", f"Per cent longer than with linear scaling: {values_text}.")


def all_reduces_of_replicas(
    paper: Mapping[int, Sequence[float]], planned: Mapping[str, Mapping[int, float]]
) -> Picture:
    """How much longer a step of 64 replicas takes than of one: in the paper, and by the planner without overlap.

    Args:
        paper: GPUs -> (lowest, as read, highest) per cent of a linear step that its figure allows. planned: how
            gradients are sent -> GPUs -> per cent.
    """
    fig, ax = new(size=(6.4, 3.6))
    places, wide = np.arange(len(paper)), 0.26
    low, read, high = np.array(list(paper.values())).T
    ax.bar(places - wide, read, wide, yerr=(read - low, high - read), capsize=4, color=palette.OTHER, label="the paper")
    for number, ((name, values), hatch) in enumerate(zip(planned.items(), ("", "///"), strict=True)):
        style = {"color": COLOURS["communication"], "hatch": hatch, "edgecolor": "white"}
        ax.bar(places + number * wide, list(values.values()), wide, label=f"by the planner, {name}", **style)
    ax.set_xticks(places, list(paper))
    ax.set(xlabel="GPUs", ylabel="data-parallel all-reduce,\nper cent of a linear step")
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper left")
    values_text = "; ".join(
        f"{gpus} GPUs: paper {values[1]:.1f}, "
        + ", ".join(f"{name} {by_gpus[gpus]:.1f}" for name, by_gpus in planned.items())
        for gpus, values in paper.items()
    )
    return save(
        fig, "hybrid_parallel_sums", f"The data-parallel all-reduce in per cent of a linear step. {values_text}."
    )


def shares_of_peak(rows: Mapping[str, tuple[float, float]]) -> Picture:
    """MFU and HFU of GPUs (or cores), in per cent of their peak: arithmetic for the model, and for recomputed layers.

    Args:
        rows: name -> (MFU, HFU) as shares.
    """
    fig, ax = new(size=(6.2, 0.62 * len(rows) + 1.2))
    places = np.arange(len(rows))
    mfu, hfu = (100 * np.array(side) for side in zip(*rows.values(), strict=True))
    ax.barh(places, mfu, 0.55, color=COLOURS["compute"], label="for the model: MFU")
    style = {"color": COLOURS["compute"], "hatch": "///", "edgecolor": "white"}
    ax.barh(places, hfu - mfu, 0.55, left=mfu, label="recomputed: with it HFU", **style)
    ax.barh(places, 100 - hfu, 0.55, left=hfu, color=COLOURS["wait"], label="not used")
    for place, (value, whole) in enumerate(zip(mfu, hfu, strict=True)):
        ax.text(value / 2, place, f"{value:.0f}", ha="center", va="center", color=palette.ink_on(COLOURS["compute"]))
        if whole > value:
            ax.text(whole + 1.5, place, f"HFU {whole:.0f}", ha="left", va="center", color=palette.INK)
    ax.set_yticks(places, list(rows))
    ax.set(xlabel="per cent of the peak", xlim=(0, 100), ylim=(len(rows) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    values_text = ", ".join(f"{name}: MFU {a:.0f}, HFU {b:.0f}" for name, a, b in zip(rows, mfu, hfu, strict=True))
    return save(fig, "hybrid_parallel_mfu", f"Per cent of the peak: {values_text}.".replace("\n", " "))


def weak_scaling(
    lines: Mapping[str, Mapping[int, float]], points: Mapping[str, Mapping[int, float]],
    paper: Mapping[str, Mapping[int, float]],
) -> Picture:  # fmt: skip
    """Per cent of linear scaling against t: lines are formulas, full points measured here, open ones the paper's.

    The upper panel has the curves that are in the paper, the lower one all others and the first of ``lines``.

    Args:
        lines, points, paper: name of a curve -> t -> share of linear scaling; the paper has only some curves.
    """
    fig, axes = new(2, 1, size=(6.2, 7.6), sharex=True, height_ratios=(1.2, 1))
    sizes = sorted({t for curve in lines.values() for t in curve})
    for (name, line), (kind, marker) in zip(lines.items(), _CURVES, strict=False):
        style = {"marker": marker, "color": COLOURS[kind], "zorder": 3}
        panels = [axes[0]] * (name in paper) + [axes[1]] * (name not in paper or name == next(iter(lines)))
        for ax in panels:
            at = np.array([sizes.index(t) for t in line])
            ax.plot(at, [100 * value for value in line.values()], color=COLOURS[kind], linewidth=1.6)
            measured = [100 * points[name][t] for t in line]
            ax.scatter(at, measured, s=40, label=name, **style)
            if name in paper and ax is axes[0]:
                paper_shares = [100 * paper[name][t] for t in line]
                paper_style = style | {"facecolors": "none", "edgecolors": COLOURS[kind], "linewidths": 1.6}
                del paper_style["color"]
                ax.scatter(at, paper_shares, s=150, **paper_style)
    lowest = 100 * min(min(of[name].values()) for of in (lines, points) for name in paper)
    floor = min(60, int(10 * ((lowest - 2) // 10)))
    axes[0].set(ylim=(floor, 103), ylabel="per cent of linear", title=f"the axis begins at {floor}")
    axes[1].set(
        ylim=(0, 106), xlabel="tensor-parallel ranks t", ylabel="per cent of linear", title="the axis begins at 0"
    )
    axes[1].set_xticks(range(len(sizes)), sizes)
    marker_style = {"marker": "o", "linestyle": "", "color": palette.OTHER}
    kinds = [
        Line2D([], [], label="measured here", **marker_style),
        Line2D([], [], label="the paper", markersize=12, fillstyle="none", **marker_style),
        Line2D([], [], color=palette.OTHER, label="formula"),
    ]
    for ax in axes:
        ax.set_ylabel("per cent of linear")
        handles, _ = ax.get_legend_handles_labels()
        ax.legend(handles=[*handles, *kinds] if ax is axes[0] else handles, loc="lower left")
    values_text = "; ".join(
        f"{name} " + ", ".join(f"{100 * v:.0f} at {t}" for t, v in shares.items()) for name, shares in points.items()
    )
    return save(fig, "hybrid_parallel_scaling", f"Per cent of linear scaling, measured here: {values_text}.")


#: Dimension -> the field of a layout, and its colour in the drawing of the cube; there the pipeline has the page's own.
_DIMENSIONS = {
    "tensor, t": ("tp", COLOURS["activations"]),
    "stages, p": ("pp", palette.OTHER),
    "replicas, d": ("dp", COLOURS["gradients"]),
}


def strong_scaling(planned: Mapping[int, float], paper: Mapping[int, float]) -> Picture:
    """Strong scaling: how many times as fast as one GPU t GPUs are, by the planner and in the paper."""
    fig, ax = new(size=(5.8, 3.2))
    sizes = [1, *planned]
    ax.plot(sizes, sizes, ":", color=palette.OTHER, linewidth=1.6, label="t times as fast")
    ax.plot(sizes, [1, *planned.values()], color=palette.PREDICTED, linewidth=1.6, label="the planner")
    ax.scatter([1, *paper], [1, *paper.values()], s=46, color=COLOURS["compute"], zorder=3, label="the paper")
    for t, value in paper.items():
        ax.annotate(f"{value:g}", (t, value), (0, -14), textcoords="offset points", ha="center")
    for t, value in planned.items():
        ax.annotate(f"{value:.1f}", (t, value), (9, -6), textcoords="offset points", ha="left")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(sizes, sizes)
    ax.minorticks_off()
    ax.set(xlabel="GPUs that share the 1.2B model, t", ylabel="times as fast as one")
    ax.set(xlim=(0.9, 10), ylim=(0.8, 10))
    ax.legend(loc="upper left")
    values_text = "; ".join(f"{t} GPUs {value:.2f}, paper {paper[t]:g}" for t, value in planned.items())
    return save(fig, "hybrid_parallel_strong", f"Times as fast as one GPU, by the planner: {values_text}.")


def kinds_of_layouts(fitting: Sequence[Candidate], job: str) -> Picture:
    """What the best layout of each kind adds to the time of the multiplications.

    A kind is what the replicas share, where no layer is cut; else which cuts there are.

    Args:
        fitting: what fits, the one that adds least first. job: in words.
    """
    kinds: dict[tuple, Candidate] = {}
    for candidate in fitting:
        layout = candidate.layout
        uncut = layout.tp == layout.pp == 1
        key = (layout.sharding, layout.shard_group) if uncut else (layout.tp > 1, layout.pp > 1)
        kinds.setdefault(key, candidate)
    taken = taken_of(fitting)
    shown = {_kind(one): one.adds for one in kinds.values()} | {_kind(taken): taken.adds}
    return what_each_adds(dict(sorted(shown.items(), key=_total)), "hybrid_parallel_kinds", _kind(taken), job)


def _total(item: tuple[str, Mapping[str, float]]) -> float:
    return sum(item[1].values())


def _kind(candidate: Candidate) -> str:
    return candidate.kind + (", recomputed" if candidate.layout.recompute == "full" else "")


def chosen_layouts(chosen: Mapping[str, Candidate]) -> Picture:
    """For each job what the rule's layout adds, and how its GPUs are split.

    Args:
        chosen: job -> what the rule takes.
    """
    fig, (left, right) = new(1, 2, size=(6.8, 0.52 * len(chosen) + 2.0), sharey=True, width_ratios=(1, 2))
    places, ends = np.arange(len(chosen)), np.zeros(len(chosen))
    for part, (label, colour, hatch) in PARTS_layouts.items():
        values = np.array([100 * one.adds[part] for one in chosen.values()])
        if values.any():
            left.barh(
                places, values, 0.58, left=ends, color=colour, hatch=hatch, edgecolor="white", label=f"{label} adds"
            )
        ends += values
    for place, end in zip(places, ends, strict=True):
        left.annotate(f"{end:.0f} %", (end, place), (4, 0), textcoords="offset points", va="center")
    left.set(xlabel="added, %", xlim=(0, 1.6 * max(ends.max(), 1)))
    ends = np.zeros(len(chosen))
    for name, (field, colour) in _DIMENSIONS.items():
        sizes = [getattr(one.layout, field) for one in chosen.values()]
        wide = np.log2(sizes)
        right.barh(places, wide, 0.58, left=ends, color=colour, edgecolor="white", label=name)
        for place, (size, begin, length) in enumerate(zip(sizes, ends, wide, strict=True)):
            if size > 1:
                style = {"ha": "center", "va": "center", "color": palette.ink_on(colour)}
                text = f"{name[-1]} {size}" if size > 2 else "2"  # its box is too narrow for the letter
                right.text(begin + length / 2, place, text, **style)
        ends += wide
    for place, (end, one) in enumerate(zip(ends, chosen.values(), strict=True)):
        shared = one.kind.rsplit(", ", 1)[-1] if one.layout.dp > 1 else "one replica"
        text = shared + ("\nrecomputed" if one.layout.recompute == "full" else "")
        right.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center")
    ticks = range(0, int(ends.max()) + 1, 3)
    right.set_xticks(list(ticks), [f"{2**tick:,}" for tick in ticks])
    right.set(xlabel="GPUs", xlim=(0, 1.6 * ends.max()))
    left.set_yticks(places, [",\n".join(name.rsplit(", ", 1)) for name in chosen])
    left.set_ylim(len(chosen) - 0.5, -0.5)
    for ax in (left, right):
        ax.grid(axis="y", visible=False)
    handles, labels = (
        [*a, *b] for a, b in zip(left.get_legend_handles_labels(), right.get_legend_handles_labels(), strict=True)
    )
    fig.legend(handles, labels, loc="outside lower center", ncols=3)
    layouts_text = "; ".join(f"{name}: {one.layout}, adds {one.added:.0%}" for name, one in chosen.items())
    return save(fig, "hybrid_parallel_chosen", f"Layouts that the rule takes. {layouts_text}.")
