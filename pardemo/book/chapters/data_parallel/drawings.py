"""How ranks sum their gradients: at a parameter server, round a ring, by nodes, in buckets during backward."""

import math
from collections.abc import Sequence
from fractions import Fraction

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, rank_colour
from pardemo.draw.parts import SUBSCRIPTS, parts, unbroken
from pardemo.draw.player import Player
from pardemo.formulas import communication, overlap

_TALK = DONE["communication"]


@drawing(414)
def data_parallel_step(canvas: Canvas, ranks: int = 4) -> str:
    """One step: the batch is cut, every rank has the whole model, the gradients are averaged, all take the same step.

    Args:
        ranks: N, from 2 to 6.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 6:
        raise ValueError(f"a data-parallel step of 2 to 6 ranks can be drawn, not of {ranks}")
    left, each = 112, 518 / ranks
    for rank in range(ranks):
        x = left + rank * each
        middle, wide = x + each / 2, min(96, each - 14)
        canvas.text(middle, 16, f"rank {rank}", bold=True)
        canvas.box(x, 34, each, 42, rank_colour(rank), f"{rank + 1} of {ranks}")
        for y in (78, 148, 212, 274, 340):
            canvas.arrow([(middle, y), (middle, y + 20)], _TALK if y in (212, 274) else "currentColor", 2.5)
        canvas.box(middle - wide / 2, 100, wide, 46, KEPT["parameters"], "model")
        canvas.box(middle - wide / 2, 170, wide, 40, KEPT["gradients"], "g" + SUBSCRIPTS[rank], size=20)
        canvas.box(middle - wide / 2, 296, wide, 42, KEPT["gradients"], "mean")
        canvas.box(middle - wide / 2, 362, wide, 46, KEPT["parameters"], "model")
    canvas.box(left + 4, 234, 510, 38, _TALK, "all-reduce", size=20, bold=True)
    for y, label in (
        (55, "the batch"),
        (123, "before"),
        (190, "gradients"),
        (253, "S bytes"),
        (317, "gradients"),
        (385, "after"),
    ):
        canvas.text(left - 12, y, label, "end")
    return (
        f"A data-parallel step of {ranks} ranks: each has the whole model and its part of the batch, and computes "
        "gradients of its own. An all-reduce gives everyone their mean, and all replicas take the same step."
    )


@drawing(396)
def all_reduce_by_nodes(canvas: Canvas, per_node: int = 4) -> str:
    """An all-reduce in three steps on two nodes: each rank's part of its node's sum, and what is sent where.

    Args:
        per_node: G, ranks of each node, from 2 to 4.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= per_node <= 4:
        raise ValueError(f"nodes of 2 to 4 ranks can be drawn, not of {per_node}")
    left, each = 96, 536 / per_node
    for node, y in ((0, 34), (1, 256)):
        canvas.box(left, y, 536, 104, dashed=True)
        canvas.text(left - 12, y + 52, f"node {node}", "end", bold=True)
        for place in range(per_node):
            middle = left + (place + 0.5) * each
            parts(canvas, middle - 38, y + 14, 76, 48, per_node, [place], KEPT["gradients"])
            canvas.text(middle, y + 84, f"rank {node * per_node + place}")
    canvas.text(left + 268, 16, "1 and 3, inside: reduce-scatter; all-gather")
    for place in range(per_node):
        middle = left + (place + 0.5) * each
        for begin, end in (((middle, 142), (middle, 166)), ((middle, 252), (middle, 226))):
            canvas.arrow([end, begin], _TALK, 3)
    canvas.lines(
        left + 268, 184, ["2, between: all-reduce of one part,", f"S/{per_node} for each pair of ranks"], fill=_TALK
    )
    canvas.box(left, 370, 40, 20, KEPT["gradients"], thick=0.8)
    canvas.text(left + 52, 380, "after step 1: a rank's part of its node's sum", "start")
    return (
        f"Two nodes of {per_node} ranks sum their gradients in three steps. A reduce-scatter inside each node gives "
        f"every rank one of {per_node} parts of its node's sum; ranks with the same part on both nodes all-reduce it; "
        "an all-gather inside each node completes the sum everywhere."
    )


