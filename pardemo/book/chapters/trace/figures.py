"""Pictures of *A trace, line by line*: a step's lanes, own times, what is exposed, who waits for whom."""

from collections.abc import Iterable, Mapping, Sequence

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, key, lanes, words
from pardemo.draw.style import COLOURS, Picture, new, save
from pardemo.meters.timeline import Span, covered_s
from pardemo.meters.trace import Bar

_PHASES = {"data": palette.OTHER, "forward": "forward", "backward": "backward", "optimizer": "optimizer states"}
MULTIPLICATIONS = ("aten::mm", "aten::addmm", "aten::bmm")


def _boxes(bars: Iterable[Bar], kind: str, begin_s: float) -> list[tuple[float, float, str]]:
    """Boxes of one kind; milliseconds from ``begin_s`` on."""
    return [(1e3 * (bar.begin_s - begin_s), 1e3 * (bar.end_s - begin_s), kind) for bar in bars]


def _by_thread(row: str, bars: Sequence[Bar], kind: str, begin_s: float) -> dict[str, list]:
    """Rows of one name, one for each thread: bars of two threads can be open at the same time."""
    threads = list(dict.fromkeys(bar.lane for bar in bars))  # a row's name is its key: a no-break space more for each
    return {
        row + "\N{NO-BREAK SPACE}" * number: _boxes((bar for bar in bars if bar.lane == thread), kind, begin_s)
        for number, thread in enumerate(threads)
    }


def _phases(bars: Sequence[Bar], begin_s: float) -> list[tuple[float, float, str]]:
    named = [bar for phase in _PHASES for bar in bars if bar.name == phase]
    return [box for bar in named for box in _boxes([bar], bar.name, begin_s)]


def lanes_of_a_step(bars: Sequence[Bar]) -> Picture:
    """A rank's step: the phases that the program names, its operators, the matrix multiplications, the all-reduces."""
    begin = min(bar.begin_s for bar in bars)
    length = 1e3 * (max(bar.end_s for bar in bars) - begin)
    fig, ax = new(size=(6.8, 3.3))
    operators = [bar for bar in bars if bar.kind == "cpu_op"]
    multiplied = [bar for bar in bars if bar.name in MULTIPLICATIONS]
    sums = [bar for bar in bars if bar.communicates]
    rows = {
        "phases": _phases(bars, begin),
        "operators": _boxes(operators, palette.OTHER, begin),
        "matmuls": _boxes(multiplied, "compute", begin),
        **_by_thread("all-reduces", sums, "communication", begin),
    }
    lanes(ax, rows, _PHASES)
    for left, right, phase in rows["phases"]:
        if right - left > 0.08 * length:
            ink = palette.ink_on(COLOURS.get(_PHASES[phase], palette.OTHER))
            ax.text((left + right) / 2, 0, phase, ha="center", va="center", color=ink)
    ax.set_xlabel("ms")
    return save(
        fig, "trace_lanes",
        f"A rank's step of {length:.0f} ms: {len(operators):,} operators, of them {len(multiplied)} matmuls; "
        f"{len(sums)} all-reduces.",
    )  # fmt: skip


def own_times(own: Mapping[str, float], whole: Mapping[str, float], most: int = 7) -> Picture:
    """The operators with most own time, and the phases; outlines are their bars' whole lengths.

    Args:
        own, whole: name -> seconds.
    """
    operators = sorted((name for name in own if name not in _PHASES), key=own.__getitem__, reverse=True)[:most]
    phases = [phase for phase in ("forward", "backward", "optimizer") if phase in own]
    names = sorted([*operators, *phases], key=own.__getitem__, reverse=True)
    fills = ["compute" if name in MULTIPLICATIONS else _PHASES.get(name, palette.OTHER) for name in names]
    own_s, whole_s = ({_short_name(name): seconds[name] for name in names} for seconds in (own, whole))
    return bar_chart(
        "trace_own_times", "Own time by name, ms: {}.",
        {"ms": {"series": {"own": own_s}, "outline": whole_s}}, fills={"own": fills}, per=1e-3, across=True,
        text="{:.1f}", outlined="with all that is inside", size=(6.8, 0.44 * len(names) + 1.4),
    )  # fmt: skip


def _short_name(name: str) -> str:
    last = name.rsplit("::", 1)[-1].rsplit(": ", 1)[-1]
    return last if len(last) <= 24 else last[:23] + "…"


