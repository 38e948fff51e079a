"""A checkpoint's folder: a manifest in JSON and a file of tensors for each rank, in safetensors. Neither can hold code.

::

    step-500/
      pardemo.json              what was saved, by how many ranks, with each file's size and SHA-256
      rank-00000.safetensors    rank 0's shards, and what all ranks hold alike
      rank-00001.safetensors    rank 1's shards

The names of the files follow from the number of ranks: no path is read from the manifest.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

MANIFEST, FORMAT = "pardemo.json", 2
MAX_MANIFEST_BYTES = 256 << 20  # a unit takes some hundred bytes and a name for each parameter


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05}.safetensors"


def partial_of(folder: Path) -> Path:
    """Where a checkpoint grows before it has its name."""
    return folder.with_name(folder.name + ".partial")


def previous_of(folder: Path) -> Path:
    """Where the checkpoint that is being replaced waits until the new one has its name."""
    return folder.with_name(folder.name + ".previous")


def begin(folder: Path) -> None:
    """An empty folder for a new checkpoint; what a writer that failed has left there goes."""
    shutil.rmtree(partial_of(folder), ignore_errors=True)
    partial_of(folder).mkdir(parents=True)


def write_tensors(folder: Path, rank: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Writes a rank's file; returns what the manifest says of it.

    Raises:
        ValueError: a tensor of a dtype that safetensors does not have, such as complex128. OSError: no room, or such.
    """
    path = partial_of(folder) / rank_file(rank)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        if (
            storage := tensor.untyped_storage().data_ptr()
        ) in memory:  # safetensors keeps no two tensors over one memory
            tensors[name] = tensor.clone()
        memory.add(storage)
    try:
        save_file(tensors, path)
    except KeyError as dtype:
        raise ValueError(f"a checkpoint in safetensors cannot keep tensors of {dtype}") from None
    except SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {first_line(error)}") from None
    path.chmod(0o644)
    _sync(path)
    return {"bytes": path.stat().st_size, "sha256": checksum(path)}


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Writes the manifest: with it, a checkpoint is whole."""
    path = partial_of(folder) / MANIFEST
    path.write_text(json.dumps({"format": FORMAT, "sha256": _digest(content), "content": content}, indent=1), "utf-8")
    _sync(path)


def give_name(folder: Path) -> None:
    """The new checkpoint takes the name, and the one before goes when it has it."""
    if folder.exists():
        shutil.rmtree(previous_of(folder), ignore_errors=True)
        folder.rename(previous_of(folder))
    partial_of(folder).rename(folder)
    shutil.rmtree(previous_of(folder), ignore_errors=True)


def read_manifest(folder: Path) -> tuple[str, dict[str, Any]]:
    """The name of the folder that holds a whole checkpoint (``folder``'s, or the previous one's), and what its manifest
    says.

    Raises:
        FileNotFoundError: no whole checkpoint there. ValueError: the manifest is of the older format or not what was
            written.
    """
    where = folder if _is_there(folder / MANIFEST) else previous_of(folder)
    if not _is_there(where / MANIFEST):
        raise FileNotFoundError(f"no whole checkpoint in {folder.name}: it has no {MANIFEST}")
    _check_regular(where / MANIFEST)
    if (where / MANIFEST).stat().st_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"checkpoint {where.name}: {MANIFEST} is larger than any that is written")
    try:
        whole = json.loads((where / MANIFEST).read_bytes())
        content = whole.get("content") if isinstance(whole, dict) else None
        digest = _digest(content) if isinstance(content, dict) else None
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, nested without end
        raise ValueError(f"checkpoint {where.name}: {MANIFEST} is no JSON ({first_line(error)})") from None
    if isinstance(whole, dict) and "format" not in whole and isinstance(whole.get("sha256"), dict):
        raise ValueError(
            f"checkpoint {where.name} is of the older format, whose index is a pickle, which can run code: it is not "
            "read; save one with this version"
        )
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise ValueError(f"checkpoint {where.name}: {MANIFEST} is not of format {FORMAT}, the one that is read here")
    if digest is None or whole.get("sha256") != digest:
        raise ValueError(f"checkpoint {where.name}: {MANIFEST} is not the file that was written")
    return where.name, content


def check_file(folder: Path, rank: int, entry: Any) -> None:
    """ValueError where a rank's file is missing or is not the one whose size and SHA-256 the manifest has."""
    path = folder / rank_file(rank)
    _check_regular(path)
    whole = isinstance(entry, dict) and path.stat().st_size == entry.get("bytes")
    if not whole or checksum(path) != entry.get("sha256"):
        raise ValueError(f"checkpoint {folder.name}: {path.name} is not the file that was written")


class Reader:
    """The tensors in the ranks' files of a folder; each file is opened (mapped into memory) once, when it is needed."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[int, Any] = {}

    def tensor(self, rank: int, key: str, place: slice | None = None) -> torch.Tensor:
        """A tensor of a rank's file, or a part of it.

        Raises:
            ValueError: it is not there, or the file is no safetensors.
        """
        with self._one_line(rank):
            file = self._open(rank)
            return file.get_tensor(key) if place is None else file.get_slice(key)[place]

    def check_form(self, rank: int, key: str, form: list) -> None:
        """ValueError where a tensor of a rank's file has not this dtype and shape (``["torch.float32", [9]]``)."""
        with self._one_line(rank):
            file = self._open(rank)
            shape = list(file.get_slice(key).get_shape())
            sample = file.get_slice(key)[0:0] if shape else file.get_tensor(key)
            if [str(sample.dtype), shape] != form:
                raise ValueError(f"{key} is {sample.dtype} {shape} there, not {form}")

    def _open(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(self._folder / rank_file(rank), framework="pt")
        return self._files[rank]

    @contextlib.contextmanager
    def _one_line(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, ValueError, IndexError, TypeError, RuntimeError) as error:
            reason = f"{rank_file(rank)} cannot be read ({first_line(error)})"
            raise ValueError(f"checkpoint {self._folder.name}: {reason}") from None


def parts(numel: int, chunk: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Which ranks' chunks elements ``begin`` to ``end`` of a unit lie in: rank, first and last + 1 within the unit."""
    end = min(end, numel)
    while begin < end:
        rank = begin // chunk
        until = min(end, (rank + 1) * chunk)
        yield rank, begin, until
        begin = until


def checksum(path: Path) -> str:
    """A file's SHA-256."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of tensors' bytes, for ranks to compare."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def first_line(error: Exception) -> str:
    """An error's message in one line of at most 150 characters, of which a terminal prints every one.

    Messages repeat what stands in the file, and that may be a terminal's commands.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in lines[0][:150]
    )


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _check_regular(path: Path) -> None:
    """ValueError for what is no file of the folder itself: a link may lead anywhere, and a pipe never ends."""
    if path.is_symlink() or not path.is_file():
        reason = "is missing" if not _is_there(path) else "is a link or a device, not a file of the folder"
        raise ValueError(f"checkpoint {path.parent.name}: {path.name} {reason}")


def _sync(path: Path) -> None:
    """Waits until the file is on the disk: a new checkpoint must not be less whole than the one that it replaces."""
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
