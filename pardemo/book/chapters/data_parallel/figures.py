"""Pictures of *Data parallelism*: bytes and seconds of a server and a ring, buckets in a pass, large batches."""

from collections import Counter
from collections.abc import Mapping, Sequence

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, by_kind, curves, key, lanes, line_chart, log
from pardemo.draw.style import Picture, new, save
from pardemo.meters.timeline import Span

#: (method, ranks, MiB) -> seconds.
Seconds = Mapping[tuple[str, int, int], float]


def bytes_per_rank(counted: Mapping[str, Sequence], theory: Mapping[str, Sequence], nbytes: int) -> Picture:
    """What each rank sends and receives with each method, in S; outlines are the predictions.

    Args:
        counted, theory: method -> for each rank (bytes sent, bytes received).
    """
    panels = {}
    for method in counted:
        sides = (
            {
                side: {f"rank {rank}": both[at] for rank, both in enumerate(of[method])}
                for at, side in enumerate(("send", "receive"))
            }
            for of in (counted, theory)
        )
        panels[method] = dict(zip(("series", "outline"), sides, strict=True))
    return bar_chart(
        "data_parallel_bytes_per_rank", "Bytes of each rank over S, server against ring: {}; outlines: predicted.",
        panels, per=nbytes, size=(5.6, 5.2), beside=False, shared=True, unit="bytes over S", ncols=3,
    )  # fmt: skip


def seconds_on_links(lines: Seconds, points: Seconds) -> Picture:
    """Seconds of an all-reduce against N and against S: predictions as lines, measurements as points.

    Args:
        lines, points: predicted and measured seconds by method, N and MiB; lines may have more cases than points. The
            upper panel has all N of the size that occurs most often among the points, the lower one all sizes of the
            N that occurs most often.
    """
    fig, axes = new(2, 1, size=(5.6, 6.4), sharey=True)
    size = Counter(case[2] for case in points).most_common(1)[0][0]
    ranks = Counter(case[1] for case in points).most_common(1)[0][0]
    methods = list(dict.fromkeys(case[0] for case in points))
    for ax, at, (place, value) in ((axes[0], 1, (2, size)), (axes[1], 2, (1, ranks))):
        rules, measured = (
            {name: {case[at]: seconds[case] for case in sorted(seconds) if (case[0], case[place]) == (name, value)}
             for name in methods} for seconds in (lines, points)
        )  # fmt: skip
        for name in methods:
            mark, dash = {"parameter server": ("s", "--")}.get(name, ("o", "-"))
            curves(ax, {f"{name}, predicted": rules[name]}, colours=[name], dashes=[dash])
            points_of = {f"{name}, measured": measured[name]}
            curves(ax, points_of, colours=[name], dashes=["none"], marks=mark, markersize=7)
        ax.set(xticks=list(next(iter(measured.values()))), ylabel="seconds", xlim=(0, None), ylim=(0, None))
    axes[0].set(title=f"against N, S = {size} MiB", xlabel="ranks N")
    axes[1].set(title=f"against S, N = {ranks}", xlabel="tensor S, MiB")
    key(fig)
    return save(
        fig, "data_parallel_time", "On links with a limit, a server's time grows with N, a ring's hardly; both with S."
    )


def latency(lines: Mapping[int, Mapping[int, float]], points: Mapping[int, Mapping[int, float]]) -> Picture:
    """Milliseconds of the ring against S, from small to large, a curve for each N."""
    fig, ax = new(size=(5.6, 3.8))
    tables = ({f"N = {n}": {size / 1024: s for size, s in of[n].items()} for n in lines} for of in (lines, points))
    curves(ax, *tables, per=1e-3, colours=["ring"])
    log(ax, x=(), y=())
    ax.set(xlabel="tensor S, KiB", ylabel="milliseconds")
    ax.legend(title="lines: predicted", loc="upper left")
    return save(
        fig,
        "data_parallel_latency",
        "Small tensors cost the latency of the messages, large ones what their bytes cost.",
    )


