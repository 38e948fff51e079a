"""Pictures of *The cluster*: links, bytes and seconds of each way to all-reduce, seconds to a loss, a slow node."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from pardemo.cluster import Cluster
from pardemo.draw.charts import bar_chart, bars, curves, log, traffic_matrix, words
from pardemo.draw.style import COLOURS, Picture, new, save


def traffic_by_way(ways: Mapping[str, Sequence[Sequence[float]]], cluster: Cluster, whole: float) -> Picture:
    """Bytes from each rank to each other, in units of a tensor of ``whole`` bytes; a square for each way."""
    fig, axes = new(1, len(ways), size=(2.5 * len(ways), 3.2))
    most = max(float(np.max(matrix)) for matrix in ways.values()) / whole
    for ax, (name, matrix) in zip(axes, ways.items(), strict=True):
        traffic_matrix(ax, np.asarray(matrix, dtype=float) / whole, cluster, most, size=13)
        ax.set(xlabel="to rank", title=f"{name}, in S")
    axes[0].set(ylabel="from rank")
    sums = words({name: np.sum(matrix) for name, matrix in ways.items()}, "{:.3g} S in all", per=whole)
    alt = f"What each rank sends to each other, in S, the tensor's size; frames are nodes. {sums}."
    return save(fig, "cluster_traffic", alt)


def seconds_by_way(predicted: Mapping[str, float], measured: Mapping[str, float], name: str) -> Picture:
    """Seconds of each way to exchange; outlines are the predictions."""
    return bar_chart(
        name, f"Seconds: {{}}; predicted: {words(predicted, '{:.2f}')}.",
        {"seconds": {"series": {"measured": measured}, "outline": predicted}},
        across=True, fills={"measured": "communication"}, text="{:.2f} s",
    )  # fmt: skip


def seconds_to_a_loss(
    predicted: Callable[[str, float], float], measured: Mapping[str, Mapping[float, float]]
) -> Picture:
    """Seconds until the loss is reached against the link's Mbit/s: lines are predicted, points measured.

    Args:
        predicted: (way, Mbit/s) to seconds. measured: way -> Mbit/s -> seconds.
    """
    fig, ax = new(size=(6.4, 4.8))
    ends = [rate for points in measured.values() for rate in points]
    rates = np.geomspace(min(ends), max(ends), 50)
    curves(ax, {way: {rate: predicted(way, rate) for rate in rates} for way in measured}, measured, dashes=["-"])
    log(ax, x=(), y=())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    ax.set(xlabel="link of each node, Mbit/s; lines: predicted", ylabel="seconds to the loss")
    ax.legend(loc="upper right")
    return save(fig, "cluster_to_a_loss", f"Seconds to the loss at a link's Mbit/s. {words(measured, '{:.1f} s')}.")


def slow_node(
    computed: Sequence[float], lengths: Sequence[float], predicted: Sequence[float],
    rates: Sequence[Sequence[float]], cluster: Cluster,
) -> Picture:  # fmt: skip
    """Plots how long each step takes and computes, its predicted length, and the Mbit/s of each pair of ranks."""
    fig, (ax, below) = new(2, 1, size=(6.4, 6.2), height_ratios=(0.8, 1.1))
    series = {"slowest rank computes": computed, "all-reduce": np.subtract(lengths, computed)}
    fills = dict(zip(series, ("compute", ("communication", "")), strict=True))
    bars(ax, series, per=1e-3, stacked=True, fills=fills, wide=0.9)
    long = len(computed) / len(predicted)
    for number, seconds in enumerate(predicted):
        ends, label = [number * long - 0.5, (number + 1) * long - 0.5], None if number else "predicted"
        ax.plot(ends, [1e3 * seconds] * 2, color=COLOURS["predicted"], linewidth=1.8, label=label)
    ax.set(xlabel="step", ylabel="milliseconds", ylim=(0, 1.35e3 * max(*predicted, *lengths)))
    ax.set_xticks(range(0, len(computed), 2))
    ax.legend(loc="upper left")
    values = np.asarray(rates, dtype=float)
    traffic_matrix(below, values, cluster, float(values.max()), size=12)
    below.set(xlabel="to rank", ylabel="from rank", title="Mbit/s, pair by pair")
    return save(
        fig,
        "cluster_slow_node",
        "Step times with a straggler, then with a slow network card; the pairs of that node are slow.",
    )


def ring_or_nodes(ranks_per_node: int = 8, most: int = 64) -> Picture:
    """Bytes over a node's network card and consecutive steps, for one ring and for an all-reduce by nodes."""
    nodes = [n for n in (2**k for k in range(1, 20)) if n <= most]
    ranks = {n: n * ranks_per_node for n in nodes}
    panels = {
        "S over a node's network card": {
            "one ring": {n: 2 * (ranks[n] - 1) / ranks[n] for n in nodes},
            "by nodes": {n: 2 * (n - 1) / n for n in nodes},
        },
        "steps, one after the other": {
            "one ring": {n: 2 * (ranks[n] - 1) for n in nodes},
            "by nodes": {n: 2 * (n - 1) + 2 * (ranks_per_node - 1) for n in nodes},
        },
    }
    fig, axes = new(1, 2, size=(7.4, 3.6))
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        curves(ax, lines, dashes=["-"], marks="os")
        for line, below in zip(lines.values(), (6, -14), strict=True):
            for n in (nodes[0], nodes[-1]):
                ax.annotate(f"{line[n]:,.4g}", (n, line[n]), (0, below), textcoords="offset points", ha="center")
        log(ax, x=nodes)
        ax.set(xlabel=f"nodes of {ranks_per_node} ranks", title=title)
        ax.margins(x=0.12, y=0.18)
    axes[0].set_ylim(0, 2.4)
    axes[1].set_yscale("log")
    axes[0].legend(loc="lower right")
    ends = {
        f"{title}, {name}": {n: line[n] for n in (nodes[0], nodes[-1])}
        for title, lines in panels.items() for name, line in lines.items()
    }  # fmt: skip
    return save(fig, "cluster_ring_or_nodes", f"By the number of nodes. {words(ends, '{:.4g}')}.")


