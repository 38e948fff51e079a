"""Pictures of *Overlap*: seconds over the number of pieces, ways side by side, DDP's buckets in a backward pass."""

from collections.abc import Mapping, Sequence

from pardemo.draw.charts import bar_chart, by_kind, curves, key, lanes, log
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.meters.timeline import Span


def over_pieces(line: Mapping[int, float], points: Mapping[int, float], computing_s: float) -> Picture:
    """Milliseconds of a matrix multiplication and its all-reduce by number of pieces; the line is the law."""
    fig, ax = new(size=(6.4, 3.6))
    looks = {"colours": ("predicted", "ring"), "dashes": ("-", "none"), "marks": ("", "o"), "markersize": 7.5}
    curves(ax, {"the law": line, "measured": points}, per=1e-3, **looks)
    ax.axhline(1e3 * computing_s, color=COLOURS["compute"], linestyle="--", label="the multiplication alone")
    log(ax, x=list(points))
    ax.set(xlabel="pieces", ylabel="milliseconds", ylim=(0, 1.1e3 * max(*line.values(), *points.values())))
    ax.legend(loc="lower right")
    summary = ", ".join(f"{pieces}: {1e3 * seconds:.0f}" for pieces, seconds in points.items())
    return save(fig, "overlap_pieces", f"Milliseconds by number of pieces, measured: {summary}; the line is the law.")


def ways(
    seconds: Mapping[str, float], expected: Mapping[str, float], computing: Mapping[str, float], name: str
) -> Picture:
    """Milliseconds of several ways: computation, what is exposed, and the prediction as an outline.

    Args:
        seconds, expected: way -> measured and predicted seconds. computing: way -> seconds of it that are computation.
        name: of the picture's file.
    """
    series = {
        "computation": {way: computing[way] for way in seconds},
        "exposed": {way: max(0.0, total - computing[way]) for way, total in seconds.items()},
    }
    summary = "; ".join(f"{way} {1e3 * seconds[way]:.0f}, predicted {1e3 * expected[way]:.0f}" for way in seconds)
    return bar_chart(
        f"overlap_{name}", f"Milliseconds: {summary}.", {"milliseconds": {"series": series, "outline": expected}},
        across=True, stacked=True, per=1e-3, fills=dict(zip(series, ("compute", "communication"), strict=True)),
        text=[f"{1e3 * total:.0f} ms" for total in seconds.values()], ncols=3,
    )  # fmt: skip


def prefetched(seconds: Mapping[int, float], expected: Mapping[int, float], mebibytes: Mapping[int, float]) -> Picture:
    """Milliseconds of a forward pass, and MiB that are gathered at most, over the layers that are gathered ahead."""
    depths = "; ".join(f"{depth} ahead: {1e3 * seconds[depth]:.0f} ms, {mebibytes[depth]:.1f} MiB" for depth in seconds)
    return bar_chart(
        "overlap_prefetched", f"A forward pass by layers gathered ahead: {depths}.",
        {"milliseconds": {"series": {"compute": seconds}, "outline": expected, "per": 1e-3, "text": "{:.0f}"},
         "gathered at most, MiB": {"series": {"gathered parameters": mebibytes}, "text": "{:.1f}"}},
        axis="layers ahead", room=1.2, ncols=3,
    )  # fmt: skip


def ddp_passes(
    passes: Mapping[int, Sequence[Span]], ends_s: Mapping[int, float], hidden: Mapping[int, float]
) -> Picture:
    """A rank's backward pass for each size of bucket: layers above, all-reduces below, the predicted end as a line.

    Args:
        passes: MiB of a bucket -> a rank's spans. ends_s: the same -> predicted seconds. hidden: the same -> the share
            of the communication that has computation beside it.
    """
    fig, axes = new(len(passes), 1, size=(6.4, 1.2 + 1.05 * len(passes)), sharex=True)
    rows = {"layers": ["compute"], "all-reduces": ["communication"]}
    for ax, (mebibytes, spans) in zip(axes, passes.items(), strict=True):
        lanes(ax, by_kind(spans, rows, min(span.begin_s for span in spans)))
        ax.set_title(f"buckets of {mebibytes} MiB: {hidden[mebibytes]:.0%} of the communication is hidden")
        ax.axvline(1e3 * ends_s[mebibytes], color=COLOURS["predicted"], linestyle=":")
    axes[-1].set_xlabel("milliseconds; dotted: predicted end")
    key(fig)
    summary = "; ".join(f"{mebibytes} MiB: {share:.0%} hidden" for mebibytes, share in hidden.items())
    return save(fig, "overlap_ddp", f"DDP's backward pass with buckets of {summary}.")
