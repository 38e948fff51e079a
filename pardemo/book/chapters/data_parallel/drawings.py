"""How ranks sum their gradients: at a parameter server, round a ring, in buckets during the backward pass."""

import math

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, KEPT, rank_colour
from pardemo.draw.parts import SUBSCRIPTS, parts
from pardemo.formulas import communication, overlap

_TALK = DONE["communication"]


def data_parallel_step(ranks: int = 4) -> Drawing:
    """One step: the batch is cut, every rank has the whole model, the gradients are averaged, all take the same step.

    Args:
        ranks: N, from 2 to 6.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= ranks <= 6:
        raise ValueError(f"a data-parallel step of 2 to 6 ranks can be drawn, not of {ranks}")
    canvas = Canvas(640, 414)
    left, each = 112, 518 / ranks
    for rank in range(ranks):
        x = left + rank * each
        middle, wide = x + each / 2, min(96, each - 14)
        canvas.text(middle, 16, f"rank {rank}", size=18, bold=True)
        canvas.box(x, 34, each, 42, rank_colour(rank), f"{rank + 1} of {ranks}", size=18)
        for y in (78, 148, 212, 274, 340):
            canvas.arrow([(middle, y), (middle, y + 20)], _TALK if y in (212, 274) else "currentColor", 2.5)
        canvas.box(middle - wide / 2, 100, wide, 46, KEPT["parameters"], "model", size=18)
        canvas.box(middle - wide / 2, 170, wide, 40, KEPT["gradients"], "g" + SUBSCRIPTS[rank], size=20)
        canvas.box(middle - wide / 2, 296, wide, 42, KEPT["gradients"], "mean", size=18)
        canvas.box(middle - wide / 2, 362, wide, 46, KEPT["parameters"], "model", size=18)
    canvas.box(left + 4, 234, 510, 38, _TALK, "all-reduce", size=20, bold=True)
    for y, label in (
        (55, "the batch"),
        (123, "before"),
        (190, "gradients"),
        (253, "S bytes"),
        (317, "gradients"),
        (385, "after"),
    ):
        canvas.text(left - 12, y, label, size=18, anchor="end")
    return Drawing(
        canvas,
        f"A data-parallel step of {ranks} ranks: each has the whole model and its part of the batch, and computes "
        "gradients of its own. An all-reduce gives everyone their mean, and all replicas take the same step.",
    )


def all_reduce_by_nodes(per_node: int = 4) -> Drawing:
    """An all-reduce in three steps on two nodes: each rank's part of its node's sum, and what is sent where.

    Args:
        per_node: G, ranks of each node, from 2 to 4.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 2 <= per_node <= 4:
        raise ValueError(f"nodes of 2 to 4 ranks can be drawn, not of {per_node}")
    canvas = Canvas(640, 396)
    left, each = 96, 536 / per_node
    for node, y in ((0, 34), (1, 256)):
        canvas.box(left, y, 536, 104, dashed=True)
        canvas.text(left - 12, y + 52, f"node {node}", size=18, bold=True, anchor="end")
        for place in range(per_node):
            middle = left + (place + 0.5) * each
            parts(canvas, middle - 38, y + 14, 76, 48, per_node, [place], KEPT["gradients"])
            canvas.text(middle, y + 84, f"rank {node * per_node + place}", size=18)
    canvas.text(left + 268, 16, "1 and 3, inside: reduce-scatter; all-gather", size=18)
    for place in range(per_node):
        middle = left + (place + 0.5) * each
        for begin, end in (((middle, 142), (middle, 166)), ((middle, 252), (middle, 226))):
            canvas.arrow([end, begin], _TALK, 3)
    canvas.lines(
        left + 268, 184, ["2, between: all-reduce of one part,", f"S/{per_node} for each pair of ranks"], fill=_TALK
    )
    canvas.box(left, 370, 40, 20, KEPT["gradients"], thick=0.8)
    canvas.text(left + 52, 380, "after step 1: a rank's part of its node's sum", size=18, anchor="start")
    return Drawing(
        canvas,
        f"Two nodes of {per_node} ranks sum their gradients in three steps. A reduce-scatter inside each node gives "
        f"every rank one of {per_node} parts of its node's sum; ranks with the same part on both nodes all-reduce it; "
        "an all-gather inside each node completes the sum everywhere.",
    )


