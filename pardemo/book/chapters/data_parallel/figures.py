"""Pictures of *Data parallelism*: bytes and seconds of a server and a ring, buckets in a pass, large batches."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.patches import Patch

from pardemo.draw import palette
from pardemo.draw.charts import bars, gantt, kind_legend, measured, predicted
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.meters.timeline import Span

#: (method, ranks, MiB) -> seconds.
Seconds = Mapping[tuple[str, int, int], float]


def bytes_per_rank(counted: Mapping[str, Sequence], theory: Mapping[str, Sequence], nbytes: int) -> Picture:
    """What each rank sends and receives with each method, in S; outlines are the predictions.

    Args:
        counted, theory: method -> for each rank (bytes sent, bytes received).
    """
    fig, axes = new(2, 1, size=(5.6, 4.8), sharex=True, sharey=True)
    for ax, (method, ranks) in zip(axes, counted.items(), strict=True):
        series, outline = (
            {side: [rank[at] / nbytes for rank in rows] for at, side in enumerate(("send", "receive"))}
            for rows in (ranks, theory[method])
        )
        bars(ax, [f"rank {rank}" for rank in range(len(ranks))], series, outline)
        ax.set(title=method, ylabel="bytes over S")
        ax.tick_params(labelbottom=True)  # ranks of the upper panel, too
    handles = {label: handle for handle, label in zip(*axes[0].get_legend_handles_labels(), strict=True)}
    order = ("send", "receive", "predicted")
    axes[0].legend([handles[label] for label in order], order, loc="upper right")
    return save(fig, "data_parallel_bytes_per_rank", "Bytes of each rank, server against ring; outlines: predicted.")


def seconds_on_links(lines: Seconds, points: Seconds) -> Picture:
    """Seconds of an all-reduce against N and against S: predictions as lines, measurements as points.

    Args:
        lines, points: predicted and measured seconds by method, N and MiB; lines may have more cases than points. The
            upper panel has all N of the size that occurs most often among the points, the lower one all sizes of the
            N that occurs most often.
    """
    fig, axes = new(2, 1, size=(5.6, 6.4), sharey=True)
    cases = list(points)
    size = Counter(case[2] for case in cases).most_common(1)[0][0]
    ranks = Counter(case[1] for case in cases).most_common(1)[0][0]
    for ax, at, fixed in ((axes[0], 1, (2, size)), (axes[1], 2, (1, ranks))):
        for method in dict.fromkeys(case[0] for case in cases):
            line_cases, point_cases = (
                sorted(case for case in seconds if case[0] == method and case[fixed[0]] == fixed[1])
                for seconds in (lines, points)
            )
            x = [case[at] for case in point_cases]
            predicted(
                ax,
                [case[at] for case in line_cases],
                [lines[case] for case in line_cases],
                f"{method}, predicted",
                method,
            )
            measured(ax, x, [points[case] for case in point_cases], f"{method}, measured", method)
        ax.set_ylim(bottom=0)
        ax.set_xticks(x)
    axes[0].set(title=f"against N, S = {size} MiB", xlabel="ranks N", ylabel="seconds", xlim=(0, None))
    axes[1].set(title=f"against S, N = {ranks}", xlabel="tensor S, MiB", ylabel="seconds", xlim=(0, None))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return save(
        fig, "data_parallel_time", "On links with a limit, a server's time grows with N, a ring's hardly; both with S."
    )


def latency(lines: Mapping[int, Mapping[int, float]], points: Mapping[int, Mapping[int, float]]) -> Picture:
    """Milliseconds of the ring against S, from small to large, a curve for each N."""
    fig, ax = new(size=(5.6, 3.8))
    for n, shape, dash in zip(lines, ("o", "s", "^", "D"), ("-", "--", ":", "-."), strict=False):
        colour = COLOURS["ring"]
        x, y = np.array(list(lines[n])) / 1024, 1e3 * np.array(list(lines[n].values()))
        ax.plot(x, y, dash, color=colour, linewidth=1.6, zorder=2)
        x, y = np.array(list(points[n])) / 1024, 1e3 * np.array(list(points[n].values()))
        ax.plot(x, y, shape, color=colour, markersize=7, linestyle="none", label=f"N = {n}", zorder=3)
    ax.set(xscale="log", yscale="log", xlabel="tensor S, KiB", ylabel="milliseconds")
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
    for (n, curve), dash, mark in zip(shares.items(), ("-", "--", ":", "-."), ("o", "s", "^", "D"), strict=False):
        ax.plot(list(curve), [100 * share for share in curve.values()], dash, color=COLOURS["ring"], linewidth=1.8)
        label = f"N = {n}: half at {halves[n] / 1e6:,.0f} MB"
        ax.plot(halves[n], 50, mark, color=COLOURS["ring"], linestyle=dash, markersize=8, label=label, zorder=3)
    for name, size in marks.items():
        ax.axvline(size, color=palette.OTHER, linewidth=1.2, zorder=1)
        ax.annotate(name, (size, 108), (-4, 0), textcoords="offset points", ha="right", va="center")
    ax.set(xscale="log", xlabel="tensor S", ylabel="share of its time that a ring waits, %", ylim=(0, 115))
    ax.set_xticks([1e3, 1e5, 1e7, 1e9], ["1 kB", "100 kB", "10 MB", "1 GB"])
    ax.set_yticks([0, 25, 50, 75, 100])
    ax.minorticks_off()
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
    for ax, (name, spans) in zip(axes, passes.items(), strict=True):
        length = max(s.end_s for s in spans) - min(s.begin_s for s in spans)
        spans = [s._replace(kind="backward") if s.kind == "compute" else s for s in spans]  # all layers do here
        gantt(ax, spans, title=f"{name}: {1e3 * length:.0f} ms, predicted {1e3 * expected_s[name]:.0f}")
        ax.set_yticks([-0.2, 0.2], ["layers", "all-reduce"])
    axes[-1].set_xlabel("milliseconds since the backward pass began")
    kind_legend(fig, ["backward", "communication"], loc="outside upper right", ncols=2)
    return save(
        fig,
        "data_parallel_overlap",
        "A rank's backward pass: all-reduces after it, beside it one by one, and in buckets.",
    )


def bucket_sizes(lines: Mapping[str, float], points: Mapping[str, float]) -> Picture:
    """Milliseconds of a backward pass for each bucket size; outlines are the predictions."""
    fig, ax = new(size=(5.6, 3.4))
    names = list(lines)
    measured_ms, outline = ([1e3 * seconds[name] for name in names] for seconds in (points, lines))
    bars(ax, names, {"communication": measured_ms}, {"communication": outline})
    for place, value in enumerate(measured_ms):
        ax.annotate(
            f"{value:.0f}", (place, max(value, outline[place])), (0, 3), textcoords="offset points", ha="center"
        )
    ax.set(xlabel="what a bucket holds", ylabel="backward pass, ms", ylim=(0, 1.18 * max(outline + measured_ms)))
    ax.legend(handles=[Patch(fill=False, edgecolor="black", label="predicted")], loc="upper right")
    return save(
        fig, "data_parallel_buckets", "Small buckets pay for messages, large ones cannot hide; the best lies between."
    )


def large_batches(losses: Mapping[str, Mapping[int, float]]) -> Picture:
    """The loss on samples kept out of the training, against the samples seen, for batches and learning rates.

    Args:
        losses: name of the run -> samples seen -> loss.
    """
    fig, ax = new(size=(5.6, 3.6))
    colours = (*list(palette.WAYS.values())[:3], palette.OTHER)
    for (name, curve), style, colour in zip(losses.items(), ("-o", "--s", ":^", "-.D"), colours, strict=True):
        ax.plot(list(curve), list(curve.values()), style, color=colour, label=name)
    ax.set(xlabel="samples seen", ylabel="loss", ylim=(0, 1.05 * max(max(curve.values()) for curve in losses.values())))
    ax.legend(loc="lower left")
    return save(
        fig,
        "data_parallel_large_batch",
        "Eight times the batch with eight times the rate learns as fast; with 64 times not.",
    )


def times_as_fast(rates: Mapping[str, Mapping[str, float]], ranks: int) -> Picture:
    """Tokens a second of N GPUs over those of one GPU, for each link and each batch of a GPU; the line is N.

    Args:
        rates: name of the batch -> link -> tokens a second over one GPU's.
    """
    fig, ax = new(size=(6.2, 3.4))
    links, wide = list(next(iter(rates.values()))), 0.8 / len(rates)
    for number, ((name, by_link), colour) in enumerate(zip(rates.items(), palette.WAYS.values(), strict=False)):
        at = np.arange(len(links)) + (number - (len(rates) - 1) / 2) * wide
        ax.bar(at, [by_link[link] for link in links], 0.86 * wide, color=colour, label=name, zorder=2)
        for x, link in zip(at, links, strict=True):
            label = f"{by_link[link]:.1f}"
            ax.annotate(label, (x, by_link[link]), (0, 3), textcoords="offset points", ha="center")
    ax.axhline(ranks, color=COLOURS["predicted"], linestyle=":", label=f"{ranks} times")
    ax.set_xticks(range(len(links)), links)
    ax.set(ylabel="tokens a second, over one GPU's", ylim=(0, 1.12 * ranks))
    ax.grid(axis="x", visible=False)
    fig.legend(loc="outside upper right", ncols=len(rates) + 1)
    values_text = "; ".join(
        f"{name} " + ", ".join(f"{by_link[link]:.1f} on {link}" for link in links) for name, by_link in rates.items()
    )
    return save(
        fig, "data_parallel_times_as_fast", f"How many times as fast as one GPU {ranks} are, computed: {values_text}."
    )
