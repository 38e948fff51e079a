"""What ZeRO sends: when in a step, and what of it crosses from node to node."""

from pardemo.draw.canvas import Canvas, Drawing, drawing
from pardemo.draw.palette import DONE, KEPT, SHADES, rank_colour
from pardemo.draw.parts import SUBSCRIPTS, legend, parts
from pardemo.draw.rule import rule

_TALK = DONE["communication"]
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
        x_forward = [_LEFT + late + place * _FORWARD for place in range(3)]
        x_backward = [back + late + place * _BACKWARD for place in range(3)]
        x = after + late
        for place in range(3):
            canvas.box(x_forward[place], y + 28, _FORWARD, _HIGH, DONE["forward"], str(place + 1))
            canvas.box(x_backward[place], y + 28, _BACKWARD, _HIGH, DONE["backward"], str(3 - place))
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
            for place in range(2):
                left, wide, rank = x + 14 + 88 * place, 32 if name == "hpZ" else 72, 2 * node + place
                halves = [2 * place, 2 * place + 1]
                parts(canvas, left, y + 40, wide, 64, 4, halves if name == "HSDP" else [rank], KEPT["parameters"])
                if name == "hpZ":
                    parts(canvas, left + 40, y + 40, wide, 64, 4, halves, second)
                canvas.text(left + 36, y + 120, f"rank {rank}")
        middle = y + 84
        for place, word in enumerate(crossing):
            level = middle + 40 * (place - (len(crossing) - 1) / 2)
            colour = KEPT["parameters"] if "gather" in word else KEPT["gradients"]
            canvas.arrow([(210, level + 10), (430, level + 10)], colour, 4, both=True)
            canvas.text(320, level - 6, word)
    legend(canvas, 10, 504, {"kept": KEPT["parameters"], "second copy, for the backward pass": second})


@drawing(404)
def sums_in_8_bits(canvas: Canvas) -> None:
    """Rank 3's part of a sum over four ranks. On a ring each rank adds its numbers to what arrives, and what it sends
    on is rounded again: three roundings, of sums of one, two and three ranks. In an all-to-all three ranks send their
    numbers directly, rounded once each."""
    canvas.text(10, 14, "ring", "start", size=22, bold=True)
    canvas.text(80, 14, "every hop rounds a larger sum again", "start")
    places = [70 + 165 * rank for rank in range(4)]
    for rank, x in enumerate(places):
        canvas.box(x - 30, 84, 60, 50, rank_colour(rank), f"g{SUBSCRIPTS[rank]}", size=22)
        if rank:
            before = places[rank - 1]
            canvas.arrow([(before + 32, 109), (x - 33, 109)], _TALK)
            canvas.box((before + x) / 2 - 22, 56, 44, 30, _TALK, "≈", size=22, bold=True)
            canvas.text((before + x) / 2, 42, " + ".join(f"g{SUBSCRIPTS[r]}" for r in range(rank)))
    canvas.text(places[3], 154, "the sum")
    canvas.text(10, 200, "all-to-all", "start", size=22, bold=True)
    canvas.text(130, 200, "each rank's numbers are rounded once", "start")
    for rank in range(3):
        y = 226 + 56 * rank
        canvas.box(places[0] - 30, y, 60, 46, rank_colour(rank), f"g{SUBSCRIPTS[rank]}", size=22)
        canvas.box(places[1] - 22, y + 8, 44, 30, _TALK, "≈", size=22, bold=True)
        canvas.line([(places[0] + 32, y + 23), (places[1] - 24, y + 23)], _TALK, 3)
        canvas.arrow([(places[1] + 24, y + 23), (places[3] - 33, 305 + 14 * (rank - 1))], _TALK)
    canvas.box(places[3] - 30, 274, 60, 62, rank_colour(3), f"g{SUBSCRIPTS[3]}", size=22)
    canvas.text(places[3], 354, "the sum")


def sharding_choice() -> Drawing:
    """The rule, with the lines of replicas and of ZeRO-1 to ZeRO-3 marked."""
    return rule(("ZeRO-3", "ZeRO-2", "ZeRO-1", "replicas"))


NODES, PLACES = 2, 2


def held(rank: int, hops: int) -> list[int]:
    """The parts that a rank holds after so many hops; a part has the number of the rank that ends with its sum."""
    if hops == 0:
        return list(range(NODES * PLACES))
    if hops == 1:
        return [part for part in range(NODES * PLACES) if part % PLACES == rank % PLACES]
    return [rank]


@drawing(414)
def two_hops(canvas: Canvas) -> None:
    """Four ranks on two nodes add gradients in two hops. First the ranks of a node swap: place 0 gets parts 0 and 2,
    place 1 parts 1 and 3, summed over the node. Then ranks of one place swap between the nodes, and each ends with the
    sum of the part that has its number. Only the second hop leaves a node."""
    headings = {
        106: ("all parts,", "its samples"),
        312: ("its place's parts,", "sum of its node"),
        512: ("its part,", "the sum"),
    }
    for x, lines in headings.items():
        canvas.lines(x, 14, lines, "start")
    for node in range(NODES):
        canvas.box(4, 62 + node * 158, 632, 126, thick=1.5)
        canvas.text(630, 202 + node * 158, f"node {node}", "end")
    ranks, columns, cell = range(NODES * PLACES), (106, 342, 548), 40
    middles = [89 + rank // PLACES * 158 + rank % PLACES * 58 for rank in ranks]
    for rank, middle in enumerate(middles):
        canvas.text(14, middle, f"rank {rank}", "start")
        for hops, x in enumerate(columns):
            for place, part in enumerate(held(rank, hops)):
                canvas.box(x + place * cell, middle - 20, cell, cell, rank_colour(part), str(part), size=20)
    for hop in (0, 1):  # to the others of its node, then to the others of its place
        for sender in ranks:
            begin = columns[hop] + len(held(sender, hop)) * cell + 4
            for receiver in ranks:
                same = sender // PLACES == receiver // PLACES, sender % PLACES == receiver % PLACES
                if same[hop] and receiver != sender:
                    canvas.arrow([(begin, middles[sender]), (columns[hop + 1] - 4, middles[receiver])], _TALK, 3)
    canvas.text(14, 376, "arrows: rounded to 8 bits", "start", fill=_TALK, bold=True)