@drawing()
def parameter_server_and_ring(canvas: Canvas, ranks: int = 4, loads: bool = True) -> str:
    """A parameter server and a ring side by side: who sends gradients to whom, and how many bytes each rank sends.

    Args:
        ranks: N, from 3 to 6. Rank 0 is the server. loads: whether to show how many bytes each rank sends; without
            them readers can guess first.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 3 <= ranks <= 6:
        raise ValueError(f"a server and a ring of 3 to 6 ranks can be drawn, not of {ranks}")
    canvas.height = 326 + 34 * ranks if loads else 262
    _server(canvas, 164, ranks)
    _ring(canvas, 486, ranks, ["2(N − 1) steps,", "S/N in each"] if loads else ["chunks", "go round"])
    if not loads:
        return (
            "Every worker sends its gradients to a server and gets the sum back; in a ring each rank sends to the next."
        )
    worker, server = (f(1, ranks).sent for f in (communication.parameter_worker, communication.parameter_server))
    share = communication.ring_all_reduce(1, ranks).sent
    _loads(canvas, 20, [server] + [worker] * (ranks - 1), server)
    _loads(canvas, 346, [share] * ranks, server)
    canvas.lines(20, 276, ["one link carries (N − 1)·S in,", "and then (N − 1)·S out"], "start")
    canvas.lines(346, 276, ["each carries 2(N − 1)/N·S in", "and at once as much out"], "start")
    return (
        f"{ranks} ranks sum their gradients of S bytes. A parameter server takes in {_times(server)} and then sends "
        f"{_times(server)}, its workers {_times(worker)} each; in a ring every rank sends {_times(share)} and takes in "
        "as much meanwhile."
    )


def _server(canvas: Canvas, middle: float, ranks: int) -> None:
    canvas.text(middle, 20, "parameter server", size=22, bold=True)
    canvas.box(middle - 46, 52, 92, 44, rank_colour(0), "0 server")
    apart = 288 / (ranks - 1)
    for rank in range(1, ranks):
        x = middle + (rank - ranks / 2) * apart
        canvas.box(x - 24, 200, 48, 44, rank_colour(rank), str(rank), size=20)
        top = middle + (rank - ranks / 2) * 96 / (ranks - 1)
        canvas.arrow([(x - 8, 197), (top - 8, 100)], _TALK)
        canvas.arrow([(top + 8, 99), (x + 8, 196)], _TALK)
    canvas.lines(middle - 52, 62, ["gradients", "up, S each"], "end")
    canvas.lines(middle + 54, 62, ["the sum", "down, S each"], "start")


def _ring(canvas: Canvas, middle: float, ranks: int, caption: list[str]) -> None:
    canvas.text(middle, 20, "ring", size=22, bold=True)
    wide, high, centre = 124, 88, 148
    places = []
    for rank in range(ranks):
        turn = 2 * math.pi * rank / ranks - math.pi / 2 - math.pi / ranks
        places.append((middle + wide * math.cos(turn), centre + high * math.sin(turn)))
    for rank, (x, y) in enumerate(places):
        canvas.box(x - 22, y - 20, 44, 40, rank_colour(rank), str(rank), size=20)
        x1, y1 = places[(rank + 1) % ranks]
        canvas.arrow([_edge(x, y, x1, y1), _edge(x1, y1, x, y)], _TALK)
    canvas.lines(middle, centre - 12, caption)


def _edge(x: float, y: float, to_x: float, to_y: float) -> tuple[float, float]:
    """Where an arrow from the box at (x, y) to the one at (to_x, to_y) begins: just outside the first box."""
    dx, dy = to_x - x, to_y - y
    scale = min(25 / abs(dx) if abs(dx) > 1e-9 else math.inf, 23 / abs(dy) if abs(dy) > 1e-9 else math.inf)
    return x + dx * scale, y + dy * scale


def _loads(canvas: Canvas, left: float, loads: list[float], most: float) -> None:
    for rank, load in enumerate(loads):
        y = 324 + 34 * rank
        canvas.box(left, y, 30, 26, rank_colour(rank), str(rank))
        canvas.box(left + 36, y, 176 * load / most, 26, _TALK, thick=1)
        text = f"sends {_times(load)}" if rank == 0 else _times(load)
        canvas.text(left + 42 + 176 * load / most, y + 13, text, "start")


def _times(load: float) -> str:
    return f"{load:.3g} S".replace("1 S", "S") if load == 1 else f"{load:.3g} S"


#: Of the drawing of DDP: a layer's backward pass, a bucket's all-reduce, the optimizer's step.
_LAYER, _EXCHANGE, _STEP, _LEFT = 72, 88, 50, 122


@drawing(408)
def ddp_buckets(canvas: Canvas) -> None:
    """DDP over a backward pass: layer 4 is done first, gradients 4 and 3 fill the first bucket, and its all-reduce runs
    while layers 2 and 1 go backward. Without buckets the all-reduce starts when all is done, and the step comes
    later."""
    layers, buckets = [4, 3, 2, 1], _buckets()
    with_buckets = _LEFT + _STEP + overlap.computed_then_sent_s(
        [len(bucket) * _LAYER for bucket in buckets], [_EXCHANGE] * len(buckets)
    )  # fmt: skip
    canvas.line([(with_buckets, 222), (with_buckets, 398)], thick=1.5, dashed=True)  # behind all others
    canvas.text(_LEFT, 22, "with buckets", "start", bold=True, size=20)
    canvas.text(480, 22, "time", "end")
    canvas.arrow([(488, 22), (632, 22)], thick=2)
    _backward(canvas, 48, layers)
    canvas.text(_LEFT - 10, 130, "buckets", "end")
    canvas.text(_LEFT - 10, 198, "all-reduce", "end")
    free = 0.0
    for bucket in buckets:
        ready = _LEFT + (layers.index(bucket[-1]) + 1) * _LAYER
        x = ready - len(bucket) * _LAYER
        canvas.box(x + 3, 108, ready - x - 6, 44, dashed=True)
        for layer in bucket:
            at = _LEFT + layers.index(layer) * _LAYER
            canvas.box(at + 12, 116, 48, 28, KEPT["gradients"], "g" + SUBSCRIPTS[layer], thick=1)
            canvas.arrow([(at + 36, 90), (at + 36, 115)], KEPT["gradients"], 2.5)
        begin = max(ready, free)
        canvas.arrow([(ready - 14, 153), (ready - 14, 164), (begin + 14, 164), (begin + 14, 177)], thick=2)
        canvas.box(begin, 178, _EXCHANGE, 40, _TALK, ", ".join("g" + SUBSCRIPTS[n] for n in bucket), size=20)
        free = begin + _EXCHANGE
    canvas.box(free, 178, _STEP, 40, "none", "step")
    _at_the_end(canvas, layers, len(buckets), with_buckets)


def _buckets() -> list[list[int]]:
    """The numbers of four equal layers by bucket, two in each, as the package's data-parallel wrapper packs them."""
    import torch  # in here: charts use this room's key, and some of them do without torch

    from pardemo.data_parallel.buckets import split_into_buckets

    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters, 1)}
    return [[numbers[id(p)] for p in bucket] for bucket in split_into_buckets(parameters, bucket_bytes=8)]