def parameter_server_and_ring(ranks: int = 4, loads: bool = True) -> Drawing:
    """A parameter server and a ring side by side: who sends gradients to whom, and how many bytes each rank sends.

    Args:
        ranks: N, from 3 to 6. Rank 0 is the server. loads: whether to show how many bytes each rank sends; without
            them readers can guess first.

    Raises:
        ValueError: another number: it would not be readable.
    """
    if not 3 <= ranks <= 6:
        raise ValueError(f"a server and a ring of 3 to 6 ranks can be drawn, not of {ranks}")
    canvas = Canvas(640, 326 + 34 * ranks if loads else 262)
    _server(canvas, 164, ranks)
    _ring(canvas, 486, ranks, ["2(N − 1) steps,", "S/N in each"] if loads else ["chunks", "go round"])
    if not loads:
        alt_text = (
            "Every worker sends its gradients to a server and gets the sum back; in a ring each rank sends to the next."
        )
        return Drawing(canvas, alt_text)
    worker, server = (f(1, ranks).sent for f in (communication.parameter_worker, communication.parameter_server))
    share = communication.ring_all_reduce(1, ranks).sent
    _loads(canvas, 20, [server] + [worker] * (ranks - 1), server)
    _loads(canvas, 346, [share] * ranks, server)
    canvas.lines(20, 276, ["one link carries (N − 1)·S in,", "and then (N − 1)·S out"], anchor="start")
    canvas.lines(346, 276, ["each carries 2(N − 1)/N·S in", "and at once as much out"], anchor="start")
    return Drawing(
        canvas,
        f"{ranks} ranks sum their gradients of S bytes. A parameter server takes in {_times(server)} and then sends "
        f"{_times(server)}, its workers {_times(worker)} each; in a ring every rank sends {_times(share)} and takes in "
        "as much meanwhile.",
    )


def _server(canvas: Canvas, middle: float, ranks: int) -> None:
    canvas.text(middle, 20, "parameter server", size=22, bold=True)
    canvas.box(middle - 46, 52, 92, 44, rank_colour(0), "0 server", size=18)
    apart = 288 / (ranks - 1)
    for rank in range(1, ranks):
        x = middle + (rank - ranks / 2) * apart
        canvas.box(x - 24, 200, 48, 44, rank_colour(rank), str(rank))
        top = middle + (rank - ranks / 2) * 96 / (ranks - 1)
        canvas.arrow([(x - 8, 197), (top - 8, 100)], _TALK)
        canvas.arrow([(top + 8, 99), (x + 8, 196)], _TALK)
    canvas.lines(middle - 52, 62, ["gradients", "up, S each"], anchor="end")
    canvas.lines(middle + 54, 62, ["the sum", "down, S each"], anchor="start")


def _ring(canvas: Canvas, middle: float, ranks: int, caption: list[str]) -> None:
    canvas.text(middle, 20, "ring", size=22, bold=True)
    wide, high, centre = 124, 88, 148
    places = []
    for rank in range(ranks):
        turn = 2 * math.pi * rank / ranks - math.pi / 2 - math.pi / ranks
        places.append((middle + wide * math.cos(turn), centre + high * math.sin(turn)))
    for rank, (x, y) in enumerate(places):
        canvas.box(x - 22, y - 20, 44, 40, rank_colour(rank), str(rank))
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
        canvas.box(left, y, 30, 26, rank_colour(rank), str(rank), size=18)
        canvas.box(left + 36, y, 176 * load / most, 26, _TALK, thick=1)
        text = f"sends {_times(load)}" if rank == 0 else _times(load)
        canvas.text(left + 42 + 176 * load / most, y + 13, text, size=18, anchor="start")


def _times(load: float) -> str:
    return f"{load:.3g} S".replace("1 S", "S") if load == 1 else f"{load:.3g} S"


