"""Pictures of *The cluster*: a ring beside an all-reduce by nodes, ranks that wait, and whether a second node pays."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

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
