"""Colours, fonts and files. Colours: Okabe & Ito's set, told apart by colour-blind readers; hatches for print."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from pardemo import project

#: A colour for each kind of thing, the same in every chapter.
COLOURS = {
    "compute": "#0072B2",
    "forward": "#0072B2",
    "backward": "#56B4E9",
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
}
HATCHES = {
    "forward": "",
    "backward": "",
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
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 110,
    "hatch.linewidth": 0.6,
}

plt.rcParams.update(SETTINGS)


def new(rows: int = 1, columns: int = 1, size: Sequence[float] = (8.0, 4.0), **kwargs):
    """A figure and its axes in the collection's style, as ``plt.subplots`` returns them."""
    return plt.subplots(rows, columns, figsize=tuple(size), layout="constrained", **kwargs)


def save(fig: Figure, name: str, alt: str) -> Figure:
    """Writes ``figures/<name>.png`` into the run's folder, ``alt`` inside it as description, and returns the figure.

    The file is closed to pyplot, so that a notebook shows it once, as the value of the cell.
    """
    return write(fig, project.output_dir() / "figures" / f"{name}.png", alt)


def write(fig: Figure, path: Path, alt: str) -> Figure:
    """As :func:`save`, to a file of any folder."""
    if not alt:
        raise ValueError("a picture needs alternative text")
    project.write_atomically(
        path, lambda temporary: fig.savefig(temporary, format="png", dpi=110, metadata={"Description": alt})
    )
    plt.close(fig)
    return fig
