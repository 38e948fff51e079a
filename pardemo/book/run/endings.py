"""Reads and writes how the notebooks of a run ended: ``run.json`` in its folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pardemo import project

MANIFEST = "run.json"


@dataclass
class NotebookEnding:
    """The end of one notebook: status ``ok``, ``failed`` or ``skipped`` (finished earlier, with --resume).

    ``sources``: the digest of what it was made of; ``fingerprint``: with what it reads of other notebooks.
    """

    notebook: str
    status: str
    seconds: float = 0.0
    error: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    sources: str = ""
    fingerprint: str = ""


def finished(folder: Path) -> list[NotebookEnding]:
    """Returns how the notebooks of a run ended, in the collection's order; none where no run has been."""
    endings = read_endings(folder)
    return [endings[name] for name in sorted(endings)]


def read_endings(folder: Path) -> dict[str, NotebookEnding]:
    """The endings by notebook; none where no run has been, or its manifest cannot be read."""
    try:
        return {row["notebook"]: NotebookEnding(**row) for row in json.loads((folder / MANIFEST).read_text())}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def write_endings(folder: Path, endings: dict[str, NotebookEnding]) -> None:
    project.write_json(folder / MANIFEST, [vars(endings[name]) for name in sorted(endings)])
