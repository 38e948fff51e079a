"""Draws how ranks sum their gradients: at a parameter server, round a ring, by nodes, in buckets during backward."""

import math
from collections.abc import Sequence
from fractions import Fraction

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, rank_colour
from pardemo.draw.parts import SUBSCRIPTS, check_range, unbroken
from pardemo.draw.player import Player
from pardemo.formulas import communication, overlap

_TALK = DONE["communication"]


@drawing(414)
def data_parallel_step(canvas: Canvas) -> None:
    """A data-parallel step of 4 ranks: each has the whole model and its part of the batch, and computes gradients of
    its own. An all-reduce gives everyone their mean, and all replicas take the same step."""
    left, each, wide = 112, 129.5, 96
    for rank in range(4):
        x = left + rank * each
        middle = x + each / 2
        canvas.text(middle, 16, f"rank {rank}", bold=True)
        canvas.box(x, 34, each, 42, rank_colour(rank), f"{rank + 1} of 4")
        for y in (78, 148, 212, 274, 340):
            canvas.arrow([(middle, y), (middle, y + 20)], _TALK if y in (212, 274) else "currentColor", 2.5)
        canvas.box(middle - wide / 2, 100, wide, 46, KEPT["parameters"], "model")
        canvas.box(middle - wide / 2, 170, wide, 40, KEPT["gradients"], "g" + SUBSCRIPTS[rank], size=20)
        canvas.box(middle - wide / 2, 296, wide, 42, KEPT["gradients"], "mean")
        canvas.box(middle - wide / 2, 362, wide, 46, KEPT["parameters"], "model")
    canvas.box(left + 4, 234, 510, 38, _TALK, "all-reduce", size=20, bold=True)
    labels = {55: "the batch", 123: "before", 190: "gradients", 253: "S bytes", 317: "gradients", 385: "after"}
    for y, label in labels.items():
        canvas.text(left - 12, y, label, "end")


@drawing(462)
def parameter_server_and_ring(canvas: Canvas, loads: bool = True) -> str:
    """A parameter server and a ring of four ranks side by side: who sends gradients to whom, and how much.

    Args:
        loads: whether to show how many bytes each rank sends; without them readers can guess first.
    """
    canvas.text(164, 20, "parameter server", size=22, bold=True)
    canvas.box(118, 52, 92, 44, rank_colour(0), "0 server")
    for rank in range(1, 4):
        x, top = 164 + (rank - 2) * 96, 164 + (rank - 2) * 32
        canvas.box(x - 24, 200, 48, 44, rank_colour(rank), str(rank), size=20)
        canvas.arrow([(x - 8, 197), (top - 8, 100)], _TALK)
        canvas.arrow([(top + 8, 99), (x + 8, 196)], _TALK)
    canvas.lines(112, 62, ["gradients", "up, S each"], "end")
    canvas.lines(218, 62, ["the sum", "down, S each"], "start")
    canvas.text(486, 20, "ring", size=22, bold=True)
    turns = [math.pi * (rank / 2 - 0.75) for rank in range(4)]
    places = [(486 + 124 * math.cos(turn), 148 + 88 * math.sin(turn)) for turn in turns]
    for rank, (x, y) in enumerate(places):
        canvas.box(x - 22, y - 20, 44, 40, rank_colour(rank), str(rank), size=20)
        x1, y1 = places[(rank + 1) % 4]
        canvas.arrow([_edge(x, y, x1, y1), _edge(x1, y1, x, y)], _TALK)
    canvas.lines(486, 136, ["2(N − 1) steps,", "S/N in each"] if loads else ["chunks", "go round"])
    if not loads:
        canvas.height = 262
        return (
            "Every worker sends its gradients to a server and gets the sum back; in a ring each rank sends to the next."
        )
    worker, server = (f(1, 4).sent for f in (communication.parameter_worker, communication.parameter_server))
    share = communication.ring_all_reduce(1, 4).sent
    for left, sent in ((20, [server, worker, worker, worker]), (346, [share] * 4)):
        for rank, load in enumerate(sent):
            y, wide = 324 + 34 * rank, 176 * load / server
            canvas.box(left, y, 30, 26, rank_colour(rank), str(rank))
            canvas.box(left + 36, y, wide, 26, _TALK, thick=1)
            canvas.text(left + 42 + wide, y + 13, "sends " * (rank == 0) + _times(load), "start")
    canvas.lines(20, 276, ["one link carries (N − 1)·S in,", "and then (N − 1)·S out"], "start")
    canvas.lines(346, 276, ["each carries 2(N − 1)/N·S in", "and at once as much out"], "start")
    return (
        f"4 ranks sum their gradients of S bytes. A parameter server takes in {_times(server)} and then sends "
        f"{_times(server)}, its workers {_times(worker)} each; in a ring every rank sends {_times(share)} and takes in "
        "as much meanwhile."
    )


