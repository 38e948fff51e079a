"""Pictures of *Hybrid parallelism*: which rank is in which group, what each dimension sends, shares of a peak."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from pardemo.cluster import Cluster
from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, bars, key, traffic_matrix, words
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.groups import ParallelDims


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
    fig, axes = new(len(matrices), 1, size=(4.4, 4.2 * len(matrices)))
    most = max(float(np.max(matrix)) for matrix in matrices.values()) / 2**20
    where, crossing = np.arange(cluster.size) // cluster.ranks_per_host, {}
    for ax, (name, matrix) in zip(axes, matrices.items(), strict=True):
        values = np.asarray(matrix, dtype=float) / 2**20
        traffic_matrix(ax, values.round(), cluster, most, size=8)
        crossing[name] = values[where[:, None] != where].sum()
        ax.set(xlabel="to rank", ylabel="from rank", title=f"{name}: {crossing[name]:.0f} MiB cross")
    summary = words(crossing, "{:.0f} MiB between nodes")
    return save(fig, "hybrid_parallel_orders", f"MiB from rank to rank; frames are nodes. {summary}.")


def shares_of_peak(rows: Mapping[str, tuple[float, float]]) -> Picture:
    """MFU and HFU of GPUs (or cores), in per cent of their peak: arithmetic for the model, and for recomputed layers.

    Args:
        rows: name -> (MFU, HFU) as shares.
    """
    fig, ax = new(size=(6.2, 0.62 * len(rows) + 1.2))
    fills = {"for the model: MFU": "compute", "recomputed: with it HFU": ("compute", "///"), "not used": ("wait", "")}
    shares = [{name: (mfu, hfu - mfu, 1 - hfu)[at] for name, (mfu, hfu) in rows.items()} for at in range(3)]
    bars(ax, dict(zip(fills, shares, strict=True)), per=0.01, across=True, stacked=True, fills=fills, room=1)
    for index, (mfu, hfu) in enumerate(rows.values()):
        ink = palette.ink_on(COLOURS["compute"])
        ax.text(50 * mfu, index, f"{100 * mfu:.0f}", ha="center", va="center", color=ink)
        if hfu > mfu:
            ax.text(100 * hfu + 1.5, index, f"HFU {100 * hfu:.0f}", va="center", color=palette.INK)
    ax.set(xlabel="per cent of the peak")
    key(fig)
    summary = ", ".join(f"{name}: MFU {100 * mfu:.0f}, HFU {100 * hfu:.0f}" for name, (mfu, hfu) in rows.items())
    return save(fig, "hybrid_parallel_mfu", f"Per cent of the peak: {summary}.".replace("\n", " "))
