"""What stands in an SVG of the drawings: texts with about the room they take, boxes, lines, colours."""

import re
from dataclasses import dataclass
from functools import cache
from xml.etree import ElementTree

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

PATH = re.compile(r"M([-\d.]+) ([-\d.]+)h([-\d.]+)v([-\d.]+)h[-\d.]+z")


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    right: float
    bottom: float
    fill: str
    border: str = ""
    thick: float = 0
    order: int = 0  # of drawing

    @property
    def area(self) -> float:
        return (self.right - self.x) * (self.bottom - self.y)

    def meets(self, other, slack: float = 1.0) -> bool:
        return (
            self.x < other.right - slack and other.x < self.right - slack
            and self.y < other.bottom - slack and other.y < self.bottom - slack
        )  # fmt: skip

    def holds(self, other, slack: float = 1.0) -> bool:
        return (
            self.x <= other.x + slack and other.right <= self.right + slack
            and self.y <= other.y + slack and other.bottom <= self.bottom + slack
        )  # fmt: skip


@dataclass(frozen=True)
class Text(Box):
    text: str = ""
    size: float = 0


@dataclass(frozen=True)
class Line:
    points: list[tuple[float, float]]
    colour: str
    order: int


class Svg:
    """The parsed drawing: ``texts``, ``boxes`` (rectangles and those of paths), ``lines``, the colours of ``heads``."""

    def __init__(self, source: str):
        self.root = ElementTree.fromstring(source)
        self.width, self.height = (float(n) for n in self.root.get("viewBox").split()[2:])
        self.alt = self.root.get("aria-label")
        self.texts, self.boxes, self.lines, self.heads = [], [], [], []
        self.colours = set()
        for number, part in enumerate(self.root):
            self._order = number
            self.colours |= {part.get(name) for name in ("fill", "stroke")} - {None}
            getattr(self, "_" + part.tag)(part)

    def words(self) -> list[str]:
        return [text.text for text in self.texts]

    def filled(self, colour: str) -> list[Box]:
        return [box for box in self.boxes if box.fill == colour]

    def box_of(self, text: Text) -> Box | None:
        """The smallest filled box round a text."""
        around = (box for box in self.boxes if box.fill != "none" and box.holds(text))
        return min(around, key=lambda box: box.area, default=None)

    def _rect(self, part):
        x, y, width, height = (float(part.get(name)) for name in ("x", "y", "width", "height"))
        border = part.get("stroke"), float(part.get("stroke-width")), self._order
        self.boxes.append(Box(x, y, x + width, y + height, part.get("fill"), *border))

    def _path(self, part):
        found = PATH.findall(part.get("d"))
        assert PATH.sub("", part.get("d")) == ""
        border = part.get("stroke"), float(part.get("stroke-width")), self._order
        for x, y, width, height in (map(float, place) for place in found):
            self.boxes.append(Box(x, y, x + width, y + height, part.get("fill"), *border))

    def _polyline(self, part):
        points = [tuple(map(float, point.split(","))) for point in part.get("points").split()]
        self.lines.append(Line(points, part.get("stroke"), self._order))

    def _polygon(self, part):
        self.heads.append(part.get("fill"))

    def _text(self, part):
        size, bold = float(part.get("font-size")), part.get("font-weight") is not None
        if part.text:
            self._put(part.text, float(part.get("x")), float(part.get("y")) - 0.35 * size, size, bold, part)
        y = 0.0
        for span in part:
            y = float(span.get("y", y))
            self._put(span.text, float(span.get("x")), y - 0.35 * size, size, bold, part)

    def _put(self, text, x, y, size, bold, part):
        wide = width_of(text, size, bold)
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[part.get("text-anchor", "middle")]
        fill = part.get("fill", "currentColor")
        self.texts.append(Text(left, y - 0.4 * size, left + wide, y + 0.4 * size, fill, text=text, size=size))


@cache
def width_of(text: str, size: float, bold: bool = False) -> float:
    """0.55 of the size for each letter, or what it takes in DejaVu Sans, the widest of the fonts, if that is more."""
    font = _font(bold)
    font.set_size(size, 72)
    font.set_text(text)
    return max(0.55 * size * len(text), font.get_width_height()[0] / 64)


@cache
def _font(bold: bool) -> FT2Font:
    weight = "bold" if bold else "normal"
    return FT2Font(font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans", weight=weight)))


def drawing(shown) -> Svg:
    return Svg(shown._repr_html_())


def frames(player) -> list[Svg]:
    """Each with the elements that it shares with others in place."""
    page = player._repr_html_()
    found = re.findall(r'<div class="frame">(<svg.*?</svg>)', page, re.DOTALL)
    assert len(found) == len(player)
    shared = re.search(r'(<svg width="0".*?</svg>)', page, re.DOTALL)[1]
    named = {part.attrib.pop("id"): ElementTree.tostring(part, "unicode") for part in ElementTree.fromstring(shared)}
    return [Svg(re.sub(r'<use href="#([-\w]+)"/>', lambda use: named[use[1]], source)) for source in found]
