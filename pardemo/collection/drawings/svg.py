"""A drawing as SVG: boxes, arrows and words, sharp at any size, small, and readable in a light and a dark page."""

from html import escape

from pardemo.collection.drawings.key import INK

FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', sans-serif"


class Canvas:
    """Draws in units of its own: ``width`` of them are as wide as the page has room, 640 px at most.

    A phone shows 640 units in 360 px: text of 20 units is as small as it should get.
    """

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "none", text: str = "", *, size: float = 20,
        border: str = "currentColor", thick: float = 1.5, dashed: bool = False,
    ) -> None:  # fmt: skip
        """A rectangle with its text in the middle."""
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{border}" '
            f'stroke-width="{thick:g}"{dash}/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2, text, size=size, fill="currentColor" if fill == "none" else INK)

    def text(
        self, x: float, y: float, text: str, *, size: float = 20, anchor: str = "middle", fill: str = "currentColor",
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Words, centred in height around ``y``; ``anchor`` is start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" dy=".35em" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, points: list[tuple[float, float]], colour: str = "currentColor", thick: float = 3) -> None:
        """A line through the points with a head at its end."""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1
        ux, uy, head = (x1 - x0) / length, (y1 - y0) / length, 4 * thick
        bx, by = x1 - head * ux, y1 - head * uy
        path = " ".join(f"{x:g},{y:g}" for x, y in [*points[:-1], (bx, by)])
        wing = head * 0.5
        tip = f"{x1:g},{y1:g} {bx - wing * uy:g},{by + wing * ux:g} {bx + wing * uy:g},{by - wing * ux:g}"
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick:g}"/>'
            f'<polygon points="{tip}" fill="{colour}"/>'
        )

    def svg(self, alt: str) -> str:
        """The drawing as an element for a page; ``alt`` is what a screen reader says."""
        if not alt:
            raise ValueError("a drawing needs alternative text")
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(alt)}" '
            f'font-family="{FONT}" style="width:100%;max-width:640px;height:auto;display:block">'
            + "".join(self._parts)
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
