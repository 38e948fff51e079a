"""Pictures of *Your machine*: bytes of collectives, rates of links, rings and trees, more nodes; the table of rates."""

from collections.abc import Mapping, Sequence

import numpy as np

from pardemo.draw import palette
from pardemo.draw.charts import DASHES, WAYS, bar_chart, curves, key, lanes, line_chart, log
from pardemo.draw.style import Picture, new, save
from pardemo.planner import hardware, rates

SIZES = {1e3: "1 kB", 1e5: "100 kB", 1e7: "10 MB", 1e9: "1 GB"}
SECONDS = {1e-6: "1 µs", 1e-5: "10 µs", 1e-4: "100 µs", 1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "100 ms", 1: "1 s"}


def received_by_all(measured: Mapping[str, float], theory: Mapping[str, float], ranks: int) -> Picture:
    """Plots what all ranks together receive in each collective, in S; outlines are the predictions."""
    return bar_chart(
        "your_machine_collectives", "What all ranks together receive, in S: {}; outlines are predicted.",
        {f"received by all {ranks} ranks, S": {"series": {"measured": measured}, "outline": theory}},
        fills={"measured": "receive"}, text="{:.3g}", size=(6.2, 3.8),
    )  # fmt: skip


def rates_by_size(measured: Mapping[str, Mapping[int, float]], expected: Mapping[str, Mapping[int, float]]) -> Picture:
    """Bytes a second of messages from small to large, for each link; lines are predicted."""
    fig, ax = new(size=(5.8, 4.2))
    points, lines = (
        {name: {n / 2**20: rate for n, rate in by.items()} for name, by in rates.items()}
        for rates in (measured, expected)
    )
    curves(ax, points, per=1e6, dashes=["none"], marks="os^D", markersize=7)
    curves(ax, {f"_{name}": lines.get(name, {0.5: np.nan}) for name in points}, per=1e6, dashes=["-"], linewidth=1.4)
    log(ax, x=(), y=())
    ax.set(xlabel="message, MiB", ylabel="MB/s")
    key(fig)
    return save(
        fig,
        "your_machine_links",
        "A limited link carries what was asked for, short messages a little more; without a limit no rate is constant.",
    )


def ring_and_tree(sizes: Sequence[float], ring_s: Sequence[float], tree_s: Sequence[float], title: str) -> Picture:
    """Predicted milliseconds of an all-reduce through a ring and through a double tree, against S."""
    lines = {
        name: {size / 1e6: s for size, s in zip(sizes, seconds, strict=True)}
        for name, seconds in (("ring", ring_s), ("double tree", tree_s))
    }
    return line_chart(
        "your_machine_ring_and_tree",
        "Below some size a double tree is quicker: fewer messages follow each other. Milliseconds: {}.", lines,
        per=1e-3, x=f"tensor S, MB ({title})", y="milliseconds, predicted", log_x=(), log_y=(), size=(5.6, 3.6),
        colours=("ring", "torch"), legend="upper left",
    )  # fmt: skip


def link_times(links: Mapping[str, tuple[float, float]], notes: Mapping[str, str]) -> Picture:
    """Seconds of a message on several links by α + S/B, against its bytes, both from small to large.

    Links whose names begin with the same word have the same colour, and each its own line style.

    Args:
        links: name -> (B in bytes a second, α in seconds). notes: name -> what the legend adds to the name.
    """
    fig, ax = new(size=(6.2, 4.8))
    kinds = [name.split()[0] for name in links]
    shades = dict(zip(dict.fromkeys(kinds), (*WAYS[:3], palette.INK, palette.OTHER), strict=True))
    dashes = [DASHES[kinds[:index].count(kind)] for index, kind in enumerate(kinds)]
    sizes = np.geomspace(1e2, 1e10, 60)
    lines = {f"{name}: {notes[name]}": {n: alpha + n / rate for n in sizes} for name, (rate, alpha) in links.items()}
    curves(ax, lines, colours=[shades[kind] for kind in kinds], dashes=dashes)
    log(ax, SIZES, SECONDS)
    ax.set(xlabel="message", ylabel="one way")
    key(fig, ncols=1)
    summary = "; ".join(f"{name} {notes[name]}" for name in links)
    return save(fig, "your_machine_messages", f"Short messages cost α, long ones S/B, on each link: {summary}.")


def more_nodes(nodes: int, compute_s: float, all_reduce_s: Mapping[str, float]) -> Picture:
    """A step of several nodes over time for each network, below the steps that one node needs for as many samples.

    The all-reduce of the gradients begins with the backward pass, which is two thirds of the step's computing; the step
    ends when both are done.

    Args:
        compute_s: seconds that a node computes in a step. all_reduce_s: network -> seconds of the all-reduce between
            the nodes.
    """
    cases = {f"one node, {nodes} steps": (nodes, 0.0)}
    cases |= {f"{nodes} nodes, {name}": (1, s) for name, s in all_reduce_s.items()}
    heights = [2 if s else 1 for _, s in cases.values()]
    fig, axes = new(len(cases), 1, size=(6.4, len(cases) + 0.6), sharex=True, height_ratios=heights)
    third, titles = compute_s / 3, []
    for ax, (name, (steps, travels_s)) in zip(axes, cases.items(), strict=True):
        computed, end = steps * compute_s, max(steps * compute_s, third + travels_s)
        begins = [step * compute_s for step in range(steps)]
        boxes = [(at, at + third, "forward") for at in begins] + [
            (at + third, at + 3 * third, "backward") for at in begins
        ]
        rows = {"computing": [*boxes, *([(computed, end, "idle")] if end > computed else [])]}
        if travels_s:
            rows["all-reduce"] = [(third, third + travels_s, "communication")]
        lanes(ax, rows)
        speed = f", {nodes * compute_s / end:.1f} times as fast as one" if travels_s else ""
        titles.append(f"{name}: {end:.2f} s{speed}")
        ax.set_title(titles[-1])
    axes[-1].set(xlabel="seconds", xlim=(0, None))
    key(fig, ncols=4)
    alt = f"A step of {nodes} nodes beside {nodes} steps of one, computed. {'; '.join(titles)}."
    return save(fig, "your_machine_more_nodes", alt)


def rates_table(gpus: Sequence[str]) -> list[dict[str, str]]:
    """The book's rates: a row for each GPU, and one for a node's network cards; TFLOP/s of bf16 and GB/s one way."""
    rows = []
    for name in gpus:
        by, sharp = rates.rates(hardware.gpu(name)), rates.SHARP.get(name)
        reached = f"{by.inside / 1e9:.0f}" + (f"; all-reduce {sharp / 1e9:.0f} by the switch" if sharp else "")
        rows.append({
            "": name, "TFLOP/s: data sheet": f"{by.sheet / 1e12:.0f}", "alone": f"{by.alone / 1e12:.0f}",
            "F, in a step": f"{by.in_a_step / 1e12:.0f}", "link, GB/s": f"{by.link / 1e9:.0f}", "B, reached": reached,
        })  # fmt: skip
    line = hardware.link("infiniband-400g")
    few, many = rates.LINK_SHARE * line / 1e9, rates.between(line) / 1e9
    rows.append({
        "": "card of 400 Gbit/s", "TFLOP/s: data sheet": "", "alone": "", "F, in a step": "",
        "link, GB/s": f"{line / 1e9:.0f}", "B, reached": f"{few:.0f}; gathers over many nodes {many:.0f}",
    })  # fmt: skip
    return rows
