"""Pictures of *Overlap*: seconds over the number of pieces, ways side by side, DDP's buckets in a backward pass."""

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.charts import gantt, kind_legend, measured, predicted
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.meters.timeline import Span

_OUTLINE = Patch(fill=False, edgecolor="black", label="predicted")


def over_pieces(line: Mapping[int, float], points: Mapping[int, float], computing_s: float) -> Picture:
    """Milliseconds of a product and its all-reduce over the number of pieces: law as a line, measurements as points."""
    fig, ax = new(size=(6.4, 3.6))
    predicted(ax, list(line), [1e3 * seconds for seconds in line.values()], "the law")
    measured(ax, list(points), [1e3 * seconds for seconds in points.values()])
    ax.axhline(1e3 * computing_s, color=COLOURS["compute"], linestyle="--", label="the product alone")
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(points), [str(pieces) for pieces in points])
    ax.set(xlabel="pieces", ylabel="milliseconds", ylim=(0, 1.1e3 * max(*line.values(), *points.values())))
    ax.legend(loc="lower right")
    told = ", ".join(f"{pieces}: {1e3 * seconds:.0f}" for pieces, seconds in points.items())
    return save(fig, "overlap_pieces", f"Milliseconds by number of pieces, measured: {told}; the line is the law.")


def ways(
    seconds: Mapping[str, float], expected: Mapping[str, float], computing: Mapping[str, float], name: str
) -> Picture:
    """Milliseconds of several ways: computation, what sticks out of it, and the prediction as an outline.

    Args:
        seconds, expected: way -> measured and predicted seconds. computing: way -> seconds of it that are computation.
        name: of the picture's file.
    """
    fig, ax = new(size=(6.4, 1.3 + 0.52 * len(seconds)))
    for place, (way, whole) in enumerate(seconds.items()):
        base, all_of_it = 1e3 * computing[way], 1e3 * whole
        ax.barh(place, base, 0.6, color=COLOURS["compute"])
        stuck = max(0.0, all_of_it - base)
        ax.barh(place, stuck, 0.6, left=base, color=COLOURS["communication"], hatch="///", edgecolor="white")
        ax.barh(place, 1e3 * expected[way], 0.74, fill=False, edgecolor="black", linewidth=1.2, zorder=3)
        end = max(all_of_it, 1e3 * expected[way])
        ax.annotate(f"{all_of_it:.0f} ms", (end, place), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(seconds)), [textwrap.fill(way, 24) for way in seconds])
    longest = 1e3 * max(*seconds.values(), *expected.values())
    ax.set(xlabel="milliseconds", xlim=(0, 1.18 * longest), ylim=(len(seconds) - 0.5, -0.5))
    ax.grid(axis="y", visible=False)
    handles = [
        Patch(facecolor=COLOURS["compute"], label="computation"),
        Patch(facecolor=COLOURS["communication"], hatch="///", edgecolor="white", label="sticks out"),
        _OUTLINE,
    ]
    fig.legend(handles=handles, loc="outside upper center", ncols=3)
    told = "; ".join(f"{way} {1e3 * seconds[way]:.0f}, predicted {1e3 * expected[way]:.0f}" for way in seconds)
    return save(fig, f"overlap_{name}", f"Milliseconds: {told}.")


def prefetched(seconds: Mapping[int, float], expected: Mapping[int, float], mebibytes: Mapping[int, float]) -> Picture:
    """Milliseconds of a forward pass, and MiB that are gathered at most, over the layers that are gathered ahead."""
    fig, axes = new(1, 2, size=(6.4, 3.2))
    depths = [str(depth) for depth in seconds]
    axes[0].bar(depths, [1e3 * value for value in seconds.values()], 0.6, color=COLOURS["compute"])
    axes[0].bar(depths, [1e3 * value for value in expected.values()], 0.72, fill=False, edgecolor="black")
    axes[1].bar(depths, list(mebibytes.values()), 0.6, color=palette.SHADES["gathered parameters"])
    for ax, title, values, outlines, template in (
        (axes[0], "milliseconds", [1e3 * value for value in seconds.values()], expected.values(), "{:.0f}"),
        (axes[1], "gathered at most, MiB", list(mebibytes.values()), (), "{:.1f}"),
    ):
        top = max(*values, *(1e3 * outline for outline in outlines))
        for place, value in enumerate(values):
            ax.annotate(template.format(value), (place, value), (0, 6), textcoords="offset points", ha="center")
        ax.set(title=title, xlabel="layers ahead", ylim=(0, 1.2 * top))
        ax.grid(axis="x", visible=False)
    fig.legend(handles=[_OUTLINE], loc="outside lower right")
    told = "; ".join(f"{depth} ahead: {1e3 * seconds[depth]:.0f} ms, {mebibytes[depth]:.1f} MiB" for depth in seconds)
    return save(fig, "overlap_prefetched", f"A forward pass by layers gathered ahead: {told}.")


def ddp_passes(
    passes: Mapping[int, Sequence[Span]], ends_s: Mapping[int, float], hidden: Mapping[int, float]
) -> Picture:
    """A rank's backward pass for each size of bucket: layers above, all-reduces below, the predicted end as a line.

    Args:
        passes: MiB of a bucket -> a rank's spans. ends_s: the same -> predicted seconds. hidden: the same -> the share
            of the communication that has computation beside it.
    """
    fig, axes = new(len(passes), 1, size=(6.4, 1.2 + 1.05 * len(passes)), sharex=True)
    for ax, (mebibytes, spans) in zip(axes, passes.items(), strict=True):
        gantt(
            ax, list(spans), title=f"buckets of {mebibytes} MiB: {hidden[mebibytes]:.0%} of the communication is hidden"
        )
        ax.axvline(1e3 * ends_s[mebibytes], color=COLOURS["predicted"], linestyle=":")
        ax.set_yticks([-0.2, 0.2], ["layers", "all-reduces"])
    axes[-1].set_xlabel("milliseconds; dotted: predicted end")
    kind_legend(fig, ["compute", "communication"], loc="outside lower center", ncols=2)
    told = "; ".join(f"{mebibytes} MiB: {share:.0%} hidden" for mebibytes, share in hidden.items())
    return save(fig, "overlap_ddp", f"DDP's backward pass with buckets of {told}.")
