"""What a notebook's result depends on, as one number: ``pardemo run --resume`` runs again where it is another.

That is the notebook, the package with its recipes and tables, ``data/``, the pinned versions, the parameters, and what
the notebook reads of other notebooks. The last it says itself, in its metadata, as patterns of files in the run's
folder or in the project: ``"pardemo": {"reads": ["machine.json"]}``.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pardemo import project

LARGE_BYTES = 64 << 20  # of a larger file the size and the time of its last change stand for what is in it


def of_sources(path: Path, parameters: dict[str, Any]) -> str:
    """A digest of the notebook, the package, ``data/``, the pinned versions and the parameters; 64 hex digits."""
    return _digest(json.dumps(parameters, sort_keys=True), (path, *_sources()))


def with_inputs(sources: str, path: Path, folder: Path) -> str:
    """That digest and what the notebook reads of others, in ``folder``: claims, a profile, a trained adapter."""
    return _digest(sources, _inputs(path, folder))


def reads(path: Path) -> list[str]:
    """The patterns that a notebook's metadata names; none where it names none."""
    return json.loads(path.read_text(encoding="utf-8"))["metadata"].get("pardemo", {}).get("reads", [])


def _sources() -> Iterator[Path]:
    for folder in (project.PACKAGE, project.root() / "data"):
        yield from (path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts)
    yield project.root() / "requirements.txt"


def _inputs(path: Path, folder: Path) -> Iterator[Path]:
    for pattern in reads(path):
        for place in (folder, project.root()):
            yield from (file for file in sorted(place.glob(pattern)) if file.stem != path.stem)  # not its own of before


def _digest(begin: str, files: Iterator[Path]) -> str:
    digest = hashlib.sha256(begin.encode())
    for file in filter(Path.is_file, files):
        status = file.stat()
        large = status.st_size > LARGE_BYTES
        content = f"{status.st_size} {status.st_mtime_ns}".encode() if large else file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
