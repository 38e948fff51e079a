"""Checkpoints of a training run: whole or not, ours or not (:mod:`pardemo.seals`)."""

import re
import shutil
from pathlib import Path

from pardemo.seals import KEY_BYTES, SEAL, _key, about, checksums, fault, files, seal

__all__ = [
    "KEY_BYTES", "SEAL", "_key", "about", "checkpoints", "checksums", "fault", "files", "keep", "newest", "readable",
    "same_here", "seal",
]  # fmt: skip


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, the newest first."""
    folders = [p for p in run.glob("checkpoint-*") if p.is_dir() and re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(folders, key=lambda p: -int(p.name.rpartition("-")[2]))


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that may be read, and a line for each newer one that may not."""
    notes = []
    for folder in checkpoints(run):
        reason = fault(folder)
        if reason is None:
            return folder, notes
        notes.append(f"{folder.name} is passed over: {reason}")
    return None, notes


def readable(run: Path) -> set[str]:
    """The names of all checkpoints that may be read."""
    return {folder.name for folder in checkpoints(run) if fault(folder) is None}


def same_here(folder: Path, files: dict[str, str]) -> bool:
    """Whether the folder, as this host sees it, has exactly the files of another host's seal."""
    return folder.is_dir() and checksums(folder) == files


def keep(run: Path, limit: int | None, own: set[str]) -> None:
    """Removes the oldest of the run's ``own`` checkpoints beyond ``limit``, and what was never finished.

    Of whatever else is sealed, and could not be read, nothing is counted and nothing removed: it is not known whose
    work it holds.
    """
    ours = [folder for folder in checkpoints(run) if folder.name in own]
    unfinished = [folder for folder in checkpoints(run) if not (folder / SEAL).is_file()]
    for folder in [*ours[limit or len(ours) :], *unfinished]:
        shutil.rmtree(folder)
