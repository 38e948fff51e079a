"""Pictures of *A trace, line by line*: a step's lanes, own times, what is exposed, who waits for whom."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.meters.trace import Bar

_PHASES = {
    "data": palette.OTHER,
    "forward": COLOURS["forward"],
    "backward": COLOURS["backward"],
    "optimizer": COLOURS["optimizer states"],
}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


def _draw(ax, bars: Sequence[Bar], row: float, begin_s: float, colour: str, high: float = 0.72, **style) -> None:
    """Bars in one row; milliseconds from ``begin_s`` on."""
    spans = [(1e3 * (bar.begin_s - begin_s), 1e3 * bar.seconds) for bar in bars]
    ax.broken_barh(spans, (row - high / 2, high), facecolor=colour, linewidth=0, **style)


def _finish(ax, names: Sequence[str], what: str) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.4, -0.6), xlabel=what)
    ax.grid(axis="y", visible=False)


def lanes_of_a_step(bars: Sequence[Bar]) -> Picture:
    """A rank's step: the phases that the program names, its operators, the matrix products, the all-reduces."""
    begin = min(bar.begin_s for bar in bars)
    fig, ax = new(size=(6.8, 3.3))
    for phase, colour in _PHASES.items():
        named = [bar for bar in bars if bar.name == phase]
        _draw(ax, named, 0, begin, colour)
        for bar in named:
            if bar.seconds > 0.08 * (max(b.end_s for b in bars) - begin):
                middle = 1e3 * ((bar.begin_s + bar.end_s) / 2 - begin)
                ax.text(middle, 0, phase, ha="center", va="center", color=palette.ink_on(colour))
    _draw(ax, [bar for bar in bars if bar.kind == "cpu_op"], 1, begin, palette.OTHER)
    _draw(ax, [bar for bar in bars if bar.name in _PRODUCTS], 2, begin, COLOURS["compute"])
    sums = [bar for bar in bars if bar.communicates]
    _draw(ax, sums, 3, begin, COLOURS["communication"], hatch="///", edgecolor="white")
    _finish(ax, ["phases", "operators", "products", "all-reduces"], "ms")
    counted = len([bar for bar in bars if bar.kind == "cpu_op"])
    told = f"A rank's step of {1e3 * (max(b.end_s for b in bars) - begin):.0f} ms: {counted:,} operators, "
    return save(
        fig,
        "trace_lanes",
        told + f"of them {sum(b.name in _PRODUCTS for b in bars)} products; {len(sums)} all-reduces.",
    )


def own_times(own: Mapping[str, float], whole: Mapping[str, float], most: int = 7) -> Picture:
    """The operators with most own time, and the phases; outlines are their bars' whole lengths.

    Args:
        own, whole: name -> seconds.
    """
    operators = sorted((name for name in own if name not in _PHASES), key=own.__getitem__, reverse=True)[:most]
    phases = [phase for phase in ("forward", "backward", "optimizer") if phase in own]
    names = sorted([*operators, *phases], key=own.__getitem__, reverse=True)
    fig, ax = new(size=(6.8, 0.44 * len(names) + 1.4))
    places = np.arange(len(names))
    colours = [COLOURS["compute"] if name in _PRODUCTS else _PHASES.get(name, palette.OTHER) for name in names]
    ax.barh(places, [1e3 * own[name] for name in names], 0.62, color=colours)
    style = {"fill": False, "edgecolor": palette.INK, "linewidth": 1.0}
    ax.barh(places, [1e3 * whole[name] for name in names], 0.62, **style)
    for place, name in enumerate(names):
        ax.annotate(
            f"{1e3 * own[name]:.1f}", (1e3 * whole[name], place), (4, 0), textcoords="offset points", va="center"
        )
    ax.set_yticks(places, [_short(name) for name in names])
    ax.set(xlabel="ms; outlines: with all that is inside", ylim=(len(names) - 0.4, -0.6))
    ax.set_xlim(0, 1.15e3 * max(whole[name] for name in names))
    ax.grid(axis="y", visible=False)
    told = ", ".join(f"{_short(name)} {1e3 * own[name]:.1f}" for name in names)
    return save(fig, "trace_own_times", f"Own time by name, ms: {told}.")


def _short(name: str) -> str:
    last = name.rsplit("::", 1)[-1].rsplit(": ", 1)[-1]
    return last if len(last) <= 24 else last[:23] + "…"


