"""The rule for a first layout, drawn, with the lines that the chapter explains."""

from pardemo.draw.canvas import Drawing
from pardemo.draw.rule import rule


def sharding_choice() -> Drawing:
    """The rule; the lines of ZeRO-1, ZeRO-2 and ZeRO-3 are marked."""
    return rule(("ZeRO-3", "ZeRO-2", "ZeRO-1"))