def _edge(x: float, y: float, to_x: float, to_y: float) -> tuple[float, float]:
    """Where an arrow from the box at (x, y) to the one at (to_x, to_y) begins: just outside the first box."""
    dx, dy = to_x - x, to_y - y
    scale = min(25 / abs(dx) if abs(dx) > 1e-9 else math.inf, 23 / abs(dy) if abs(dy) > 1e-9 else math.inf)
    return x + dx * scale, y + dy * scale


def _times(load: float) -> str:
    return "S" if load == 1 else f"{load:.3g} S"


@drawing(408)
def ddp_buckets(canvas: Canvas) -> None:
    """DDP over a backward pass: layer 4 is done first, gradients 4 and 3 fill the first bucket, and its all-reduce runs
    while layers 2 and 1 go backward. Without buckets the all-reduce starts when all is done, and the step comes
    later."""
    buckets = [[4, 3], [2, 1]]  # in the order in which the backward pass makes gradients: two layers fill one
    layer_s, exchange_s, step_s, left = 72, 88, 50, 122  # as wide as they last
    place = {layer: left + (4 - layer) * layer_s for layer in (4, 3, 2, 1)}
    overlapped = overlap.computed_then_sent_s([len(bucket) * layer_s for bucket in buckets], [exchange_s] * 2)
    with_buckets = left + step_s + overlapped
    canvas.line([(with_buckets, 222), (with_buckets, 398)], thick=1.5, dashed=True)  # behind all others
    canvas.text(left, 22, "with buckets", "start", bold=True, size=20)
    canvas.text(480, 22, "time", "end")
    canvas.arrow([(488, 22), (632, 22)], thick=2)
    canvas.text(left, 262, "without", "start", bold=True, size=20)
    rows = {68: "backward", 130: "buckets", 198: "all-reduce", 304: "backward", 350: "all-reduce"}
    for y, name in rows.items():
        canvas.text(left - 10, y, name, "end")
    for layer, x in place.items():
        for y in (48, 284):
            canvas.box(x, y, layer_s, 40, DONE["backward"], f"layer {layer}")
    free = 0.0
    for bucket in buckets:
        x, ready = place[bucket[0]], place[bucket[-1]] + layer_s
        canvas.box(x + 3, 108, ready - x - 6, 44, dashed=True)
        for layer in bucket:
            at = place[layer]
            canvas.box(at + 12, 116, 48, 28, KEPT["gradients"], "g" + SUBSCRIPTS[layer], thick=1)
            canvas.arrow([(at + 36, 90), (at + 36, 115)], KEPT["gradients"], 2.5)
        begin = max(ready, free)
        canvas.arrow([(ready - 14, 153), (ready - 14, 164), (begin + 14, 164), (begin + 14, 177)], thick=2)
        canvas.box(begin, 178, exchange_s, 40, _TALK, ", ".join("g" + SUBSCRIPTS[n] for n in bucket), size=20)
        free = begin + exchange_s
    canvas.box(free, 178, step_s, 40, "none", "step")
    ready, done = left + 4 * layer_s, left + 4 * layer_s + 2 * exchange_s
    canvas.box(ready, 330, done - ready, 40, _TALK, "all gradients", size=20)
    canvas.box(done, 330, step_s, 40, "none", "step")
    canvas.arrow([(with_buckets, 390), (done + step_s, 390)], thick=2, both=True)
    canvas.text(with_buckets - 8, 390, "saved", "end")


