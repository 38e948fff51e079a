"""Pictures of *Hybrid parallelism*: which rank is in which group, what each dimension sends, Megatron's scaling."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from pardemo.cluster import Cluster
from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, bars, curves, key, log, words
from pardemo.draw.rule import added, what_each_adds
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.draw.traffic import square
from pardemo.groups import ParallelDims
from pardemo.planner.layouts.procedure import Candidate, taken_of
from pardemo.planner.layouts.published.megatron_2019 import PARTS

#: Why a step takes longer than with linear scaling; hatches tell the two kinds of communication apart.
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
    return bar_chart(
        "hybrid_parallel_cube", "Sent by rank 0 in a step: {}; outlines are predicted.",
        {"sent by rank 0 in a step, MiB": {"series": {"counted": measured}, "outline": expected}},
        fills={"counted": "communication"}, per=2**20, text="{:.1f} MiB",
    )  # fmt: skip


def sent_by_megatron(of_gpu: Mapping[str, float], of_node: Mapping[str, float]) -> Picture:
    """GB that a GPU sends in a step by dimension, and that a node sends to others by order of the ranks; by formula.

    Args:
        of_gpu: dimension -> bytes. of_node: order -> bytes.
    """
    return bar_chart(
        "hybrid_parallel_megatron", "GB sent in a step of Megatron's 8.3B model, by formula: {}.",
        {"a GPU sends, GB": {"series": {"communication": of_gpu}},
         "a node sends to others, GB": {"series": {"communication": of_node}}},
        per=1e9, text=lambda value: f"{value:.0f}" if value > 10 else f"{value:.2g}", size=(6.4, 2.8),
    )  # fmt: skip


def orders_of_ranks(matrices: Mapping[str, Sequence[Sequence[float]]], cluster: Cluster) -> Picture:
    """MiB from each rank to each other, for each order of the ranks; frames are nodes."""
    fig, axes = new(1, len(matrices), size=(3.2 * len(matrices), 3.7))
    most = max(float(np.max(matrix)) for matrix in matrices.values()) / 2**20
    where, crossing = np.arange(cluster.size) // cluster.ranks_per_host, {}
    for ax, (name, matrix) in zip(axes, matrices.items(), strict=True):
        values = np.asarray(matrix, dtype=float) / 2**20
        square(ax, values.round(), cluster, most, size=8)
        crossing[name] = values[where[:, None] != where].sum()
        ax.set(xlabel="to rank", ylabel="from rank", title=f"{name}: {crossing[name]:.0f} MiB cross")
    told = words(crossing, "{:.0f} MiB between nodes")
    return save(fig, "hybrid_parallel_orders", f"MiB from rank to rank; frames are nodes. {told}.")


def parts_of_steps(excess: Mapping[int, tuple[Mapping[str, float], float]]) -> Picture:
    """How much longer a step takes than with linear scaling: bars by the planner, diamonds from the paper.

    The number over a bar is the paper's less the planner's.

    Args:
        excess: GPUs -> (part of :data:`STEP_PARTS` -> per cent, per cent in all in the paper).
    """
    kinds = ("MP" if gpus < 64 else "MP+DP" if of[PARTS[-1]] else "MP+DP,\nhidden" for gpus, (of, _) in excess.items())
    names = {gpus: f"{gpus}\n{kind}" for gpus, kind in zip(excess, kinds, strict=True)}
    series = {
        f"{part}, by the planner": {names[gpus]: parts[part] for gpus, (parts, _) in excess.items()}
        for part in STEP_PARTS
    }
    sums = {gpus: sum(parts.values()) for gpus, (parts, _) in excess.items()}
    told = "; ".join(f"{gpus} GPUs {sums[gpus]:.0f}, paper {paper:.0f}" for gpus, (_, paper) in excess.items())
    missed = (f"{round(paper - sums[gpus]):+}".replace("-", "−") for gpus, (_, paper) in excess.items())
    return bar_chart(
        "hybrid_parallel_parts", f"Per cent longer than with linear scaling: {told}.",
        {"longer than linear, per cent": {"series": series}}, axis="GPUs", size=(6.4, 4.6), stacked=True,
        fills=dict(zip(series, STEP_PARTS.values(), strict=True)), text=[text.replace("+0", "0") for text in missed],
        points=("all of it, in the paper", {names[gpus]: paper for gpus, (_, paper) in excess.items()}), ncols=1,
    )  # fmt: skip


def all_reduces_of_replicas(
    paper: Mapping[int, Sequence[float]], planned: Mapping[str, Mapping[int, float]]
) -> Picture:
    """How much longer a step of 64 replicas takes than of one: in the paper, and by the planner without overlap.

    Args:
        paper: GPUs -> (lowest, as read, highest) per cent of a linear step that its figure allows. planned: how
            gradients are sent -> GPUs -> per cent.
    """
    fig, ax = new(size=(6.4, 3.6))
    low, read, high = np.array(list(paper.values())).T
    series = {"the paper": dict(zip(paper, read, strict=True))}
    series |= {f"by the planner, {name}": of for name, of in planned.items()}
    looks = ((palette.OTHER, ""), ("communication", ""), ("communication", "///"))
    told = bars(ax, series, fills=dict(zip(series, looks, strict=True)))
    ax.errorbar(
        np.arange(len(paper)) - 0.28, read, (read - low, high - read), fmt="none", ecolor="black", capsize=4, zorder=4
    )
    ax.set(xlabel="GPUs", ylabel="data-parallel all-reduce,\nper cent of a linear step")
    ax.set_ylim(0, 1.1 * max(high.max(), *(max(of.values()) for of in planned.values())))
    ax.legend(loc="upper left")
    return save(fig, "hybrid_parallel_sums", f"The data-parallel all-reduce in per cent of a linear step. {told}.")


def shares_of_peak(rows: Mapping[str, tuple[float, float]]) -> Picture:
    """MFU and HFU of GPUs (or cores), in per cent of their peak: arithmetic for the model, and for recomputed layers.

    Args:
        rows: name -> (MFU, HFU) as shares.
    """
    fig, ax = new(size=(6.2, 0.62 * len(rows) + 1.2))
    fills = {"for the model: MFU": "compute", "recomputed: with it HFU": ("compute", "///"), "not used": ("wait", "")}
    shares = [{name: (mfu, hfu - mfu, 1 - hfu)[at] for name, (mfu, hfu) in rows.items()} for at in range(3)]
    bars(ax, dict(zip(fills, shares, strict=True)), per=0.01, across=True, stacked=True, fills=fills, room=1)
    for place, (mfu, hfu) in enumerate(rows.values()):
        ink = palette.ink_on(COLOURS["compute"])
        ax.text(50 * mfu, place, f"{100 * mfu:.0f}", ha="center", va="center", color=ink)
        if hfu > mfu:
            ax.text(100 * hfu + 1.5, place, f"HFU {100 * hfu:.0f}", va="center", color=palette.INK)
    ax.set(xlabel="per cent of the peak")
    key(fig)
    told = ", ".join(f"{name}: MFU {100 * mfu:.0f}, HFU {100 * hfu:.0f}" for name, (mfu, hfu) in rows.items())
    return save(fig, "hybrid_parallel_mfu", f"Per cent of the peak: {told}.".replace("\n", " "))


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
    looks = dict(zip(lines, _CURVES, strict=False))
    lower = [name for name in lines if name not in paper or name == next(iter(lines))]
    for ax, names in zip(axes, ([name for name in lines if name in paper], lower), strict=True):
        colours, marks = zip(*(looks[name] for name in names), strict=True)
        shown = {name: {t: points[name][t] for t in lines[name]} for name in names}
        curves(ax, {n: lines[n] for n in names}, shown, per=0.01, colours=colours, dashes=["-"], marks=marks)
        ax.set_ylabel("per cent of linear")
    colours, marks = zip(*(looks[name] for name in paper), strict=True)
    unlabelled = {f"_{name}": {t: of[t] for t in lines[name]} for name, of in paper.items()}
    rings = {"markersize": 12, "fillstyle": "none", "markeredgewidth": 1.6}
    curves(axes[0], unlabelled, per=0.01, colours=colours, marks=marks, dashes=["none"], **rings)
    lowest = 100 * min(min(of[name].values()) for of in (lines, points) for name in paper)
    floor = min(60, int(10 * ((lowest - 2) // 10)))
    axes[0].set(ylim=(floor, 103), title=f"the axis begins at {floor}")
    axes[1].set(ylim=(0, 106), xlabel="tensor-parallel ranks t", title="the axis begins at 0")
    log(axes[1], x=sorted({t for line in lines.values() for t in line}))
    style = {"marker": "o", "linestyle": "", "color": palette.OTHER}
    kinds = [
        Line2D([], [], label="measured here", **style),
        Line2D([], [], label="the paper", markersize=12, fillstyle="none", **style),
        Line2D([], [], color=palette.OTHER, label="formula"),
    ]
    axes[0].legend(handles=[*axes[0].get_legend_handles_labels()[0], *kinds], loc="lower left")
    axes[1].legend(loc="lower left")
    told = words(points, "{:.0f}", per=0.01)
    return save(fig, "hybrid_parallel_scaling", f"Per cent of linear scaling, measured here: {told}.")


def strong_scaling(planned: Mapping[int, float], paper: Mapping[int, float]) -> Picture:
    """Strong scaling: how many times as fast as one GPU t GPUs are, by the planner and in the paper."""
    fig, ax = new(size=(5.8, 3.2))
    sizes = [1, *planned]
    lines = {"t times as fast": dict(zip(sizes, sizes, strict=True)), "the planner": {1: 1.0, **planned}}
    curves(ax, lines, colours=(palette.OTHER, "predicted"), dashes=(":", "-"))
    curves(ax, {"the paper": {1: 1.0, **paper}}, colours=["compute"], dashes=["none"], marks="o", markersize=7.5)
    for t, value in paper.items():
        ax.annotate(f"{value:g}", (t, value), (0, -14), textcoords="offset points", ha="center")
    for t, value in planned.items():
        ax.annotate(f"{value:.1f}", (t, value), (9, -6), textcoords="offset points", ha="left")
    log(ax, sizes, sizes)
    ax.set(xlabel="GPUs that share the 1.2B model, t", ylabel="times as fast as one", xlim=(0.9, 10), ylim=(0.8, 10))
    ax.legend(loc="upper left")
    told = "; ".join(f"{t} GPUs {value:.2f}, paper {paper[t]:g}" for t, value in planned.items())
    return save(fig, "hybrid_parallel_strong", f"Times as fast as one GPU, by the planner: {told}.")


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
        kinds.setdefault((layout.sharding, layout.shard_group) if uncut else (layout.tp > 1, layout.pp > 1), candidate)
    taken = taken_of(fitting)
    shown = {_kind(one): one.adds for one in kinds.values()} | {_kind(taken): taken.adds}
    by_total = dict(sorted(shown.items(), key=lambda item: sum(item[1].values())))
    return what_each_adds(by_total, "hybrid_parallel_kinds", _kind(taken), job)


def _kind(candidate: Candidate) -> str:
    return candidate.kind + (", recomputed" if candidate.layout.recompute == "full" else "")


#: Dimension -> the field of a layout, and its colour in the drawing of the cube; there the pipeline has the page's own.
_DIMENSIONS = {
    "tensor, t": ("tp", COLOURS["activations"]),
    "stages, p": ("pp", palette.OTHER),
    "replicas, d": ("dp", COLOURS["gradients"]),
}


def chosen_layouts(chosen: Mapping[str, Candidate]) -> Picture:
    """For each job what the rule's layout adds, and how its GPUs are split.

    Args:
        chosen: job -> what the rule takes.
    """
    fig, (left, right) = new(1, 2, size=(6.8, 0.52 * len(chosen) + 2.0), sharey=True, width_ratios=(1, 2))
    jobs = {",\n".join(name.rsplit(", ", 1)): one for name, one in chosen.items()}
    of_parts = added({job: one.adds for job, one in jobs.items()})
    bars(left, **of_parts, across=True, stacked=True, text="{:.0f} %", room=1.6)
    left.set(xlabel="added, %")
    sizes = {name: [getattr(one.layout, field) for one in jobs.values()] for name, (field, _) in _DIMENSIONS.items()}
    wide = {name: dict(zip(jobs, np.log2(of), strict=True)) for name, of in sizes.items()}
    shared = [
        (one.kind.rsplit(", ", 1)[-1] if one.layout.dp > 1 else "one replica")
        + ("\nrecomputed" if one.layout.recompute == "full" else "") for one in jobs.values()
    ]  # fmt: skip
    fills = {name: colour for name, (_, colour) in _DIMENSIONS.items()}
    bars(right, wide, across=True, stacked=True, text=shared, fills=fills, room=1.6)
    for place, job in enumerate(jobs):
        end = 0.0
        for name, of in sizes.items():
            if of[place] > 1:
                text = f"{name[-1]} {of[place]}" if of[place] > 2 else "2"  # its box is too narrow for the letter
                ink = palette.ink_on(fills[name])
                right.text(end + wide[name][job] / 2, place, text, ha="center", va="center", color=ink)
            end += wide[name][job]
    ticks = range(0, int(right.get_xlim()[1] / 1.6) + 1, 3)
    right.set_xticks(list(ticks), [f"{2**tick:,}" for tick in ticks])
    right.set(xlabel="GPUs")
    key(fig, ncols=3)
    told = "; ".join(f"{name}: {one.layout}, adds {one.added:.0%}" for name, one in chosen.items())
    return save(fig, "hybrid_parallel_chosen", f"Layouts that the rule takes. {told}.")
