"""Parts that several drawings share: a legend, and a tensor of which a rank has some of the parts."""

from collections.abc import Collection, Mapping

from pardemo.draw.canvas import Canvas
from pardemo.draw.palette import RANKS

LETTER = 0.61  # the mean width of a letter, as a part of its size, in the widest of the fonts
SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"


def width_of(text: str, size: float = 18) -> float:
    """About how wide a text is."""
    return LETTER * size * len(text)


def check_range(value: int, least: int, most: int, drawn: str = "ranks") -> None:
    """Raises a ValueError for a number that is too small or too large to be drawn."""
    if not least <= value <= most:
        raise ValueError(f"{least} to {most} {drawn} can be drawn, not {value}")


def unbroken(formula: str) -> str:
    """A formula that a caption does not break at its spaces."""
    return formula.replace(" ", "\N{NO-BREAK SPACE}")


def legend(canvas: Canvas, x: float, y: float, entries: Mapping[str, str], *, gap: float = 24) -> None:
    """A row of small boxes with what their colours mean, from ``x`` on, its middle at ``y``."""
    for name, colour in entries.items():
        canvas.box(x, y - 9, 18, 18, colour, thick=1)
        canvas.text(x + 26, y, name, "start")
        x += 26 + width_of(name) + gap


def parts(
    canvas: Canvas, x: float, y: float, width: float, height: float, count: int, present: Collection[int], fill: str
) -> None:  # fmt: skip
    """A tensor cut into ``count`` parts, one below the other: those of ``present`` are filled, the others empty."""
    if len(present) < count:
        canvas.box(x, y, width, height, thick=1, dashed=True)
    part_height = height / count
    canvas.boxes([(x, y + number * part_height, width, part_height) for number in sorted(present)], fill, thick=0.8)


def half_of(canvas: Canvas, x: float, y: float, width: float, height: float, rank: int, text: str = "½") -> None:
    """A tensor cut over two ranks, one half beside the other: the rank's own is filled, the other one empty."""
    canvas.box(x, y, width, height, thick=1, dashed=True)
    canvas.box(x + rank * width / 2, y, width / 2, height, RANKS[rank], text, size=20)
