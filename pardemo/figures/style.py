"""Colours, fonts and files. Colours: Okabe & Ito's set, told apart by colour-blind readers; hatches for print."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from pardemo import project

#: A colour for each kind of thing, the same in every chapter.
COLOURS = {
    "compute": "#0072B2",
    "communication": "#E69F00",
    "send": "#E69F00",
    "receive": "#F0E442",
    "wait": "#BBBBBB",
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer states": "#009E73",
    "activations": "#CC79A7",
    "predicted": "#000000",
    "ring": "#009E73",
    "parameter server": "#D55E00",
    "torch": "#56B4E9",
    # a claim's verdict, as in the report
    "holds": "#00694C",
    "differs": "#B35900",
    "off": "#5C5C5C",
    "fails": "#B00020",
}
HATCHES = {"send": "", "receive": "///", "communication": "///", "compute": "", "wait": "..."}
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
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 110,
    "hatch.linewidth": 0.6,
}

#: Of the files: an inch is 110 pixels of a page.
DPI = 110

plt.rcParams.update(SETTINGS)


def new(rows: int = 1, columns: int = 1, size: Sequence[float] = (8.0, 4.0), **kwargs):
    """A figure and its axes in the collection's style, as ``plt.subplots`` returns them."""
    return plt.subplots(rows, columns, figsize=tuple(size), layout="constrained", **kwargs)


class Picture:
    """A saved picture: what a notebook shows of it is the file itself, with its alternative text."""

    def __init__(self, path: Path, alt: str):
        self.alt = alt
        self._png = path.read_bytes()

    def __repr__(self) -> str:
        return f"picture: {self.alt}"

    def _repr_mimebundle_(self, **kwargs):
        return {"image/png": self._png}, {"image/png": {"alt": self.alt}}


def save(fig: Figure, name: str, alt: str) -> Picture:
    """Writes ``figures/<name>.png`` into the run's folder, ``alt`` inside it as description.

    Returns the picture for the notebook to show, once, as the value of the cell: the figure is closed to pyplot.
    """
    return write(fig, project.output_dir() / "figures" / f"{name}.png", alt)


def write(fig: Figure, path: Path, alt: str) -> Picture:
    """As :func:`save`, to a file of any folder.

    Raises:
        ValueError: there is no alternative text.
    """
    if not alt:
        raise ValueError("a picture needs alternative text")
    project.write_atomically(path, lambda temporary: _write_png(fig, temporary, alt))
    plt.close(fig)
    return Picture(path, alt)


def _write_png(fig: Figure, path: Path, alt: str) -> None:
    """A PNG with a palette: a third of the size, since a chart has few colours; four copies of it lie in a run."""
    import io

    from PIL import Image, PngImagePlugin

    drawn = io.BytesIO()
    fig.savefig(drawn, format="png", dpi=DPI)
    text = PngImagePlugin.PngInfo()
    text.add_itxt("Description", alt)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, "PNG", optimize=True, pnginfo=text)