def _backward(canvas: Canvas, y: float, layers: list[int]) -> None:
    canvas.text(_LEFT - 10, y + 20, "backward", "end")
    for place, layer in enumerate(layers):
        canvas.box(_LEFT + place * _LAYER, y, _LAYER, 40, DONE["backward"], f"layer {layer}")


def _at_the_end(canvas: Canvas, layers: list[int], buckets: int, with_buckets: float) -> None:
    canvas.text(_LEFT, 262, "without", "start", bold=True, size=20)
    _backward(canvas, 284, layers)
    canvas.text(_LEFT - 10, 350, "all-reduce", "end")
    ready = _LEFT + len(layers) * _LAYER
    done = ready + buckets * _EXCHANGE
    canvas.box(ready, 330, done - ready, 40, _TALK, "all gradients", size=20)
    canvas.box(done, 330, _STEP, 40, "none", "step")
    canvas.arrow([(with_buckets, 390), (done + _STEP, 390)], thick=2, both=True)
    canvas.text(with_buckets - 8, 390, "saved", "end")


_CELL, _TOP, _MARGIN = 44, 60, 96
_ROOM = 640 - _MARGIN - 20  # between the numbers of the chunks and the line that leads back


def ring_all_reduce(ranks: int = 4, laps: int = 2) -> Player:
    """A ring all-reduce in 2(N − 1) steps: which ranks' numbers each chunk contains, and which chunk was just sent.

    A chunk is a row with room for N parts. Each part stands for a rank whose numbers have been added; they are in the
    order in which they were added. The player starts at the end of the reduce-scatter.

    Args:
        ranks: N, from 2 to 5. laps: 2, or 1 for the reduce-scatter alone.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 5:
        raise ValueError(f"a ring of 2 to 5 ranks can be drawn, not of {ranks}")
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]  # held[rank][chunk]: whose numbers are in it
    names = [str(chunk) for chunk in range(ranks)]
    frames = [(_frame(held, [], ranks, names), _beginning(ranks))]
    for step in range(laps * (ranks - 1)):
        sent = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        if step >= ranks - 1:
            sent = [(rank, (rank + 1 - (step - ranks + 1)) % ranks) for rank in range(ranks)]
        before = [[set(chunk) for chunk in row] for row in held]
        for rank, chunk in sent:
            to = (rank + 1) % ranks
            held[to][chunk] = before[rank][chunk] | (before[to][chunk] if step < ranks - 1 else set())
        frames.append((_frame(held, sent, ranks, names), _caption(step, ranks, sent, names)))
    name = "ring all-reduce" if laps == 2 else "reduce-scatter round a ring"
    return Player(frames, f"{name}, {ranks} ranks", start=ranks - 1, first=0)


def _beginning(ranks: int) -> str:
    return (
        f"Each of {ranks} ranks has a tensor of its own, cut into {ranks} chunks, the rows. A coloured part with r in "
        "it: rank r's numbers are in this sum. So far each chunk has only its own rank's numbers."
    )


def _caption(step: int, ranks: int, sent: list[tuple[int, int]], names: list[str]) -> str:
    first = f"rank 0 sends chunk {names[sent[0][1]]} to rank 1"
    if step < ranks - 1:
        end = " Now each rank has one chunk with everybody's numbers: reduce-scatter is done." * (step == ranks - 2)
        return (
            f"Reduce-scatter, step {step + 1} of {ranks - 1}: {first}, which adds it to its own; all send at once.{end}"
        )
    at = step - ranks + 2
    count = unbroken(f"2({ranks} − 1)")
    end = f" Every rank has the whole sum, and has sent {count} chunks of S/{ranks}." * (at == ranks - 1)
    return f"All-gather, step {at} of {ranks - 1}: {first}, which keeps it as it is.{end}"


def _frame(held: list[list[set]], sent: list[tuple[int, int]], ranks: int, names: list[str]) -> Canvas:
    canvas = Canvas(640, _TOP + ranks * (_CELL + 10) + 44)
    wide, gap = (92, 52) if ranks < 5 else (76, 36)
    left = _MARGIN + (_ROOM - ranks * wide - (ranks - 1) * gap) / 2
    canvas.text(left - 66, 24, "chunk")
    for chunk, name in enumerate(names):
        canvas.text(left - 66, _y(chunk) + _CELL / 2, name, size=22)
    for rank, row in enumerate(held):
        x = left + rank * (wide + gap)
        canvas.text(x + wide / 2, 24, f"rank {rank}", size=22, bold=True)
        for chunk, whose in enumerate(row):
            part = wide / ranks
            for place, owner in enumerate(sorted(whose, key=lambda owner: (owner - chunk) % ranks)):
                canvas.box(x + place * part, _y(chunk), part, _CELL, rank_colour(owner), str(owner), thick=0.8)
            canvas.box(x, _y(chunk), wide, _CELL, thick=4 if len(whose) == ranks else 1)
    for rank, chunk in sent:
        _arrow(canvas, left + rank * (wide + gap) + wide, chunk, left, gap, last=rank == ranks - 1, ranks=ranks)
    return canvas


def _arrow(canvas: Canvas, right: float, chunk: int, left: float, gap: float, last: bool, ranks: int) -> None:
    """From a rank's right edge to the next rank; from the last one below all of them back to the first."""
    middle, colour = _y(chunk) + _CELL / 2, DONE["communication"]
    if not last:
        canvas.arrow([(right + 4, middle), (right + gap - 4, middle)], colour, 4)
        return
    bottom = _y(ranks) + 22
    way = [(right + 4, middle), (right + 14, middle), (right + 14, bottom), (left - 46, bottom), (left - 46, middle)]
    canvas.arrow([*way, (left - 6, middle)], colour, 4)


