"""What a measured step did, as drawings: who is in which group, memory by kind, time by rank, a step's collectives."""

import statistics
from collections.abc import Iterator, Sequence

from pardemo.draw import palette
from pardemo.draw.canvas import Canvas
from pardemo.draw.parts import width_of
from pardemo.script.step.memory import MemoryTimeline
from pardemo.script.step.parallelisms import GroupKind
from pardemo.script.step.rank import WARM, Seen
from pardemo.script.step.summary import Times, last_begun, waiting_spans
from pardemo.tables import amount
from pardemo.world.errors import ranks_text

WIDE, TEXT = 640, 18
#: Ranks that stand beside one another in the drawing of groups.
IN_A_LINE = 16
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
#: Seconds of a step -> their colour; what hides is drawn below what is computed.
SPENT = {
    "compute_s": palette.COMPUTED,
    "exposed_s": palette.DONE["communication"],
    "idle_s": palette.DONE["idle"],
    "other_s": palette.KNOWN[1],
}
HIDDEN = palette.RECEIVED


def groups(kinds: Sequence[GroupKind], ranks: int, hosts: int = 1) -> str:
    """Ranks as boxes in the frames of their hosts; below, a row for each kind of group, with the group's letter."""
    beside = ranks // hosts
    label = max(width_of(text, TEXT) for text in ("rank", *(kind.name for kind in kinds))) + 24
    lines = list(_lines_of_hosts(ranks, beside))
    gap, row = 14, 36
    most = max(sum(map(len, line)) + gap / 30 * (len(line) - 1) for line in lines)
    cell = min((WIDE - label - 8) / most, 60.0)
    high = (len(kinds) + 1) * row + (40 if hosts > 1 else 16)
    canvas = Canvas(WIDE, high * len(lines))
    colours = {letter: n for n, letter in enumerate(letter for kind in kinds for letter in kind.letters)}
    for number, line in enumerate(lines):
        top = number * high + (30 if hosts > 1 else 6)
        for place, name in enumerate(("rank", *(kind.name for kind in kinds))):
            canvas.text(label - 10, top + row * place + row / 2 - 2, name, size=TEXT, anchor="end")
        x = label
        for host in line:
            wide = cell * len(host)
            if hosts > 1:
                canvas.text(x + wide / 2, top - 16, f"node {host[0] // beside}", size=TEXT)
            canvas.box(x - 4, top - 4, wide + 8, row * (len(kinds) + 1) + 4, dashed=True, thick=1)
            for rank in host:
                canvas.box(x + cell * (rank - host[0]) + 1, top, cell - 2, row - 6, "none", str(rank), size=TEXT)
            for place, kind in enumerate(kinds, 1):
                for begin, end, letter in _group_runs(kind, host):
                    left, fill = x + cell * (begin - host[0]) + 1, "none"
                    if letter:
                        fill = palette.rank_colour(colours[letter])
                    where = left, top + row * place, cell * (end - begin) - 2, row - 6
                    canvas.box(*where, fill, letter, size=TEXT, dashed=not letter, thick=1.5 if letter else 1)
            x += wide + gap
    told = "; ".join(
        f"{letter}, {kind.name}: {ranks_text(list(of))}"
        for kind in kinds
        for letter, of in zip(kind.letters, kind.groups, strict=True)
    )
    return canvas.svg(f"The groups of {ranks} ranks. {told}.")


def memory(course: MemoryTimeline, line: str) -> str:
    """A step's memory by kind, one above the other, change by change; its peak, and what ran."""
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
        edges.append((kind, [height(one) for one in sums]))
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
            name = "optimizer" if phase == "step" else phase
            fits = width_of(name, TEXT) < b - a - 6
            canvas.box(a, bottom + 8, b - a, 30, PHASES[phase], name if fits else "", size=TEXT, thick=0.8)
    told = ", ".join(f"{kind} {amount(n)}" for kind, n in course.columns[course.peak_column].items() if n)
    return canvas.svg(f"Memory of one step by kind, over its allocations; {words}: {told}.")


