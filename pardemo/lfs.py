"""What a clone without git-lfs has in the place of large files: a few lines that say where they are."""

from pathlib import Path

POINTER = b"version https://git-lfs"


def refuse_pointer(path: str | Path, beginning: bytes, what: str) -> None:
    """ValueError where a file begins as such a pointer does; ``what`` should have been there."""
    if beginning.startswith(POINTER):
        raise ValueError(f"{path} is a git-lfs pointer, not the {what}: run `git lfs pull` in its folder")
