"""Assigns a run's pictures to its chapters, by the file's name and the notebook that drew it."""

import os
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from pardemo import project

#: In the environment of a kernel: the notebook that it runs.
NOTEBOOK = "PARDEMO_NOTEBOOK"


@dataclass(frozen=True)
class Saved:
    """The description in a picture's file.

    Args:
        alt: in words. width, height: pixels of a page. least: pixels of width that its smallest words need.
        notebook: that drew it; empty where nobody said.
    """

    alt: str
    width: int
    height: int
    least: int
    notebook: str


def notebook() -> str:
    """The notebook that this process runs; empty where nobody said (in JupyterLab)."""
    return os.environ.get(NOTEBOOK, "")


def of_notebook(folder: Path, name: str) -> list[Path]:
    """The pictures that a notebook left in a run's folder; those with its chapter's name that nobody signed, too."""
    paths = sorted((folder / "figures").glob(f"{project.chapter_name(name)}_*.svg"))
    return [path for path in paths if _drawn_by(path) in ("", name)]


def read_picture(svg: str) -> Saved:
    """Reads the description in a picture of :func:`pardemo.draw.style.save`.

    Raises:
        ValueError: this is no such picture, or half of one.
    """
    head = re.match(r"<svg [^>]*>", svg)
    if head is None or not svg.rstrip().endswith("</svg>"):
        raise ValueError("this is no picture of pardemo's: it does not begin with <svg …>, or has no end")
    attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', head[0]))
    try:
        width, height, least = int(attributes["width"]), int(attributes["height"]), int(attributes["data-least"])
        return Saved(unescape(attributes["aria-label"]), width, height, least, unescape(attributes["data-notebook"]))
    except (KeyError, ValueError):
        raise ValueError("this is no picture of pardemo's: it does not say its size and what it shows") from None


def _drawn_by(path: Path) -> str:
    try:
        return read_picture(path.read_text(encoding="utf-8")).notebook
    except (OSError, ValueError):  # half a file: it is everybody's to remove
        return ""