def ring_all_reduce(ranks: int = 4, laps: int = 2) -> Player:
    """A ring all-reduce in 2(N − 1) steps: which ranks' numbers each chunk contains, and which chunk was just sent.

    A chunk is a row with room for N parts. Each part stands for a rank whose numbers have been added; they are in the
    order in which they were added. The player starts at the end of the reduce-scatter.

    Args:
        ranks: N, from 2 to 5; others raise a ValueError. laps: 2, or 1 for the reduce-scatter alone.
    """
    check_range(ranks, 2, 5)
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]  # held[rank][chunk]: whose numbers are in it
    caption = (
        f"Each of {ranks} ranks has a tensor of its own, cut into {ranks} chunks, the rows. A coloured part with r in "
        "it: rank r's numbers are in this sum. So far each chunk has only its own rank's numbers."
    )
    frames = [(_ring_frame(held, []), caption)]
    last = ranks - 1  # the last step of a lap
    for step in range(1, laps * last + 1):
        adds, at = step <= last, step if step <= last else step - last
        sent = [(rank, (rank + 1 - at + (not adds)) % ranks) for rank in range(ranks)]
        before = [list(row) for row in held]
        for rank, chunk in sent:
            receiver = (rank + 1) % ranks
            held[receiver][chunk] = before[rank][chunk] | (before[receiver][chunk] if adds else set())
        move = f"step {at} of {last}: rank 0 sends chunk {sent[0][1]} to rank 1"
        if adds:
            caption = f"Reduce-scatter, {move}, which adds it to its own; all send at once."
            caption += " Now each rank has one chunk with everybody's numbers: reduce-scatter is done." * (at == last)
        else:
            caption = f"All-gather, {move}, which keeps it as it is."
            count = unbroken(f"2({ranks} − 1)")
            caption += f" Every rank has the whole sum, and has sent {count} chunks of S/{ranks}." * (at == last)
        frames.append((_ring_frame(held, sent), caption))
    name = "ring all-reduce" if laps == 2 else "reduce-scatter round a ring"
    return Player(frames, f"{name}, {ranks} ranks", start=last, first=0)


def _ring_frame(held: list[list[set]], sent: list[tuple[int, int]]) -> Canvas:
    ranks, cell = len(held), 44
    tops = [60 + 54 * chunk for chunk in range(ranks + 1)]
    canvas = Canvas(640, tops[-1] + 44)
    wide, gap = (92, 52) if ranks < 5 else (76, 36)
    left = 96 + (524 - ranks * wide - (ranks - 1) * gap) / 2
    canvas.text(left - 66, 24, "chunk")
    for chunk in range(ranks):
        canvas.text(left - 66, tops[chunk] + cell / 2, str(chunk), size=22)
    for rank, row in enumerate(held):
        x, part = left + rank * (wide + gap), wide / ranks
        canvas.text(x + wide / 2, 24, f"rank {rank}", size=22, bold=True)
        for chunk, whose in enumerate(row):
            for index, owner in enumerate(sorted(whose, key=lambda owner: (owner - chunk) % ranks)):
                canvas.box(x + index * part, tops[chunk], part, cell, rank_colour(owner), str(owner), thick=0.8)
            canvas.box(x, tops[chunk], wide, cell, thick=4 if len(whose) == ranks else 1)
    for rank, chunk in sent:
        right, middle, low = left + rank * (wide + gap) + wide, tops[chunk] + cell / 2, tops[-1] + 22
        way = [(right + 4, middle), (right + gap - 4, middle)]
        if rank == ranks - 1:  # below all of them back to the first
            around = [(right + 14, middle), (right + 14, low), (left - 46, low), (left - 46, middle)]
            way = [way[0], *around, (left - 6, middle)]
        canvas.arrow(way, _TALK, 4)
    return canvas


@drawing()
def unequal_shards(canvas: Canvas, samples: Sequence[int]) -> str:
    """A box for each sample, as wide as its weight: in the plain mean of the ranks' means, and in the weighted mean.

    Args:
        samples: of each rank, 2 to 4 ranks, at least one on each; others raise a ValueError.
    """
    ranks, total = len(samples), sum(samples)
    if not 2 <= ranks <= 4 or min(samples) < 1:
        raise ValueError(f"the samples of 2 to 4 ranks can be drawn, at least one on each, not {list(samples)}")
    left, plain = 84, [Fraction(1, ranks * count) for count in samples]
    panels = (
        ("plain mean: each rank counts the same", plain),
        ("weighted: each sample counts the same", [Fraction(1, total)] * ranks),
    )
    scale = 440 / (max(*samples, total / ranks) / total)  # units for what counts 1, the same in both panels
    canvas.height = 2 * (36 + 34 * ranks) + 28
    for panel, (title, counts) in enumerate(panels):
        top = panel * (56 + 34 * ranks) + 6
        canvas.text(left, top + 10, title, "start", size=20, bold=True)
        for rank, (number, each) in enumerate(zip(samples, counts, strict=True)):
            y, wide = top + 30 + 34 * rank, float(each) * scale
            canvas.text(left - 12, y + 13, f"rank {rank}", "end")
            canvas.boxes([(left + wide * k, y, wide, 26) for k in range(number)], rank_colour(rank), thick=0.8)
            label = f"{number} {'× ' if rank or panel else 'samples × '}{each}"
            canvas.text(left + wide * number + 10, y + 13, label, "start")
    return (
        f"Ranks with {', '.join(map(str, samples))} samples. In the plain mean of their means a sample counts "
        f"{', '.join(map(str, plain))}; with weighted losses it counts {Fraction(1, total)} everywhere."
    )
