"""Pictures of *Your machine*: bytes of collectives, rates of links, rings and trees, and a second node."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.charts import bars, kind_legend
from pardemo.draw.style import COLOURS, HATCHES, Picture, new, save

SIZES = {"1 kB": 1e3, "100 kB": 1e5, "10 MB": 1e7, "1 GB": 1e9}
SECONDS = {"1 µs": 1e-6, "10 µs": 1e-5, "100 µs": 1e-4, "1 ms": 1e-3, "10 ms": 1e-2, "100 ms": 1e-1, "1 s": 1}


def received_by_all(measured: Mapping[str, float], theory: Mapping[str, float], ranks: int) -> Picture:
    """What all ranks together receive in each collective, in S; outlines are the predictions."""
    fig, ax = new(size=(6.2, 3.8))
    names = [name.replace(" ", "\n").replace("-", "-\n") for name in measured]
    bars(ax, names, {"receive": list(measured.values())}, {"receive": [theory[name] for name in measured]})
    for place, value in enumerate(measured.values()):
        ax.annotate(f"{value:.3g}", (place, value), (0, 3), textcoords="offset points", ha="center")
    ax.set(ylabel=f"received by all {ranks} ranks, S", ylim=(0, 1.2 * max(measured.values())))
    ax.legend(handles=[Patch(fill=False, edgecolor="black", label="predicted")], loc="upper right")
    values_text = ", ".join(f"{name} {value:.1f}" for name, value in measured.items())
    return save(
        fig,
        "your_machine_collectives",
        f"What all ranks together receive, in S: {values_text}; outlines are predicted.",
    )


def rates_by_size(measured: Mapping[str, Mapping[int, float]], expected: Mapping[str, Mapping[int, float]]) -> Picture:
    """Bytes a second of messages from small to large, for each link; lines are predicted."""
    fig, ax = new(size=(5.8, 4.2))
    colours = (*palette.WAYS.values(), palette.OTHER)
    for (name, rates), mark, colour in zip(measured.items(), "os^D", colours, strict=False):
        x, y = np.array(list(rates)) / 2**20, np.array(list(rates.values())) / 1e6
        ax.plot(x, y, mark, color=colour, markersize=7, label=name, zorder=3)
        if name in expected:
            y = np.array(list(expected[name].values())) / 1e6
            ax.plot(x, y, color=colour, linewidth=1.4, zorder=2)
    ax.set(xscale="log", yscale="log", xlabel="message, MiB", ylabel="MB/s")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return save(
        fig,
        "your_machine_links",
        "A limited link carries what was asked for, short messages a little more; without a limit no rate is constant.",
    )


def ring_and_tree(sizes: Sequence[float], ring_s: Sequence[float], tree_s: Sequence[float], title: str) -> Picture:
    """Predicted milliseconds of an all-reduce through a ring and through a double tree, against S."""
    fig, ax = new(size=(5.6, 3.6))
    for name, seconds, style, colour_name in (("ring", ring_s, "-", "ring"), ("double tree", tree_s, "--", "torch")):
        ax.plot(
            np.array(sizes) / 1e6, 1e3 * np.array(seconds), style, color=COLOURS[colour_name], linewidth=1.8, label=name
        )
    ax.set(xscale="log", yscale="log", xlabel="tensor S, MB", ylabel="milliseconds, predicted", title=title)
    ax.legend(loc="upper left")
    return save(
        fig,
        "your_machine_ring_and_tree",
        "Below some size a double tree is quicker: fewer messages follow each other.",
    )


def link_times(links: Mapping[str, tuple[float, float]], notes: Mapping[str, str]) -> Picture:
    """Seconds of a message on several links by α + S/B, against its bytes, both from small to large.

    Links whose names begin with the same word have the same colour, and each its own line style.

    Args:
        links: name -> (B in bytes a second, α in seconds). notes: name -> what the legend adds to the name.
    """
    fig, ax = new(size=(6.2, 4.8))
    kinds = [name.split()[0] for name in links]
    shades = dict(
        zip(dict.fromkeys(kinds), (*list(palette.WAYS.values())[:3], palette.INK, palette.OTHER), strict=True)
    )
    sizes, styles = np.geomspace(1e2, 1e10, 60), {kind: iter(("-", "--", ":", "-.")) for kind in kinds}
    for kind, (name, (rate, alpha)) in zip(kinds, links.items(), strict=True):
        line = {"color": shades[kind], "linestyle": next(styles[kind]), "linewidth": 1.8}
        ax.plot(sizes, alpha + sizes / rate, label=f"{name}: {notes[name]}", **line)
    ax.set(xscale="log", yscale="log", xlabel="message", ylabel="one way")
    for ticks, scale in ((SIZES, ax.set_xticks), (SECONDS, ax.set_yticks)):
        scale(list(ticks.values()), list(ticks))
    ax.minorticks_off()
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=1)
    values_text = "; ".join(f"{name} {notes[name]}" for name in links)
    return save(fig, "your_machine_messages", f"Short messages cost α, long ones S/B, on each link: {values_text}.")


def second_node(compute_s: float, all_reduce_s: Mapping[str, float]) -> Picture:
    """A step of two nodes over time for each network, below the two steps that one node needs for as many samples.

    The all-reduce of the gradients begins with the backward pass, which is two thirds of the step's computing; the step
    ends when both are done.

    Args:
        compute_s: seconds that a node computes in a step. all_reduce_s: network -> seconds of the all-reduce between
            the nodes.
    """
    rows = {"one node, two steps": (2, 0.0)} | {f"two nodes, {name}": (1, s) for name, s in all_reduce_s.items()}
    fig, axes = new(
        len(rows), 1, size=(6.4, len(rows) + 0.6), sharex=True, height_ratios=[2 if s else 1 for _, s in rows.values()]
    )
    third, titles = compute_s / 3, []
    for ax, (name, (steps, travels_s)) in zip(axes, rows.items(), strict=True):
        computed, end = steps * compute_s, max(steps * compute_s, third + travels_s)
        for kind, at, width in (("forward", 0, third), ("backward", third, 2 * third)):
            spans = [(step * compute_s + at, width) for step in range(steps)]
            ax.broken_barh(spans, (0.05, 0.9), facecolor=COLOURS[kind], edgecolor="white", zorder=2)
        ax.broken_barh([(computed, end - computed)], (0.05, 0.9), facecolor=COLOURS["idle"], zorder=2)
        ax.broken_barh(
            [(third, travels_s)], (-0.95, 0.9), facecolor=COLOURS["communication"], hatch=HATCHES["communication"],
            edgecolor="white", zorder=2,
        )  # fmt: skip
        speed = f", {2 * compute_s / end:.1f} times as fast as one" if travels_s else ""
        titles.append(f"{name}: {end:.2f} s{speed}")
        ax.set(title=titles[-1], ylim=(-1 if travels_s else 0, 1))
        ax.set_yticks([0.5, -0.5][: 2 if travels_s else 1], ["computing", "all-reduce"][: 2 if travels_s else 1])
        ax.grid(axis="y", visible=False)
    axes[-1].set(xlabel="seconds", xlim=(0, None))
    kind_legend(fig, ["forward", "backward", "communication", "idle"], loc="outside lower center", ncols=4)
    return save(
        fig, "your_machine_second_node", f"A step of two nodes beside two steps of one, computed. {'; '.join(titles)}."
    )