def who_waits(stretches: Mapping[str, Sequence[Sequence[float]]]) -> Picture:
    """For each stretch of steps a bar for each rank: how long it computes, then how long it is in the all-reduce.

    Args:
        stretches: name -> (computing, in the all-reduce), each by rank, in milliseconds.
    """
    fig, axes = new(1, len(stretches), size=(7.4, 3.4), sharey=True)
    fills = {"computing": "compute", "in the all-reduce": ("communication", "")}
    for ax, (name, parts) in zip(axes, stretches.items(), strict=True):
        bars(ax, dict(zip(fills, parts, strict=True)), stacked=True, fills=fills, wide=0.7)
        for rank, (computing, wait) in enumerate(zip(*parts, strict=True)):
            ax.text(rank, computing / 2, f"{computing:.0f}", ha="center", va="center", fontsize=9)
            ax.text(rank, computing + wait / 2, f"{wait:.0f}", ha="center", va="center", fontsize=9, color="white")
        ax.set(title=name, xlabel="rank")
    most = max(float(np.sum(parts, axis=0).max()) for parts in stretches.values())
    axes[0].set(ylabel="milliseconds of a step", ylim=(0, 1.05 * most))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    milliseconds = {
        name: dict(zip(("computing", "all-reduce"), map(list, parts), strict=True)) for name, parts in stretches.items()
    }
    return save(fig, "cluster_who_waits", f"Milliseconds of ranks 0 to 3. {words(milliseconds, '{:.0f}')}.")


def does_a_node_pay(steps: Mapping[str, tuple[float, float]]) -> Picture:
    """Seconds of a step: computing, and the part of the all-reduce that the backward pass does not hide.

    Args:
        steps: name -> (seconds of computing, seconds of the all-reduce that do not hide).
    """
    fills = {"computing": "compute", "all-reduce that does not hide": "communication"}
    series = {name: {step: parts[at] for step, parts in steps.items()} for at, name in enumerate(fills)}
    return bar_chart(
        "cluster_does_a_node_pay", "Seconds of a step: {}.", {"seconds a step": {"series": series}},
        across=True, stacked=True, fills=fills, text="{:.2f} s",
    )  # fmt: skip