def waiting_rings(
    shares: Mapping[int, Mapping[float, float]], halves: Mapping[int, float], marks: Mapping[str, float]
) -> Picture:
    """The share of its time that a ring waits for messages, in per cent, against S; a curve for each N.

    Args:
        shares: N -> bytes -> share. halves: N -> bytes at which half of the time is waiting. marks: name -> bytes.
    """
    fig, ax = new(size=(6.2, 3.9))
    names = {n: f"N = {n}: half at {half / 1e6:,.0f} MB" for n, half in halves.items()}
    points = {names[n]: {half: 0.5} for n, half in halves.items()}
    curves(ax, {names[n]: curve for n, curve in shares.items()}, points, per=0.01, colours=["ring"])
    for name, size in marks.items():
        ax.axvline(size, color=palette.OTHER, linewidth=1.2, zorder=1)
        ax.annotate(name, (size, 108), (-4, 0), textcoords="offset points", ha="right", va="center")
    log(ax, x={1e3: "1 kB", 1e5: "100 kB", 1e7: "10 MB", 1e9: "1 GB"})
    ax.set(xlabel="tensor S", ylabel="share of its time that a ring waits, %", ylim=(0, 115), yticks=range(0, 101, 25))
    ax.legend(loc="lower left", frameon=True, framealpha=1, edgecolor="white")  # over the lines of the marks
    values_text = ", ".join(f"{size / 1e6:,.0f} MB for {n} ranks" for n, size in halves.items())
    return save(
        fig,
        "data_parallel_waiting",
        f"Below some size a ring mostly waits for its messages: half of its time at {values_text}.",
    )


def backward_passes(passes: Mapping[str, Sequence[Span]], expected_s: Mapping[str, float]) -> Picture:
    """A rank's backward pass in several ways, one below the other: computation above, communication below.

    Args:
        expected_s: the predicted length of each, in seconds.
    """
    fig, axes = new(len(passes), 1, size=(6.2, 1.3 * len(passes) + 0.6), sharex=True)
    rows = {"layers": ["backward"], "all-reduce": ["communication"]}
    for ax, (name, spans) in zip(axes, passes.items(), strict=True):
        begin, end = min(s.begin_s for s in spans), max(s.end_s for s in spans)
        spans = [span._replace(kind="backward") if span.kind == "compute" else span for span in spans]
        lanes(ax, by_kind(spans, rows, begin))
        ax.set_title(f"{name}: {1e3 * (end - begin):.0f} ms, predicted {1e3 * expected_s[name]:.0f}")
    axes[-1].set_xlabel("milliseconds since the backward pass began")
    key(fig, loc="outside upper right")
    return save(
        fig,
        "data_parallel_overlap",
        "A rank's backward pass: all-reduces after it, beside it one by one, and in buckets.",
    )


def bucket_sizes(lines: Mapping[str, float], points: Mapping[str, float]) -> Picture:
    """Milliseconds of a backward pass for each bucket size; outlines are the predictions."""
    return bar_chart(
        "data_parallel_buckets",
        "Small buckets pay for messages, large ones cannot hide; the best lies between. Milliseconds: {}.",
        {"backward pass, ms": {"series": {"measured": points}, "outline": lines}}, per=1e-3, text="{:.0f}",
        fills={"measured": "communication"}, axis="what a bucket holds", size=(5.6, 3.6),
    )  # fmt: skip


def large_batches(losses: Mapping[str, Mapping[int, float]]) -> Picture:
    """The loss on samples kept out of the training, against the samples seen, for batches and learning rates.

    Args:
        losses: name of the run -> samples seen -> loss.
    """
    return line_chart(
        "data_parallel_large_batch",
        "Eight times the batch with eight times the rate learns as fast; with 64 times not. Losses: {}.",
        losses, size=(5.6, 3.6), x="samples seen", y="loss", legend="lower left", marks="os^D",
        colours=(*list(palette.WAYS.values())[:3], palette.OTHER),
    )  # fmt: skip


def times_as_fast(rates: Mapping[str, Mapping[str, float]], ranks: int) -> Picture:
    """Tokens a second of N GPUs over those of one GPU, for each link and each batch of a GPU; the line is N.

    Args:
        rates: name of the batch -> link -> tokens a second over one GPU's.
    """
    return bar_chart(
        "data_parallel_times_as_fast", f"How many times as fast as one GPU {ranks} are, computed: {{}}.",
        {"tokens a second, over one GPU's": {"series": rates}}, text="{:.1f}", line=(f"{ranks} times", ranks),
        fills=dict(zip(rates, palette.WAYS.values(), strict=False)), ncols=len(rates) + 1, size=(6.2, 3.4),
    )  # fmt: skip