def exposed_parts(cases: Mapping[str, Sequence[Bar]]) -> Picture:
    """The backward pass of each case: what its operators compute, and its all-reduces below, the exposed part dark.

    Args:
        cases: name -> bars of a rank.
    """
    fig, ax = new(size=(6.8, 0.9 * len(cases) + 1.9))
    names, told = [], []
    for number, (name, bars) in enumerate(cases.items()):
        begin = next(bar.begin_s for bar in bars if bar.name == "backward")
        end = next(bar.end_s for bar in bars if bar.name == "backward")
        work = [bar for bar in bars if bar.kind == "cpu_op" and begin <= bar.begin_s < end]
        sums = [bar for bar in bars if bar.communicates]
        _draw(ax, work, 2 * number, begin, COLOURS["compute"])
        _draw(ax, sums, 2 * number + 1, begin, COLOURS["communication"], alpha=0.45)
        late = [piece for bar in sums for piece in _without(bar, work)]
        _draw(ax, late, 2 * number + 1, begin, COLOURS["communication"], hatch="///", edgecolor="white")
        names += [f"{name}:\noperators", "all-reduces"]
        told.append(f"{name}: {len(sums)} all-reduces, {1e3 * sum(bar.seconds for bar in late):.0f} ms exposed")
    _finish(ax, names, "ms of the backward pass")
    orange = COLOURS["communication"]
    key = [
        Patch(color=COLOURS["compute"], label="computes"),
        Patch(color=orange, alpha=0.45, label="hidden"),
        Patch(facecolor=orange, hatch="///", edgecolor="white", label="exposed"),
    ]
    fig.legend(handles=key, loc="outside lower center", ncols=3)
    return save(fig, "trace_exposed", "; ".join(told) + ".")


def _without(bar: Bar, others: Sequence[Bar]) -> list[Bar]:
    """The pieces of a bar in which none of the others is open."""
    pieces, begin = [], bar.begin_s
    for other in sorted(others, key=lambda other: other.begin_s):
        if other.end_s <= begin:
            continue
        if other.begin_s >= bar.end_s:
            break
        if other.begin_s > begin:
            pieces.append(bar._replace(begin_s=begin, end_s=other.begin_s))
        begin = other.end_s
    return [*pieces, bar._replace(begin_s=begin)] if begin < bar.end_s else pieces


def late_rank(ranks: Mapping[int, Sequence[Bar]]) -> Picture:
    """Two ranks on one clock: phases, and all-reduces, dark from when the last rank has come."""
    fig, ax = new(size=(6.8, 3.4))
    begin = min(bar.begin_s for bars in ranks.values() for bar in bars)
    sums = {rank: [bar for bar in bars if bar.communicates] for rank, bars in ranks.items()}
    last = [max(bar.begin_s for bar in same) for same in zip(*sums.values(), strict=True)]
    names = []
    for number, (rank, bars) in enumerate(ranks.items()):
        for phase, colour in _PHASES.items():
            _draw(ax, [bar for bar in bars if bar.name == phase], 2 * number, begin, colour)
        waits = [bar._replace(end_s=there) for bar, there in zip(sums[rank], last, strict=True)]
        works = [bar._replace(begin_s=there) for bar, there in zip(sums[rank], last, strict=True)]
        _draw(ax, waits, 2 * number + 1, begin, COLOURS["wait"])
        _draw(ax, works, 2 * number + 1, begin, COLOURS["communication"], hatch="///", edgecolor="white")
        names += [f"rank {rank}", "all-reduces"]
    _finish(ax, names, "ms")
    key = [Patch(color=colour, label=phase) for phase, colour in _PHASES.items()]
    both = {"facecolor": COLOURS["communication"], "hatch": "///", "edgecolor": "white"}
    key += [Patch(color=COLOURS["wait"], label="waits for the other rank"), Patch(label="both are there", **both)]
    fig.legend(handles=key, loc="outside lower center", ncols=3)
    first = {rank: 1e3 * bars[0].seconds for rank, bars in sums.items()}
    told = ", ".join(f"{milliseconds:.0f} ms on rank {rank}" for rank, milliseconds in first.items())
    return save(fig, "trace_late_rank", f"Two ranks on one clock; the first all-reduce's bar is {told}.")