def _y(chunk: int) -> float:
    return _TOP + chunk * (_CELL + 10)


_SHARDS_LEFT, _HIGH, _ROW, _WIDEST = 84, 26, 34, 440


@drawing()
def unequal_shards(canvas: Canvas, samples: Sequence[int]) -> str:
    """A box for each sample, as wide as its weight: in the plain mean of the ranks' means, and in the weighted mean.

    Args:
        samples: of each rank, 2 to 4 ranks.

    Raises:
        ValueError: another number of ranks, or a rank without samples: it would not be readable.
    """
    ranks, whole = len(samples), sum(samples)
    if not 2 <= ranks <= 4 or min(samples) < 1:
        raise ValueError(f"the samples of 2 to 4 ranks can be drawn, at least one on each, not {list(samples)}")
    plain = [Fraction(1, ranks * count) for count in samples]
    panels = (
        ("plain mean: each rank counts the same", plain),
        ("weighted: each sample counts the same", [Fraction(1, whole)] * ranks),
    )
    scale = _WIDEST / (max(*samples, whole / ranks) / whole)  # units for what counts 1, the same in both panels
    canvas.height = 2 * (36 + _ROW * ranks) + 28
    for panel, (title, counts) in enumerate(panels):
        top = panel * (56 + _ROW * ranks) + 6
        canvas.text(_SHARDS_LEFT, top + 10, title, "start", size=20, bold=True)
        for rank, (number, each) in enumerate(zip(samples, counts, strict=True)):
            y, wide = top + 30 + _ROW * rank, float(each) * scale
            canvas.text(_SHARDS_LEFT - 12, y + _HIGH / 2, f"rank {rank}", "end")
            canvas.boxes(
                [(_SHARDS_LEFT + wide * k, y, wide, _HIGH) for k in range(number)], rank_colour(rank), thick=0.8
            )
            label = f"{number} {'× ' if rank or panel else 'samples × '}{each}"
            canvas.text(_SHARDS_LEFT + wide * number + 10, y + _HIGH / 2, label, "start")
    return (
        f"Ranks with {', '.join(map(str, samples))} samples. In the plain mean of their means a sample counts "
        f"{', '.join(map(str, plain))}; with weighted losses it counts {Fraction(1, whole)} everywhere."
    )
