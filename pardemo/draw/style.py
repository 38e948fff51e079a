"""Colours, fonts and files. Colours are those of the drawings' key; hatches tell them apart in print."""

import io
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from pardemo import extras, project
from pardemo.draw import palette, pictures

with extras.needed_by(__name__):
    import matplotlib
    import numpy as np
    from matplotlib.artist import Artist
    from matplotlib.collections import Collection, PathCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
    from PIL import Image, PngImagePlugin

#: A colour for each kind of thing, the same in every chapter and in every drawing: the drawings' key says which.
COLOURS = {
    **palette.KEPT,
    **palette.DONE,
    "compute": palette.COMPUTED,
    "send": palette.DONE["communication"],
    "receive": palette.RECEIVED,
    "wait": palette.DONE["idle"],
    "predicted": palette.PREDICTED,
    **palette.WAYS,
    **palette.VERDICTS,
}
HATCHES = {
    "forward": "",
    "backward": "",
    "weight gradients": "",
    "send": "",
    "receive": "///",
    "communication": "///",
    "compute": "",
    "wait": "...",
}

FONT_POINTS = 11.5
SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine has it
    "font.size": FONT_POINTS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": palette.GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 110,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # words stay words: a reader can select them and search for them
    "svg.hashsalt": "pardemo",  # the same figure is the same file
}

#: An inch is 110 pixels of a page.
DPI = 110
#: Pixels that the smallest words of a chart have at least, on a phone too: where it has no room for that, it scrolls.
LEGIBLE_PX = 10
#: Points of a line or a cloud from which on it is no drawing but a picture.
MANY = 500
#: For machines without the font that the chart was laid out with: these are no wider.
FALLBACK = "'DejaVu Sans', Verdana, sans-serif"


def new(rows: int = 1, columns: int = 1, size: Sequence[float] = (8.0, 4.0), **kwargs):
    """A figure and its axes in the book's style, as ``plt.subplots`` returns them.

    pyplot does not know the figure: a notebook shows it where it is saved, and not half drawn at the end of each cell.
    The style is Matplotlib's from the first such figure on; an import alone changes nothing.
    """
    matplotlib.rcParams.update(SETTINGS)
    fig = Figure(figsize=(size[0], size[1]), layout="constrained")
    return fig, fig.subplots(rows, columns, **kwargs)


class Picture:
    """A drawn figure as SVG and as PNG, with alternative text.

    A notebook shows the PNG, which needs no trust, and keeps the text and the SVG's ``file`` beside it; a page takes
    the SVG, sharp at any size, from there.
    """

    def __init__(self, svg: str, png: bytes, alt: str, file: str = ""):
        self.svg, self.png, self.alt, self.file = svg, png, alt, file

    def __repr__(self) -> str:
        return f"picture: {self.alt}"

    def _repr_mimebundle_(self, **kwargs):
        return {"image/png": self.png}, {"image/png": {"alt": self.alt} | ({"file": self.file} if self.file else {})}


def draw(fig: Figure, alt: str) -> Picture:
    """The figure as a picture.

    Raises:
        ValueError: there is no alternative text.
    """
    if not alt:
        raise ValueError("a picture needs alternative text")
    _lay_out(fig)
    return Picture(_svg(fig, alt), _png(fig, alt), alt)


def _lay_out(fig: Figure) -> None:
    """Places the axes for good: each file would otherwise be drawn once more, unseen, to place them anew."""
    engine = fig.get_layout_engine()
    if engine is not None:
        engine.execute(fig)
        fig.set_layout_engine(None)