#: Of the drawing of DDP: a layer's backward pass, a bucket's all-reduce, the optimizer's step.
_LAYER, _EXCHANGE, _STEP, _LEFT = 72, 88, 50, 122


def ddp_buckets() -> Drawing:
    """A backward pass over time: gradients fill buckets, last layer first, and a full bucket is all-reduced at once."""
    layers, buckets = [4, 3, 2, 1], _buckets()
    with_buckets = _LEFT + _STEP + overlap.computed_then_sent_s(
        [len(bucket) * _LAYER for bucket in buckets], [_EXCHANGE] * len(buckets)
    )  # fmt: skip
    canvas = Canvas(640, 408)
    canvas.line([(with_buckets, 222), (with_buckets, 398)], thick=1.5, dashed=True)  # behind all others
    canvas.text(_LEFT, 22, "with buckets", bold=True, anchor="start")
    canvas.text(480, 22, "time", size=18, anchor="end")
    canvas.arrow([(488, 22), (632, 22)], thick=2)
    _backward(canvas, 48, layers)
    canvas.text(_LEFT - 10, 130, "buckets", size=18, anchor="end")
    canvas.text(_LEFT - 10, 198, "all-reduce", size=18, anchor="end")
    free = 0.0
    for bucket in buckets:
        ready = _LEFT + (layers.index(bucket[-1]) + 1) * _LAYER
        x = ready - len(bucket) * _LAYER
        canvas.box(x + 3, 108, ready - x - 6, 44, dashed=True)
        for layer in bucket:
            at = _LEFT + layers.index(layer) * _LAYER
            canvas.box(at + 12, 116, 48, 28, KEPT["gradients"], "g" + SUBSCRIPTS[layer], size=18, thick=1)
            canvas.arrow([(at + 36, 90), (at + 36, 115)], KEPT["gradients"], 2.5)
        begin = max(ready, free)
        canvas.arrow([(ready - 14, 153), (ready - 14, 164), (begin + 14, 164), (begin + 14, 177)], thick=2)
        canvas.box(begin, 178, _EXCHANGE, 40, _TALK, ", ".join("g" + SUBSCRIPTS[n] for n in bucket))
        free = begin + _EXCHANGE
    canvas.box(free, 178, _STEP, 40, "none", "step", size=18)
    _at_the_end(canvas, layers, len(buckets), with_buckets)
    return Drawing(
        canvas,
        "DDP over a backward pass: layer 4 is done first, gradients 4 and 3 fill the first bucket, and its all-reduce "
        "runs while layers 2 and 1 go backward. Without buckets the all-reduce starts when all is done, and the step "
        "comes later.",
    )


def _buckets() -> list[list[int]]:
    """The numbers of four equal layers by bucket, two in each, as the package's data-parallel wrapper packs them."""
    import torch  # in here: charts use this room's key, and some of them do without torch

    from pardemo.data_parallel.buckets import split_into_buckets

    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters, 1)}
    return [[numbers[id(p)] for p in bucket] for bucket in split_into_buckets(parameters, bucket_bytes=8)]


def _backward(canvas: Canvas, y: float, layers: list[int]) -> None:
    canvas.text(_LEFT - 10, y + 20, "backward", size=18, anchor="end")
    for place, layer in enumerate(layers):
        canvas.box(_LEFT + place * _LAYER, y, _LAYER, 40, DONE["backward"], f"layer {layer}", size=18)


def _at_the_end(canvas: Canvas, layers: list[int], buckets: int, with_buckets: float) -> None:
    canvas.text(_LEFT, 262, "without", bold=True, anchor="start")
    _backward(canvas, 284, layers)
    canvas.text(_LEFT - 10, 350, "all-reduce", size=18, anchor="end")
    ready = _LEFT + len(layers) * _LAYER
    done = ready + buckets * _EXCHANGE
    canvas.box(ready, 330, done - ready, 40, _TALK, "all gradients")
    canvas.box(done, 330, _STEP, 40, "none", "step", size=18)
    canvas.arrow([(with_buckets, 390), (done + _STEP, 390)], thick=2, both=True)
    canvas.text(with_buckets - 8, 390, "saved", size=18, anchor="end")
