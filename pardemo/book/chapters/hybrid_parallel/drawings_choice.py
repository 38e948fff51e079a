"""The rule for a first layout, drawn: this chapter puts its parts together."""

from pardemo.draw.canvas import Drawing
from pardemo.draw.rule import rule


def layout_choice() -> Drawing:
    """The whole rule, no line of it marked."""
    return rule()
