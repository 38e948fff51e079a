"""Pictures of *The cluster*: links, bytes and seconds of each way to all-reduce, seconds to a loss, a slow node."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from pardemo.cluster import Cluster
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.draw.traffic import square

_COLOURS, _MARKERS = tuple(palette.WAYS.values()), ("o", "s", "^", "D")


def message_times(
    sizes: Sequence[int], measured: Mapping[str, Sequence[float]], lines: Mapping[str, tuple[float, float]],
    at_once: Mapping[str, float] | None = None,
) -> Picture:  # fmt: skip
    """Milliseconds of a message against its bytes, for each link.

    Args:
        lines: link -> latency (s), rate (bytes/s). at_once: link -> bytes that an emulated link does not slow down; a
            dashed line takes them into account.
    """
    fig, ax = new(size=(6.4, 4.4))
    dense = np.geomspace(min(sizes), max(sizes), 80)
    for number, (name, seconds) in enumerate(measured.items()):
        latency, rate = lines[name]
        ax.plot(dense, 1e3 * (latency + dense / rate), color=_COLOURS[number], linewidth=1.5)
        if name in (at_once or {}):
            counted = np.maximum(0, dense - at_once[name])
            label = f"{name}, {at_once[name] / 1e3:.0f} kB free"
            ax.plot(dense, 1e3 * (latency + counted / rate), "--", color=_COLOURS[number], linewidth=1.2, label=label)
        ax.scatter(
            sizes,
            [1e3 * s for s in seconds],
            s=40,
            marker=_MARKERS[number],
            color=_COLOURS[number],
            label=name,
            zorder=3,
        )
    ax.set(xscale="log", yscale="log", xlabel="bytes of the message; lines: α + S/B", ylabel="milliseconds")
    ax.legend(loc="upper left")
    return save(
        fig, "cluster_links", "Seconds of a message: flat while latency decides, then a line that bandwidth decides."
    )


def traffic_by_way(ways: Mapping[str, Sequence[Sequence[float]]], cluster: Cluster, whole: float) -> Picture:
    """Bytes from each rank to each other, in units of a tensor of ``whole`` bytes; a square for each way."""
    fig, axes = new(1, len(ways), size=(2.5 * len(ways), 3.2))
    most = max(float(np.max(matrix)) for matrix in ways.values()) / whole
    for ax, (name, matrix) in zip(axes, ways.items(), strict=True):
        square(ax, np.asarray(matrix, dtype=float) / whole, cluster, most, size=13)
        ax.set(xlabel="to rank", title=f"{name}, in S")
    axes[0].set(ylabel="from rank")
    values_text = "; ".join(f"{name}: {np.sum(matrix) / whole:.3g} S in all" for name, matrix in ways.items())
    return save(
        fig,
        "cluster_traffic",
        f"What each rank sends to each other, in S, the tensor's size; frames are nodes. {values_text}.",
    )


def seconds_by_way(predicted: Mapping[str, float], measured: Mapping[str, float], name: str) -> Picture:
    """Seconds of each way to exchange; outlines are the predictions."""
    names = list(measured)
    fig, ax = new(size=(6.4, 1.1 + 0.6 * len(names)))
    places = np.arange(len(names))
    ax.barh(places, [measured[n] for n in names], 0.55, color=COLOURS["communication"], label="measured")
    ax.barh(
        places, [predicted[n] for n in names], 0.68, fill=False, edgecolor="black", linewidth=1.2, label="predicted"
    )
    for place, n in enumerate(names):
        ax.annotate(
            f"{measured[n]:.2f} s",
            (max(measured[n], predicted[n]), place),
            (5, 0),
            textcoords="offset points",
            va="center",
        )
    ax.set_yticks(places, names)
    ax.set(
        xlabel="seconds", xlim=(0, 1.18 * max(*measured.values(), *predicted.values())), ylim=(len(names) - 0.4, -0.6)
    )
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right")
    values_text = ", ".join(f"{n} {measured[n]:.2f} s (predicted {predicted[n]:.2f})" for n in names)
    return save(fig, name, f"Seconds: {values_text}.")


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
    for number, (name, points) in enumerate(measured.items()):
        ax.plot(rates, [predicted(name, rate) for rate in rates], color=_COLOURS[number], linewidth=1.5)
        ax.scatter(
            list(points), list(points.values()), s=52, marker=_MARKERS[number], color=_COLOURS[number], label=name,
            zorder=3,
        )  # fmt: skip
    ax.set(
        xscale="log", yscale="log", xlabel="link of each node, Mbit/s; lines: predicted", ylabel="seconds to the loss"
    )
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    ax.legend(loc="upper right")
    values_text = "; ".join(
        f"{name}: " + ", ".join(f"{s:.1f} s at {r:g}" for r, s in p.items()) for name, p in measured.items()
    )
    return save(fig, "cluster_to_a_loss", f"Seconds to the loss at a link's Mbit/s. {values_text}.")


def parts_to_a_loss(
    parts: Mapping[float, Mapping[str, Sequence[float]]], measured: Mapping[str, Mapping[float, float]],
    steps: Mapping[str, int],
) -> Picture:  # fmt: skip
    """The parts of the seconds until the loss, by link and way: bars are computed, points are the measured totals.

    Args:
        parts: Mbit/s -> way -> seconds of the steps alone, of the exchanges without their bytes, of the bytes on the
            link. measured: way -> Mbit/s -> seconds. steps: way -> steps until the loss.
    """
    fig, axes = new(len(parts), 1, size=(6.6, 2.1 * len(parts) + 0.6), sharex=True, squeeze=False)
    names = ("steps alone", "exchanges, without their bytes", "bytes on the link")
    colours = (COLOURS["compute"], palette.OTHER, COLOURS["communication"])
    for ax, (rate, ways) in zip(axes[:, 0], parts.items(), strict=True):
        left = np.zeros(len(ways))
        for name, colour, seconds in zip(names, colours, zip(*ways.values(), strict=True), strict=True):
            ax.barh(range(len(ways)), seconds, 0.6, left=left, color=colour, label=name, zorder=2)
            left += seconds
        measured_s = [measured[way][rate] for way in ways]
        ax.scatter(
            measured_s, range(len(ways)), s=40, color=COLOURS["ring"], edgecolors="white", label="measured", zorder=3
        )
        ax.set_yticks(range(len(ways)), [f"{way}: {steps[way]} steps" for way in ways])
        ax.set(title=f"at {rate:g} Mbit/s", ylim=(len(ways) - 0.5, -0.5))
        ax.grid(axis="y", visible=False)
    axes[-1, 0].set(xlabel="seconds to the loss", xlim=(0, None))
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"at {rate:g} Mbit/s "
        + ", ".join(f"{way} " + " + ".join(f"{s:.2f}" for s in parts_s) for way, parts_s in ways.items())
        for rate, ways in parts.items()
    )
    return save(fig, "cluster_parts", f"Seconds to the loss, of steps, exchanges and bytes: {values_text}.")


def slow_node(
    computed: Sequence[float], lengths: Sequence[float], predicted: Sequence[float],
    rates: Sequence[Sequence[float]], cluster: Cluster,
) -> Picture:  # fmt: skip
    """How long each step takes and computes, its predicted length, and the Mbit/s of each pair of ranks."""
    fig, (ax, below) = new(2, 1, size=(6.4, 6.2), height_ratios=(0.8, 1.1))
    steps = np.arange(len(computed))
    ax.bar(steps, 1e3 * np.asarray(computed), 0.9, color=COLOURS["compute"], label="slowest rank computes")
    ax.bar(
        steps, 1e3 * (np.asarray(lengths) - computed), 0.9, bottom=1e3 * np.asarray(computed), label="all-reduce",
        color=COLOURS["communication"],
    )  # fmt: skip
    long = len(computed) / len(predicted)
    for number, seconds in enumerate(predicted):
        ends, label = [number * long - 0.5, (number + 1) * long - 0.5], None if number else "predicted"
        ax.plot(ends, [1e3 * seconds] * 2, color=COLOURS["predicted"], linewidth=1.8, label=label)
    ax.set(xlabel="step", ylabel="milliseconds", ylim=(0, 1.35e3 * max(*predicted, *lengths)))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper left")
    values = np.asarray(rates, dtype=float)
    square(below, values, cluster, float(values.max()), size=12)
    below.set(xlabel="to rank", ylabel="from rank", title="Mbit/s, pair by pair")
    return save(
        fig,
        "cluster_slow_node",
        "Step times with a straggler, then with a slow network card; the pairs of that node are slow.",
    )


_RING, _BY_NODES = list(palette.WAYS.values())[:2]


def ring_or_nodes(ranks_per_node: int = 8, most: int = 64) -> Picture:
    """Bytes over a node's network card and consecutive steps, for one ring and for an all-reduce by nodes."""
    nodes = np.array([n for n in (2**k for k in range(1, 20)) if n <= most])
    ranks = nodes * ranks_per_node
    panels = {
        "S over a node's network card": (2 * (ranks - 1) / ranks, 2 * (nodes - 1) / nodes),
        "steps, one after the other": (2 * (ranks - 1), 2 * (nodes - 1) + 2 * (ranks_per_node - 1)),
    }
    fig, axes = new(1, 2, size=(7.4, 3.6))
    for ax, (title, (ring, by_nodes)) in zip(axes, panels.items(), strict=True):
        for values, colour, marker, name in ((ring, _RING, "o", "one ring"), (by_nodes, _BY_NODES, "s", "by nodes")):
            ax.plot(nodes, values, color=colour, marker=marker, label=name)
            for at in (0, -1):
                above = values is ring
                ax.annotate(
                    f"{values[at]:,.4g}", (nodes[at], values[at]), (0, 6 if above else -14),
                    textcoords="offset points", ha="center",
                )  # fmt: skip
        ax.set(xscale="log", xlabel=f"nodes of {ranks_per_node} ranks", title=title)
        ax.set_xticks(nodes, nodes)
        ax.minorticks_off()
        ax.margins(x=0.12, y=0.18)
    axes[0].set_ylim(0, 2.4)
    axes[1].set_yscale("log")
    axes[0].legend(loc="lower right")
    values_text = "; ".join(
        f"{title}: {ring[0]:.4g} and {by_nodes[0]:.4g} with {nodes[0]} nodes, {ring[-1]:.4g} and {by_nodes[-1]:.4g} "
        f"with {nodes[-1]}" for title, (ring, by_nodes) in panels.items()
    )  # fmt: skip
    return save(fig, "cluster_ring_or_nodes", f"One ring and by nodes. {values_text}.")


