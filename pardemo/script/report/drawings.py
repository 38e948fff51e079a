"""Draws a step for a desk and a phone: its memory, and when its collectives were under way."""

import statistics
from collections.abc import Sequence

from pardemo.draw import palette
from pardemo.draw.canvas import Canvas
from pardemo.draw.parts import width_of
from pardemo.script.step import WARM_UP_STEPS
from pardemo.script.step.rank_trace import RankTrace
from pardemo.script.step.script_memory import MemoryColumns
from pardemo.script.step.summary import last_begun, waiting_spans
from pardemo.tables import amount

WIDE, TEXT = 640, 18
#: What memory holds -> its colour, from the bottom of a stack to its top.
HELD = {
    "held between steps": palette.SHADES["held between steps"],
    "parameters": palette.KEPT["parameters"],
    "optimizer states": palette.KEPT["optimizer states"],
    "gradients": palette.KEPT["gradients"],
    "gathered": palette.SHADES["gathered parameters"],
    "communication buffers": palette.SHADES["buckets"],
    "activations": palette.KEPT["activations"],
    "logits": palette.SHADES["logits"],
    "temporaries": palette.SHADES["temporaries"],
    "random states": palette.KNOWN[0],
}
PHASES = {
    "forward": palette.DONE["forward"],
    "backward": palette.DONE["backward"],
    "step": palette.NEW,
    "evaluation": palette.KNOWN[0],
}
#: Seconds of a step -> their colour.
SPENT = {
    "compute_s": palette.COMPUTED,
    "exposed_s": palette.DONE["communication"],
    "idle_s": palette.DONE["idle"],
    "other_s": palette.KNOWN[1],
}


def memory(course: MemoryColumns, line: str) -> str:
    """Draws a step's memory by kind, change by change; its peak, and what ran."""
    canvas = Canvas(WIDE, 330)
    columns, peak = course.columns, course.peak_bytes
    shares = {share: amount(share * peak) for share in (0.25, 0.5, 0.75, 1)}
    left, right, top, bottom = max(width_of(name, TEXT) for name in shares.values()) + 12, WIDE - 4.0, 40.0, 284.0
    wide = (right - left) / max(len(columns), 1)

    def height(nbytes: float) -> float:
        return bottom - (bottom - top) * nbytes / max(peak, 1)

    there = [kind for kind in HELD if any(column.get(kind) for column in columns)]
    sums = [0.0] * len(columns)
    edges: list[tuple[str, list[float]]] = []
    for kind in there:
        sums = [before + column.get(kind, 0) for before, column in zip(sums, columns, strict=True)]
        edges.append((kind, [height(total) for total in sums]))
    for kind, upper in reversed(edges):  # each down to the axis: the next one covers what is below it
        canvas.steps(left, wide, upper, bottom, HELD[kind])
    for share, name in shares.items():
        y = height(share * peak)
        canvas.line([(left - 4, y), (right, y)], palette.OTHER, 0.8, dashed=True)
        canvas.text(left - 8, y, name, size=TEXT, anchor="end")
    canvas.line([(left, bottom), (right, bottom)])
    x = left + wide * (course.peak_column + 0.5)
    canvas.line([(x, top - 6), (x, bottom)], dashed=True)
    words = f"peak {amount(peak)}" + (f" at {line}" if line else "")
    half = width_of(words, TEXT) / 2
    canvas.text(min(max(x, left + half), right - half), top - 22, words, size=TEXT, bold=True)
    for phase, begin, end in course.phases:
        if phase in PHASES:
            a, b = left + wide * begin, left + wide * end
            name = phase_name(phase)
            fits = width_of(name, TEXT) < b - a - 6
            canvas.box(a, bottom + 8, b - a, 30, PHASES[phase], name if fits else "", size=TEXT, thick=0.8)
    kinds = ", ".join(f"{kind} {amount(n)}" for kind, n in course.columns[course.peak_column].items() if n)
    return canvas.svg(f"Memory of one step by kind, over its allocations; {words}: {kinds}.")


def phase_name(phase: str) -> str:
    """Returns a phase's name for readers."""
    return "optimizer" if phase == "step" else phase


def timeline(traces: Sequence[RankTrace]) -> str:
    """Draws a step on each rank: when collectives were under way, and when they waited for the last rank to begin."""
    step = _median_step(traces)
    begin = min(trace.cuts[step - 1].at_s for trace in traces)
    long = max(trace.cuts[step].at_s for trace in traces) - begin or 1.0
    row = 34 if len(traces) <= 16 else 28
    label = width_of(f"rank {len(traces) - 1}", TEXT) + 12
    bottom, right = row * len(traces) + 6, WIDE - 6
    canvas = Canvas(WIDE, bottom + 34)
    scale = (right - label) / long
    last = last_begun(traces)
    for number, rank in enumerate(traces):
        y, high = 4 + row * number, row - 10
        canvas.text(label - 10, y + high / 2, f"rank {rank.rank}", size=TEXT, anchor="end")
        since, until = rank.cuts[step - 1].at_s, rank.cuts[step].at_s
        canvas.boxes([(label + scale * (since - begin), y, scale * (until - since), high)], palette.COMPUTED, thick=0.8)
        calls = [call for call in rank.calls if call.step == step]
        flights = [(call.begin_s, min(call.end_s or call.begin_s, until)) for call in calls]
        stood = [(a, min(b, until)) for a, b in rank.waits if since <= a < until]
        late = [(a, b) for a, b in waiting_spans(calls, stood, last) if b > a]
        for some, colour in (([*flights, *stood], palette.DONE["communication"]), (late, palette.DONE["idle"])):
            spans = _merge_spans(some, 0.5 / scale)
            places = [(label + scale * (a - begin), y, max(scale * (b - a), 0.5), high) for a, b in spans]
            canvas.boxes(places, colour, border=colour, thick=0)
    canvas.line([(label, bottom), (right, bottom)])
    for tick in _ticks(1e3 * long):
        x = label + scale * tick / 1e3
        canvas.line([(x, bottom), (x, bottom + 6)])
        name = f"{tick:g} ms"
        canvas.text(min(x, right - width_of(name) / 2), bottom + 20, name, size=TEXT)
    return canvas.svg(f"One step of {1e3 * long:.1f} ms on {len(traces)} ranks: when collectives were under way.")


def _median_step(traces: Sequence[RankTrace]) -> int:
    """Returns the measured step whose length on rank 0 is the median."""
    steps = range(WARM_UP_STEPS, min(len(trace.cuts) for trace in traces))
    cuts = traces[0].cuts
    long = {step: cuts[step].at_s - cuts[step - 1].at_s for step in steps}
    return min(steps, key=lambda step: abs(long[step] - statistics.median_low(long.values())))


def _merge_spans(spans: Sequence[tuple[float, float]], least_s: float) -> list[tuple[float, float]]:
    """Returns the union of spans; those that are closer than a drawing can show are one."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and begin <= joined[-1][1] + least_s:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _ticks(longest: float) -> list[float]:
    """Returns three to five round numbers from 0 up to ``longest``."""
    size = 10.0 ** len(str(int(longest)))
    step = next((size / parts for parts in (5, 10, 20, 50) if longest * parts >= 2 * size), size / 100)
    return [n * step for n in range(int(longest / step) + 1)]
