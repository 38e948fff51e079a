"""Colours, fonts and files. Colours are those of the drawings' key; hatches tell them apart in print."""

import io
from collections.abc import Sequence
from pathlib import Path

from pardemo import extras, project
from pardemo.draw import palette, pictures

with extras.needed_by(__name__):
    import matplotlib
    from matplotlib.figure import Figure
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
MARKERS = {"ring": "o", "parameter server": "s", "torch": "^"}

SETTINGS = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine has it
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
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
}

#: Of the files: an inch is 110 pixels of a page.
DPI = 110


def new(rows: int = 1, columns: int = 1, size: Sequence[float] = (8.0, 4.0), **kwargs):
    """A figure and its axes in the book's style, as ``plt.subplots`` returns them.

    pyplot does not know the figure: a notebook shows it where it is saved, and not half drawn at the end of each cell.
    The style is Matplotlib's from the first such figure on; an import alone changes nothing.
    """
    matplotlib.rcParams.update(SETTINGS)
    fig = Figure(figsize=(size[0], size[1]), layout="constrained")
    return fig, fig.subplots(rows, columns, **kwargs)


class Picture:
    """A drawn figure as a PNG, with alternative text: a notebook shows it, and keeps the text beside it."""

    def __init__(self, png: bytes, alt: str):
        self.png, self.alt = png, alt

    def __repr__(self) -> str:
        return f"picture: {self.alt}"

    def _repr_mimebundle_(self, **kwargs):
        return {"image/png": self.png}, {"image/png": {"alt": self.alt}}


def draw(fig: Figure, alt: str) -> Picture:
    """The figure as a PNG with a palette: a third of the size, since a chart has few colours.

    Raises:
        ValueError: there is no alternative text.
    """
    if not alt:
        raise ValueError("a picture needs alternative text")
    drawn, packed, text = io.BytesIO(), io.BytesIO(), PngImagePlugin.PngInfo()
    fig.savefig(drawn, format="png", dpi=DPI)
    text.add_itxt("Description", alt)
    if pictures.notebook():
        text.add_itxt(pictures.SOURCE, pictures.notebook())
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True, pnginfo=text)
    return Picture(packed.getvalue(), alt)


def save(fig: Figure, name: str, alt: str) -> Picture:
    """Writes ``figures/<name>.png`` into the run's folder, ``alt`` inside it; returns it for the notebook to show."""
    return write(fig, project.output_dir() / "figures" / f"{name}.png", alt)


def write(fig: Figure, path: Path, alt: str) -> Picture:
    """As :func:`save`, to a file of any folder."""
    picture = draw(fig, alt)
    project.write_atomically(path, lambda temporary: temporary.write_bytes(picture.png))
    return picture
