"""The rule for a first layout, drawn, and the colours of its answers in Accelerate's names."""

from pardemo.draw.canvas import Drawing
from pardemo.draw.palette import GRID, RANKS, WHOLE
from pardemo.draw.rule import rule

#: A configuration and its colour, here and in the map.
CONFIGURATIONS = {
    "one GPU": WHOLE,
    "DDP": RANKS[0],
    "ZeRO-1": RANKS[6],
    "ZeRO-2": RANKS[5],
    "FSDP2": RANKS[2],
    "HSDP": RANKS[3],
    "offload": RANKS[1],
    "TP": RANKS[7],
    "TP PP": RANKS[4],
    "more GPUs": GRID,
}


def layout_rule() -> Drawing:
    """The whole rule, no line of it marked."""
    return rule()