def time_by_rank(times: Sequence[Times]) -> str:
    """Each rank's step as a bar: what it computes, waits for bytes, waits for ranks, and what is neither."""
    row = 40 if len(times) <= IN_A_LINE else 28
    label = width_of(f"rank {len(times) - 1}", TEXT) + 12
    canvas = Canvas(WIDE, row * len(times) + 4)
    values = [f"{1e3 * rank_times.step_s:.1f} ms" for rank_times in times]
    room = WIDE - label - max(map(width_of, values)) - 14
    longest = max(sum(getattr(rank_times, part) for part in SPENT) for rank_times in times) or 1.0
    for number, (one, value) in enumerate(zip(times, values, strict=True)):
        y, x = 4 + row * number, label
        canvas.text(label - 10, y + row / 2 - 6, f"rank {one.rank}", size=TEXT, anchor="end")
        for part, colour in SPENT.items():
            wide = room * getattr(one, part) / longest
            canvas.boxes([(x, y, wide, row - 16)] if wide else [], colour, thick=0.8)
            x += wide
        if one.hidden_s > 0:
            canvas.boxes([(label, y + row - 14, room * min(one.hidden_s / longest, 1), 6)], HIDDEN, thick=0.8)
        canvas.text(x + 8, y + row / 2 - 6, value, size=TEXT, anchor="start")
    told = "; ".join(
        f"rank {t.rank}: {1e3 * t.compute_s:.1f} computing, {1e3 * t.exposed_s:.1f} waiting for bytes, "
        f"{1e3 * t.idle_s:.1f} for ranks, {1e3 * t.other_s:.1f} other"
        for t in times
    )
    return canvas.svg(f"Milliseconds of the median step by rank. {told}.")


def timeline(seen: Sequence[Seen]) -> str:
    """One step on each rank: when a collective was under way, and when it waited for the last of its ranks to begin."""
    step = _median_step(seen)
    begin = min(trace.cuts[step - 1].at_s for trace in seen)
    long = max(trace.cuts[step].at_s for trace in seen) - begin or 1.0
    row = 34 if len(seen) <= IN_A_LINE else 28
    label = width_of(f"rank {len(seen) - 1}", TEXT) + 12
    bottom, right = row * len(seen) + 6, WIDE - 6
    canvas = Canvas(WIDE, bottom + 34)
    scale = (right - label) / long
    last = last_begun(seen)
    for number, one in enumerate(seen):
        y, high = 4 + row * number, row - 10
        canvas.text(label - 10, y + high / 2, f"rank {one.rank}", size=TEXT, anchor="end")
        since, until = one.cuts[step - 1].at_s, one.cuts[step].at_s
        canvas.boxes([(label + scale * (since - begin), y, scale * (until - since), high)], palette.COMPUTED, thick=0.8)
        calls = [call for call in one.calls if call.step == step]
        flights = [(call.begin_s, min(call.end_s or call.begin_s, until)) for call in calls]
        stood = [(a, min(b, until)) for a, b in one.waits if since <= a < until]
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
    return canvas.svg(f"One step of {1e3 * long:.1f} ms on {len(seen)} ranks: when collectives were under way.")


def _lines_of_hosts(ranks: int, beside: int) -> Iterator[list[range]]:
    """Ranks as lines of hosts' parts: whole hosts beside one another while they have room, large ones in pieces."""
    pieces = [
        range(begin, min(begin + IN_A_LINE, host + beside))
        for host in range(0, ranks, beside)
        for begin in range(host, host + beside, IN_A_LINE)
    ]
    line: list[range] = []
    for piece in pieces:
        if line and sum(map(len, line)) + len(piece) > IN_A_LINE:
            yield line
            line = []
        line.append(piece)
    yield line


def _group_runs(kind: GroupKind, host: range) -> Iterator[tuple[int, int, str]]:
    """First rank, the one after the last, and letter of neighbours in one group; each alone that is in none."""
    begin = host[0]
    for rank in host:
        letter, after = kind.letter_of(rank), kind.letter_of(rank + 1) if rank + 1 in host else None
        if letter != after or not letter:
            yield begin, rank + 1, letter
            begin = rank + 1


def _median_step(seen: Sequence[Seen]) -> int:
    """The measured step whose length on rank 0 is the median."""
    steps = range(WARM, min(len(trace.cuts) for trace in seen))
    cuts = seen[0].cuts
    long = {step: cuts[step].at_s - cuts[step - 1].at_s for step in steps}
    return min(steps, key=lambda step: abs(long[step] - statistics.median_low(long.values())))


def _merge_spans(spans: Sequence[tuple[float, float]], least_s: float) -> list[tuple[float, float]]:
    """The union of spans; those that are closer than a drawing can show are one."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if joined and begin <= joined[-1][1] + least_s:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _ticks(longest: float) -> list[float]:
    """Round numbers from 0 up to ``longest``, three to five of them."""
    size = 10.0 ** len(str(int(longest)))
    step = next((size / parts for parts in (5, 10, 20, 50) if longest * parts >= 2 * size), size / 100)
    return [n * step for n in range(int(longest / step) + 1)]
