"""Which pictures of a run are whose: their names begin with their chapter's, and each says which notebook drew it."""

import os
from pathlib import Path

from pardemo import project

#: In the environment of a kernel: the notebook that it runs. In a picture: the notebook that drew it.
NOTEBOOK, SOURCE = "PARDEMO_NOTEBOOK", "Source"


def notebook() -> str:
    """The notebook that this process runs; empty where nobody said (in JupyterLab)."""
    return os.environ.get(NOTEBOOK, "")


def of(folder: Path, name: str) -> list[Path]:
    """The pictures that a notebook left in a run's folder; those with its chapter's name that nobody signed, too."""
    paths = sorted((folder / "figures").glob(f"{project.chapter_name(name)}_*.png"))
    return [path for path in paths if _drawn_by(path) in ("", name)]


def _drawn_by(path: Path) -> str:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.info.get(SOURCE, "")
    except OSError:  # half a file: it is everybody's to remove
        return ""