def who_waits(stretches: Mapping[str, Sequence[Sequence[float]]]) -> Picture:
    """For each stretch of steps a bar for each rank: how long it computes, then how long it is in the all-reduce.

    Args:
        stretches: name -> (computing, in the all-reduce), each by rank, in milliseconds.
    """
    fig, axes = new(1, len(stretches), size=(7.4, 3.4), sharey=True)
    for ax, (name, (own_ms, waits)) in zip(axes, stretches.items(), strict=True):
        ranks = np.arange(len(own_ms))
        ax.bar(ranks, own_ms, 0.7, color=COLOURS["compute"], label="computing")
        ax.bar(ranks, waits, 0.7, bottom=own_ms, color=COLOURS["communication"], label="in the all-reduce")
        for rank, (own, wait) in enumerate(zip(own_ms, waits, strict=True)):
            ax.text(rank, own / 2, f"{own:.0f}", ha="center", va="center", fontsize=9)
            ax.text(rank, own + wait / 2, f"{wait:.0f}", ha="center", va="center", fontsize=9, color="white")
        ax.set(title=name, xlabel="rank", xticks=ranks)
        ax.grid(axis="x", visible=False)
    axes[0].set(ylabel="milliseconds of a step")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{name}: computing " + ", ".join(f"{v:.0f}" for v in own_ms) + ", all-reduce "
        + ", ".join(f"{v:.0f}" for v in waits)
        for name, (own_ms, waits) in stretches.items()
    )  # fmt: skip
    return save(fig, "cluster_who_waits", f"Milliseconds of ranks 0 to 3. {values_text}.")


def does_a_node_pay(steps: Mapping[str, tuple[float, float]]) -> Picture:
    """Seconds of a step: computing, and the part of the all-reduce that the backward pass does not hide.

    Args:
        steps: name -> (seconds of computing, seconds of the all-reduce that do not hide).
    """
    fig, ax = new(size=(6.8, 0.62 * len(steps) + 1.4))
    places, computing_s = np.arange(len(steps)), np.array([computed for computed, _ in steps.values()])
    exposed_s = np.array([exposed for _, exposed in steps.values()])
    ax.barh(places, computing_s, 0.6, color=COLOURS["compute"], label="computing")
    ax.barh(
        places, exposed_s, 0.6, left=computing_s, color=COLOURS["communication"], label="all-reduce that does not hide"
    )
    for place, end in enumerate(computing_s + exposed_s):
        ax.annotate(f"{end:.2f} s", (end, place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, list(steps))
    ax.set(xlabel="seconds a step", xlim=(0, 1.15 * max(computing_s + exposed_s)), ylim=(len(steps) - 0.45, -0.55))
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(f"{name} {sum(parts):.2f} s" for name, parts in steps.items())
    return save(fig, "cluster_does_a_node_pay", f"Seconds of a step: {values_text}.".replace("\n", " "))
