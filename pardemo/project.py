"""Where things are: the collection's notebooks, and the folder that a run writes to."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
#: How a file begins that a clone without git-lfs has in the place of a large one.
LFS_POINTER = b"version https://git-lfs"


def root() -> Path:
    """The folder that holds ``notebooks/``: beside the package, else the working folder or one above it."""
    for folder in (PACKAGE.parent, Path.cwd(), *Path.cwd().parents):
        if (folder / "notebooks").is_dir():
            return folder
    return Path.cwd()


def notebooks() -> dict[str, Path]:
    """The collection in its order: name without suffix -> path."""
    return {path.stem: path for path in sorted((root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))}


def chapters() -> dict[str, list[str]]:
    """The notebooks of each chapter by its number, in their order: a long chapter has several."""
    found: dict[str, list[str]] = {}
    for name in notebooks():
        found.setdefault(name[:2], []).append(name)
    return found


def output_dir() -> Path:
    """Where claims, figures and profiles go: ``$PARDEMO_OUT`` (set by ``pardemo run``), else ``outputs/latest``."""
    named = os.environ.get("PARDEMO_OUT")
    return Path(named) if named else root() / "outputs" / "latest"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a file beside ``path`` and moves it there when whole: never half a file under that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def refuse_pointer(path: str | Path, beginning: bytes, what: str) -> None:
    """ValueError where a file begins as a git-lfs pointer does; ``what`` should have been there."""
    if beginning.startswith(LFS_POINTER):
        raise ValueError(f"{path} is a git-lfs pointer, not the {what}: run `git lfs pull` in its folder")
