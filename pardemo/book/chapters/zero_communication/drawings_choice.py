"""Which way to shard: the questions in their order, and what each answer means."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.flowchart import GAP, HIGH, WIDE, box, down, yes
from pardemo.draw.palette import RANKS

_SHARDING = (
    (("4Ψ + 12Ψ/N bytes fit, beside", "micro-batches as large as wanted?"), ("ZeRO-1, and", "accumulate")),
    (("a micro-batch of T ≥ F/B", "tokens of a GPU?"), ("ZeRO-3",)),
    (("fast links inside a host, and", "16Ψ/G bytes fit?"), ("HSDP, and", "accumulate")),
)


def sharding_choice() -> Drawing:
    """Three questions, each with the way to shard for a yes; and what is left where all of them get a no."""
    canvas = Canvas(640, 8 + 4 * (HIGH + GAP) - GAP)
    for number, (asked, answer) in enumerate(_SHARDING):
        y = 4.0 + number * (HIGH + GAP)
        box(canvas, 8, y, WIDE, asked)
        yes(canvas, y, answer)
        down(canvas, y, "no")
    box(canvas, 8, 4 + 3 * (HIGH + GAP), WIDE, ("hpZ or all of ZeRO++; or", "a pipeline between the hosts"), RANKS[3])
    return Drawing(
        canvas,
        "Do ZeRO-1's states fit beside micro-batches as large as wanted: ZeRO-1, and accumulate. Has a micro-batch "
        "enough tokens to hide the traffic: ZeRO-3. Are links inside a host fast, and does a host hold all states: "
        "HSDP, and accumulate. Else hpZ or ZeRO++, or a pipeline between the hosts.",
    )
