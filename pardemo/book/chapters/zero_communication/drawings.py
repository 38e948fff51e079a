"""Draws what ZeRO sends: when in a step, and what of it crosses from node to node."""

from pardemo.book.page.rule import rule
from pardemo.draw.canvas import Canvas, Drawing, drawing
from pardemo.draw.palette import DONE, KEPT, SHADES
from pardemo.draw.parts import legend, parts

_FORWARD, _BACKWARD, _THIRD, _UPDATE = 40, 64, 29, 108  # widths: a layer, a layer, a third of Ψ, the update
_LEFT, _HIGH = 10, 30


@drawing(524)
def zero_traffic(canvas: Canvas) -> None:
    """One step in order. Data parallelism sums gradients after the backward pass, a reduce-scatter and an all-gather,
    and updates all. ZeRO-1 updates an N-th between the two, and gathers parameters. ZeRO-2 reduces layer by layer
    during the backward pass. ZeRO-3 also gathers each layer before its forward and before its backward, and nothing at
    the end."""
    back = _LEFT + 3 * _FORWARD + 8
    after = back + 3 * _BACKWARD + 8
    for x, word in ((_LEFT, "forward"), (back, "backward")):
        canvas.text(x, 14, word, "start")
    canvas.text(556, 14, "order, not seconds", "end")
    canvas.arrow([(564, 14), (630, 14)], thick=2)
    rows = {
        "data parallel": ("RS gradients", "AG gradients", "update"),
        "ZeRO-1": ("RS gradients", "update", "AG parameters"),
        "ZeRO-2": ("update", "AG parameters"),
        "ZeRO-3": ("update",),
    }
    for number, (name, end) in enumerate(rows.items()):
        y, late = 34 + 106 * number, (_THIRD + 6) * (name == "ZeRO-3")  # its first layer has to be there first
        canvas.text(_LEFT, y + 12, name, "start", bold=True, size=20)
        x_forward = [_LEFT + late + index * _FORWARD for index in range(3)]
        x_backward = [back + late + index * _BACKWARD for index in range(3)]
        x = after + late
        for index in range(3):
            canvas.box(x_forward[index], y + 28, _FORWARD, _HIGH, DONE["forward"], str(index + 1))
            canvas.box(x_backward[index], y + 28, _BACKWARD, _HIGH, DONE["backward"], str(3 - index))
        if name == "ZeRO-3":  # the next layer's parameters arrive while this one computes
            for at in (_LEFT, *(x + 4 for x in x_forward), *(x + 1 for x in x_backward[:2])):
                _travels(canvas, at, y, "AG parameters", 1)
        if name in ("ZeRO-2", "ZeRO-3"):  # the last layer's gradients leave meanwhile
            for at in (*(x + 33 for x in x_backward[1:]), x):
                _travels(canvas, at, y, "RS gradients", 1)
            x += _THIRD + 6
        for event in end:
            if event == "update":
                whose = "update all" if name == "data parallel" else "update 1/N"
                canvas.box(x, y + 28, _UPDATE, _HIGH, "none", whose)
                x += _UPDATE + 6
            else:
                _travels(canvas, x, y, event, 3)
                x += 3 * _THIRD + 6
    legend(canvas, _LEFT, 472, {kind: KEPT[kind] for kind in ("gradients", "parameters")})
    canvas.text(_LEFT, 504, "RS: reduce-scatter, AG: all-gather", "start")


def _travels(canvas: Canvas, x: float, y: float, event: str, thirds: int) -> None:
    letter, kind = event.split()
    canvas.box(x, y + 62, thirds * _THIRD, 26, KEPT[kind], letter, bold=thirds == 3)


@drawing(524)
def shards_on_nodes(canvas: Canvas) -> None:
    """Four ranks on two nodes. ZeRO-3: each keeps a quarter; two gathers and a reduction cross from node to node. hpZ:
    each keeps a quarter and a copy of half; the gather of the backward pass stays inside. HSDP: each keeps half, and
    nodes are replicas; only the all-reduce of the gradients of a half crosses."""
    rows = {
        "ZeRO-3": ("gather forward", "gather backward", "reduce gradients"),
        "hpZ": ("gather forward", "reduce gradients"),
        "HSDP": ("all-reduce of halves",),
    }
    second = SHADES["gathered parameters"]
    for number, (name, crossing) in enumerate(rows.items()):
        y = 8 + 160 * number
        canvas.text(10, y + 12, name, "start", bold=True, size=22)
        for node, x in enumerate((8, 440)):
            canvas.box(x, y + 30, 192, 108, thick=1.5)
            canvas.text(x + 192, y + 12, f"node {node}", "end")
            for index in range(2):
                left, wide, rank = x + 14 + 88 * index, 32 if name == "hpZ" else 72, 2 * node + index
                halves = [2 * index, 2 * index + 1]
                parts(canvas, left, y + 40, wide, 64, 4, halves if name == "HSDP" else [rank], KEPT["parameters"])
                if name == "hpZ":
                    parts(canvas, left + 40, y + 40, wide, 64, 4, halves, second)
                canvas.text(left + 36, y + 120, f"rank {rank}")
        middle = y + 84
        for index, word in enumerate(crossing):
            level = middle + 40 * (index - (len(crossing) - 1) / 2)
            colour = KEPT["parameters"] if "gather" in word else KEPT["gradients"]
            canvas.arrow([(210, level + 10), (430, level + 10)], colour, 4, both=True)
            canvas.text(320, level - 6, word)
    legend(canvas, 10, 504, {"kept": KEPT["parameters"], "second copy, for the backward pass": second})


def sharding_choice() -> Drawing:
    """The rule, with the lines of replicas and of ZeRO-1 to ZeRO-3 marked."""
    return rule(("ZeRO-3", "ZeRO-2", "ZeRO-1", "replicas"))