def _svg(fig: Figure, alt: str) -> str:
    """Coordinates to a hundredth of a point, no date, and how wide it has to be for its smallest words."""
    drawn = io.StringIO()
    for artist in fig.findobj(_has_many_points):
        artist.set_rasterized(True)
    fig.savefig(
        drawn, format="svg", dpi=2 * DPI, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = drawn.getvalue()
    text = re.sub(r"<[^<>]*>", _shorter, text)  # inside of tags: a word such as 0.084 stays as it is
    inches, points = fig.get_size_inches()[0], _smallest_words(fig)
    width, height = (round(DPI * side) for side in fig.get_size_inches())
    least = min(width, math.ceil(72 * inches * LEGIBLE_PX / points))
    head = (  # no style of its own, which would reach a whole page
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{width}" '
        f'height="{height}" viewBox="0 0 {72 * inches:g} {72 * fig.get_size_inches()[1]:g}" role="img" '
        f'data-least="{least}" data-notebook="{escape(pictures.notebook())}" aria-label="{escape(alt)}" '
        f'font-family="{FALLBACK}" stroke-linejoin="round" stroke-linecap="butt">'
    )
    return head + smaller(text[text.index(">", text.index("<svg ")) + 1 :])


def smaller(svg: str) -> str:
    """Matplotlib's SVG without what nobody sees: comments, names of groups, the curves of a hatch's dots."""
    svg = re.sub(r"\s*<metadata>.*?</metadata>|\s*<!--.*?-->|\s*<style\b.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"<pattern\b.*?</pattern>", lambda hatch: _DOT.sub(_diamond, hatch[0]), svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(rf"font-family: (?:{FALLBACK}|'DejaVu Sans');? ?", "", svg)  # all words have the drawing's
    svg = re.sub(rf"font: ([\d.]+px) (?:{FALLBACK}|'DejaVu Sans')", r"font-size: \1", svg)
    svg = re.sub(r"<defs>\s*</defs>", "", _without_bare_groups(svg))
    return re.sub(r"\s*\n\s*", "\n", re.sub(r" ?\n(?=[LCQZz])", " ", svg))


def _without_bare_groups(svg: str) -> str:
    """Without groups that say nothing of what is in them."""
    kept: list[str] = []
    opened: list[bool] = []  # whether each group around stays
    for part in re.split(r"(<g\b[^>]*>|</g>)", svg):
        if part == "</g>":
            stays = opened.pop()
        elif part.startswith("<g") and not part.endswith("/>"):
            stays = part != "<g>"
            opened.append(stays)
        else:
            stays = True
        if stays:
            kept.append(part)
    return "".join(kept)


#: A dot of a hatch: a circle of eight curves.
_DOT = re.compile(r"M ([-\d.]+) ([-\d.]+)\s*(?:C [-\d. \n]+)+z?")


def _diamond(dot: re.Match[str]) -> str:
    """A dot as four lines: it is two pixels wide."""
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", dot[0])]
    (left, right), (top, low) = ((min(side), max(side)) for side in (numbers[::2], numbers[1::2]))
    x, y = (left + right) / 2, (top + low) / 2
    corners = ((x, top), (right, y), (x, low), (left, y))
    return "M " + " L ".join(f"{cx:.1f} {cy:.1f}" for cx, cy in corners) + " z "


def _has_many_points(artist: Artist) -> bool:
    """Whether it would be a large part of a page as a path: it is a picture inside the drawing then."""
    if isinstance(artist, PathCollection):
        return bool(np.size(artist.get_offsets()) > 2 * MANY)
    if isinstance(artist, Collection):
        return bool(sum(np.size(path.vertices) for path in artist.get_paths()) > 2 * MANY)
    return isinstance(artist, Line2D) and bool(np.size(artist.get_xdata()) > MANY)


def _shorter(tag: re.Match[str]) -> str:
    """A tag of SVG with two decimals in its coordinates: on a screen there is no difference."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag[0])


def _smallest_words(fig: Figure) -> float:
    """Points of the smallest text that is shown."""
    shown = (text for text in fig.findobj(Text) if text.get_visible() and text.get_text().strip())
    return min((float(text.get_fontsize()) for text in shown), default=FONT_POINTS)


def _png(fig: Figure, alt: str) -> bytes:
    """With a palette: a third of the size, since a chart has few colours."""
    drawn, packed, text = io.BytesIO(), io.BytesIO(), PngImagePlugin.PngInfo()
    fig.savefig(drawn, format="png", dpi=DPI)
    text.add_itxt("Description", alt)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True, pnginfo=text)
    return packed.getvalue()


def save(fig: Figure, name: str, alt: str) -> Picture:
    """Writes ``figures/<name>.svg`` into the run's folder, ``alt`` inside it; returns it for the notebook to show."""
    return write(fig, project.output_dir() / "figures" / f"{name}.svg", alt)


def write(fig: Figure, path: Path, alt: str) -> Picture:
    """Saves as :func:`save` does, to a file of any folder: SVG or, where its name ends so, PNG."""
    picture = draw(fig, alt)
    picture.file = path.name if path.suffix == ".svg" else ""
    data = picture.png if path.suffix == ".png" else picture.svg.encode()
    project.write_atomically(path, lambda temporary: temporary.write_bytes(data))
    return picture
