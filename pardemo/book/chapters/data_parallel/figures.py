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
    """Plots what each rank sends and receives with each method, in S; outlines are the predictions.

    Args:
        counted, theory: method -> for each rank (bytes sent, bytes received).
    """
    panels = {}
    for method in counted:
        sides = (
            {
                side: {f"rank {rank}": both[at] for rank, both in enumerate(by_way[method])}
                for at, side in enumerate(("send", "receive"))
            }
            for by_way in (counted, theory)
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
    tables = ({f"N = {n}": {size / 1024: s for size, s in row[n].items()} for n in lines} for row in (lines, points))
    curves(ax, *tables, per=1e-3, colours=["ring"])
    log(ax, x=(), y=())
    ax.set(xlabel="tensor S, KiB", ylabel="milliseconds")
    ax.legend(title="lines: predicted", loc="upper left")
    return save(
        fig,
        "data_parallel_latency",
        "Small tensors cost the latency of the messages, large ones what their bytes cost.",
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


def times_as_fast(
    lines: Mapping[str, Mapping[float, float]], hidden_from: Mapping[str, Mapping[float, float]]
) -> Picture:
    """Plots how many times as fast as one GPU several are, against the tokens of each; a line for each link.

    Args:
        lines: link -> tokens of a GPU -> times.
        hidden_from: link -> the tokens from which the all-reduce hides -> times.
    """
    named = {link: f"{link}: from {next(iter(at)):,.0f} tokens" for link, at in hidden_from.items()}
    return line_chart(
        "data_parallel_times_as_fast", "Times as fast as one GPU, from few tokens to many, computed: {}.",
        {named[link]: line for link, line in lines.items()}, {named[link]: at for link, at in hidden_from.items()},
        size=(6.2, 3.8), x="T, tokens of each GPU in its last micro-batch", y="times as fast as one GPU",
        log_x={1e3: "1,000", 1e4: "10,000", 1e5: "100,000"}, legend="lower right", text="{:.2f}",
    )  # fmt: skip