def exposed_parts(cases: Mapping[str, Sequence[Bar]]) -> Picture:
    """The backward pass of each case: what its operators compute, and its all-reduces below, the exposed part dark.

    Args:
        cases: name -> bars of a rank.
    """
    fig, ax = new(size=(6.8, 0.9 * len(cases) + 1.9))
    rows, summaries = {}, []
    for number, (name, bars) in enumerate(cases.items()):
        begin, end = next((bar.begin_s, bar.end_s) for bar in bars if bar.name == "backward")
        work = [bar for bar in bars if bar.kind == "cpu_op" and begin <= bar.begin_s < end]
        sums = [bar for bar in bars if bar.communicates]
        late = [piece for bar in sums for piece in _without(bar, work)]
        rows[f"{name}:\noperators"] = _boxes(work, "computes", begin)
        # a row's name is its key: a no-break space more for each
        rows["all-reduces" + "\N{NO-BREAK SPACE}" * number] = [
            *_boxes(sums, "hidden", begin), *_boxes(late, "exposed", begin)
        ]  # fmt: skip
        summaries.append(f"{name}: {len(sums)} all-reduces, {1e3 * _open_s(late):.0f} ms exposed")
    lanes(ax, rows, {"computes": "compute", "hidden": palette.RECEIVED, "exposed": "communication"})
    ax.set_xlabel("ms of the backward pass")
    key(fig, ncols=3)
    return save(fig, "trace_exposed", "; ".join(summaries) + ".")


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


def _open_s(bars: Iterable[Bar]) -> float:
    """For how long at least one of the bars is open."""
    return covered_s([Span(0, bar.kind, bar.name, bar.begin_s, bar.end_s) for bar in bars])


def late_rank(ranks: Mapping[int, Sequence[Bar]]) -> Picture:
    """Two ranks on one clock: phases, and all-reduces, dark from when the last rank has come."""
    fig, ax = new(size=(6.8, 3.4))
    begin = min(bar.begin_s for bars in ranks.values() for bar in bars)
    sums = {rank: [bar for bar in bars if bar.communicates] for rank, bars in ranks.items()}
    last = [max(bar.begin_s for bar in same) for same in zip(*sums.values(), strict=True)]
    rows = {}
    for rank, bars in ranks.items():
        waits = [bar._replace(end_s=there) for bar, there in zip(sums[rank], last, strict=True)]
        works = [bar._replace(begin_s=there) for bar, there in zip(sums[rank], last, strict=True)]
        rows[f"rank {rank}"] = _phases(bars, begin)
        rows[f"its all-reduces{chr(160) * rank}"] = [
            *_boxes(waits, "waits for the other rank", begin), *_boxes(works, "both are there", begin)
        ]  # fmt: skip
    lanes(ax, rows, _PHASES | {"waits for the other rank": ("wait", ""), "both are there": "communication"})
    ax.set_xlabel("ms")
    key(fig, ncols=3)
    summary = words({f"on rank {rank}": bars[0].seconds for rank, bars in sums.items()}, "{:.0f} ms", per=1e-3)
    return save(fig, "trace_late_rank", f"Two ranks on one clock; the first all-reduce's bar is {summary}.")


def step_of_a_gpu(bars: Sequence[Bar], step: str) -> Picture:
    """A step of a GPU's trace: the program's phases on the CPU, the kernels, and nccl's, the exposed part dark."""
    begin, end = next((bar.begin_s, bar.end_s) for bar in bars if bar.name == step)
    inside = [bar for bar in bars if begin <= bar.begin_s < end]
    named = [bar._replace(name=bar.name.strip("# ")) for bar in inside if bar.kind == "user_annotation"]
    kernels = [bar for bar in inside if bar.kind == "kernel"]
    sums = [bar for bar in kernels if bar.communicates]
    work = [bar for bar in kernels if not bar.communicates]
    late = [piece for bar in sums for piece in _without(bar, work)]
    rows = {
        "CPU": _phases(named, begin),
        "kernels": _boxes(work, "computes", begin),
        "all-reduces": [*_boxes(sums, "hidden", begin), *_boxes(late, "exposed", begin)],
    }
    fig, ax = new(size=(6.8, 2.9))
    lanes(ax, rows, _PHASES | {"computes": "compute", "hidden": palette.RECEIVED, "exposed": "communication"})
    ax.set_xlabel("ms")
    key(fig, ncols=3)
    exposed_ms = 1e3 * _open_s(late)
    return save(
        fig, "trace_of_a_gpu",
        f"A step of {1e3 * (end - begin):.0f} ms on a GPU: {len(work)} kernels with gaps; {len(sums)} of "
        f"nccl's, of which {exposed_ms:.0f} ms are exposed.",
    )  # fmt: skip
