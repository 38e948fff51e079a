"""A drawing as SVG: boxes, arrows and words, sharp at any size, small, and readable in a light and a dark page."""

import functools
import inspect
from collections.abc import Callable, Sequence
from html import escape
from typing import Concatenate, ParamSpec

from pardemo.draw import palette

FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"
#: What texts inherit: each says only where it is otherwise.
STYLE = f'font-family="{FONT}" text-anchor="middle" fill="currentColor"'
Point = tuple[float, float]
P = ParamSpec("P")


class Canvas:
    """Draws in units of its own: ``width`` of them are as wide as the page has room, 640 px at most.

    A phone shows 640 units in 360 px: text of 18 units is as small as it should get.
    """

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self.parts: list[str] = []  # elements, in the order of drawing

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none", text: str = "", *, size: float = 18,
        border: str = "", thick: float = 1.5, dashed: bool = False, bold: bool = False,
    ) -> None:  # fmt: skip
        """A rectangle with its text in the middle.

        Its border is dark round a colour, or neighbours would run together in a dark page; the page's own round none,
        and round a colour that is itself as dark as such a page.
        """
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="3" fill="{fill}" '
            f'stroke="{border or _border(fill)}" stroke-width="{_n(thick)}"{dash}/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2, text, size=size, fill=palette.ink_on(fill), bold=bold)

    def boxes(
        self, places: Sequence[tuple[float, float, float, float]], fill: str, *, border: str = "", thick: float = 1
    ) -> None:  # fmt: skip
        """Many rectangles (x, y, width, height) of one kind, in one short element: players have hundreds."""
        if places:
            path = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in places)
            self.parts.append(
                f'<path d="{path}" fill="{fill}" stroke="{border or _border(fill)}" stroke-width="{_n(thick)}"/>'
            )

    def text(
        self, x: float, y: float, text: str, anchor: str = "middle", *, size: float = 18, fill: str = "currentColor",
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Words, centred in height around ``y``; ``anchor`` is start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        style = f'font-size="{_n(size)}"{weight}' + _unless("middle", "text-anchor", anchor)
        style += _unless("currentColor", "fill", fill)
        self.parts.append(f'<text x="{_n(x)}" y="{_n(y + 0.35 * size)}" {style}>{escape(text)}</text>')

    def texts(
        self, places: Sequence[tuple[float, float, str]], *, size: float = 18, fill: str = "currentColor"
    ) -> None:
        """Many short texts (x, y, text) of one kind, in the middle of their places, in one short element."""
        spans, before = [], None
        for x, y, text in places:
            height = "" if y == before else f' y="{_n(y + 0.35 * size)}"'  # a span goes on at the last one's height
            spans.append(f'<tspan x="{_n(x)}"{height}>{escape(text)}</tspan>')
            before = y
        if spans:
            style = f'font-size="{_n(size)}"' + _unless("currentColor", "fill", fill)
            self.parts.append(f"<text {style}>{''.join(spans)}</text>")

    def lines(
        self, x: float, y: float, lines: Sequence[str], anchor: str = "middle", *, size: float = 18, **style
    ) -> None:
        """Several lines of text; the first is centred around ``y``."""
        for number, line in enumerate(lines):
            self.text(x, y + 1.33 * size * number, line, anchor, size=size, **style)

    def line(
        self, points: Sequence[Point], colour: str = "currentColor", thick: float = 2, dashed: bool = False
    ) -> None:
        """A line through the points."""
        path, dash = " ".join(f"{_n(x)},{_n(y)}" for x, y in points), ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{_n(thick)}"{dash}/>')

    def steps(self, x: float, wide: float, heights: Sequence[float], bottom: float, fill: str) -> None:
        """An area from ``bottom`` up to a height for each of many columns, each ``wide``, from ``x`` on."""
        path, before = f"M{_n(x)} {_n(bottom)}", ""
        for number, height in enumerate(heights):
            if (now := _n(height)) != before:
                path += f"H{_n(x + wide * number)}V{now}"
                before = now
        path += f"H{_n(x + wide * len(heights))}V{_n(bottom)}Z"
        self.parts.append(f'<path d="{path}" fill="{fill}" stroke="{_border(fill)}" stroke-width="0.6"/>')

    def arrow(
        self, points: Sequence[Point], colour: str = "currentColor", thick: float = 3, both: bool = False,
        dashed: bool = False,
    ) -> None:  # fmt: skip
        """A line through the points with a head at its end, or at both ends."""
        points = list(points)
        tips = [_head(points[-2], points[-1], thick)]
        path = [*points[:-1], tips[0][0]]
        if both:
            tips.append(_head(points[1], points[0], thick))
            path[0] = tips[1][0]
        self.line(path, colour, thick, dashed)
        for _, tip in tips:
            self.parts.append(f'<polygon points="{tip}" fill="{colour}"/>')

    def svg(self, alt: str, parts: Sequence[str] | None = None) -> str:
        """The drawing as an element for a page.

        Args:
            alt: what a screen reader says.
            parts: what stands for :attr:`parts`, where a player has them elsewhere.
        """
        if not alt:
            raise ValueError("a drawing needs alternative text")
        return (
            f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" aria-label="{escape(alt)}" '
            f'{STYLE} style="width:100%;max-width:640px;height:auto;display:block">'
            + "".join(self.parts if parts is None else parts)
            + "</svg>"
        )


class Drawing:
    """A finished drawing: a notebook and a page show it, a terminal its alternative text."""

    def __init__(self, canvas: Canvas, alt: str):
        self.alt, self._svg = alt, canvas.svg(alt)

    def __repr__(self) -> str:
        return f"drawing: {self.alt}"

    def _repr_html_(self) -> str:
        return self._svg


def drawing(height: float = 0) -> Callable[[Callable[Concatenate[Canvas, P], str | None]], Callable[P, Drawing]]:
    """Makes a function that draws on a canvas, its first argument, one that returns the :class:`Drawing`.

    The alternative text is the function's docstring, unless the function returns another one.

    Args:
        height: of the canvas, which is 640 wide. A function whose height depends on its arguments sets it.
    """

    def decorate(draw: Callable[Concatenate[Canvas, P], str | None]) -> Callable[P, Drawing]:
        @functools.wraps(draw)
        def drawn(*args: P.args, **kwargs: P.kwargs) -> Drawing:
            canvas = Canvas(640, height)
            alt = draw(canvas, *args, **kwargs)
            return Drawing(canvas, alt or " ".join((draw.__doc__ or "").split()))

        _, *parameters = inspect.signature(draw).parameters.values()
        drawn.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        drawn.__annotations__ = {**draw.__annotations__, "return": Drawing}
        return drawn

    return decorate


def _border(fill: str) -> str:
    dark = fill.startswith("#") and palette.contrast(fill, palette.INK) < 2
    return "currentColor" if fill == "none" or dark else palette.INK


def _unless(usual: str, name: str, value: str) -> str:
    return "" if value == usual else f' {name}="{value}"'


def _n(number: float) -> str:
    """A coordinate to a tenth: nobody sees more, and pages stay small."""
    return f"{round(number, 1) + 0:g}"


def _head(before: Point, end: Point, thick: float) -> tuple[Point, str]:
    """Where an arrow's line stops, and the three corners of its head."""
    (x0, y0), (x1, y1) = before, end
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1
    ux, uy, head = (x1 - x0) / length, (y1 - y0) / length, 4 * thick
    bx, by, wing = x1 - head * ux, y1 - head * uy, 2 * thick
    corners = ((x1, y1), (bx - wing * uy, by + wing * ux), (bx + wing * uy, by - wing * ux))
    return (bx, by), " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
