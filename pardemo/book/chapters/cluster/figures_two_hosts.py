"""Pictures of *The cluster*: a ring beside an all-reduce by hosts, ranks that wait, and whether a second host pays."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save

_RING, _BY_HOSTS = list(palette.WAYS.values())[:2]


def ring_or_hosts(ranks_per_host: int = 8, most: int = 64) -> Picture:
    """Bytes over a host's adapter and consecutive steps, for one ring over all ranks and for an all-reduce by hosts."""
    hosts = np.array([h for h in (2**k for k in range(1, 20)) if h <= most])
    ranks = hosts * ranks_per_host
    panels = {
        "S over a host's adapter": (2 * (ranks - 1) / ranks, 2 * (hosts - 1) / hosts),
        "steps, one upon the other": (2 * (ranks - 1), 2 * (hosts - 1) + 2 * (ranks_per_host - 1)),
    }
    fig, axes = new(1, 2, size=(7.4, 3.6))
    for ax, (title, (ring, by_hosts)) in zip(axes, panels.items(), strict=True):
        for values, colour, marker, name in ((ring, _RING, "o", "one ring"), (by_hosts, _BY_HOSTS, "s", "by hosts")):
            ax.plot(hosts, values, color=colour, marker=marker, label=name)
            for at in (0, -1):
                above = values is ring
                ax.annotate(
                    f"{values[at]:,.4g}", (hosts[at], values[at]), (0, 6 if above else -14),
                    textcoords="offset points", ha="center",
                )  # fmt: skip
        ax.set(xscale="log", xlabel=f"hosts of {ranks_per_host} ranks", title=title)
        ax.set_xticks(hosts, hosts)
        ax.minorticks_off()
        ax.margins(x=0.12, y=0.18)
    axes[0].set_ylim(0, 2.4)
    axes[1].set_yscale("log")
    axes[0].legend(loc="lower right")
    values_text = "; ".join(
        f"{title}: {ring[0]:.4g} and {by_hosts[0]:.4g} with {hosts[0]} hosts, {ring[-1]:.4g} and {by_hosts[-1]:.4g} "
        f"with {hosts[-1]}" for title, (ring, by_hosts) in panels.items()
    )  # fmt: skip
    return save(fig, "cluster_ring_or_hosts", f"One ring and by hosts. {values_text}.")


def who_waits(stretches: Mapping[str, Sequence[Sequence[float]]]) -> Picture:
    """For each stretch of steps a bar for each rank: how long it computes, then how long it is in the all-reduce.

    Args:
        stretches: name -> (computing, in the all-reduce), each by rank, in milliseconds.
    """
    fig, axes = new(1, len(stretches), size=(7.4, 3.4), sharey=True)
    for ax, (name, (products, waits)) in zip(axes, stretches.items(), strict=True):
        ranks = np.arange(len(products))
        ax.bar(ranks, products, 0.7, color=COLOURS["compute"], label="own products")
        ax.bar(ranks, waits, 0.7, bottom=products, color=COLOURS["communication"], label="in the all-reduce")
        for rank, (product, wait) in enumerate(zip(products, waits, strict=True)):
            ax.text(rank, product / 2, f"{product:.0f}", ha="center", va="center", fontsize=9)
            ax.text(rank, product + wait / 2, f"{wait:.0f}", ha="center", va="center", fontsize=9, color="white")
        ax.set(title=name, xlabel="rank", xticks=ranks)
        ax.grid(axis="x", visible=False)
    axes[0].set(ylabel="milliseconds of a step")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(
        f"{name}: products " + ", ".join(f"{v:.0f}" for v in products) + ", all-reduce "
        + ", ".join(f"{v:.0f}" for v in waits)
        for name, (products, waits) in stretches.items()
    )  # fmt: skip
    return save(fig, "cluster_who_waits", f"Milliseconds of ranks 0 to 3. {values_text}.")


def does_a_host_pay(steps: Mapping[str, tuple[float, float]]) -> Picture:
    """Seconds of a step: computing, and the part of the all-reduce that the backward pass does not hide.

    Args:
        steps: name -> (seconds of computing, seconds of the all-reduce that do not hide).
    """
    fig, ax = new(size=(6.8, 0.62 * len(steps) + 1.4))
    places, products = np.arange(len(steps)), np.array([computed for computed, _ in steps.values()])
    exposed_sums = np.array([exposed for _, exposed in steps.values()])
    ax.barh(places, products, 0.6, color=COLOURS["compute"], label="products")
    ax.barh(places, exposed_sums, 0.6, left=products, color=COLOURS["communication"], label="sum that does not hide")
    for place, end in enumerate(products + exposed_sums):
        ax.annotate(f"{end:.2f} s", (end, place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(places, list(steps))
    ax.set(xlabel="seconds a step", xlim=(0, 1.15 * max(products + exposed_sums)), ylim=(len(steps) - 0.45, -0.55))
    ax.grid(axis="y", visible=False)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    values_text = "; ".join(f"{name} {sum(parts):.2f} s" for name, parts in steps.items())
    return save(fig, "cluster_does_a_host_pay", f"Seconds of a step: {values_text}.".replace("\n", " "))
