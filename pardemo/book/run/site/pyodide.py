"""Pyodide, Python for browsers, for a page of the site: from a folder, this user's cache, or npm's registry."""

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "314.0.7"  # Python 3.14
#: SHA-512 of the package that ``npm pack`` brings, as the registry gave it when the version was chosen.
INTEGRITY = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
#: What a page needs of it: 13 MB, of which a browser is sent 6 where the host compresses.
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
PATIENCE_S = 180


class NoPyodideError(OSError):
    """Pyodide cannot be had here; the message says why, in one line."""


def pyodide_folder(given: Path | None = None) -> Path:
    """A folder with :data:`FILES`: the given one, the cache's, or what npm brings into the cache.

    Raises:
        ValueError: the given folder lacks a file.
        NoPyodideError: none was given, and npm cannot bring it.
    """
    if given is not None:
        if missing := [name for name in FILES if not (given / name).is_file()]:
            raise ValueError(f"{given} has no {', '.join(missing)}: --pyodide names a folder of Pyodide {VERSION}")
        return given
    cached = cache()
    if not all((cached / name).is_file() for name in FILES):
        _fetch(cached)
    return cached


def cache() -> Path:
    """Returns the folder of this user's copy."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pardemo" / f"pyodide-{VERSION}"


def _fetch(into: Path) -> None:
    """Fetches the package by npm, checks it, and moves what is needed of it to its place at once."""
    npm = shutil.which("npm")
    if npm is None:
        raise NoPyodideError("npm, which brings Pyodide, is not installed")
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as name:
        temporary = Path(name)
        command = [npm, "pack", f"pyodide@{VERSION}", "--silent"]
        try:
            done = subprocess.run(
                command, cwd=temporary, capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise NoPyodideError(f"npm did not bring Pyodide within {PATIENCE_S} s") from None
        package = next(temporary.glob("*.tgz"), None)
        if done.returncode or package is None:
            raise NoPyodideError(f"npm pack pyodide@{VERSION} ended with status {done.returncode}")
        unpack(package, temporary / "files")
        shutil.rmtree(into, ignore_errors=True)  # an older one lacked a file
        (temporary / "files").rename(into)


def unpack(package: Path, into: Path) -> None:
    """Writes :data:`FILES` of npm's package into a new folder.

    Raises:
        NoPyodideError: it is not the package that was chosen.
    """
    digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if digest != INTEGRITY:
        raise NoPyodideError(f"what npm brought is not Pyodide {VERSION}: its SHA-512 is another")
    into.mkdir()
    with tarfile.open(package) as archive:
        for name in FILES:
            member = archive.extractfile(f"package/{name}")
            assert member is not None  # the digest says what is inside
            (into / name).write_bytes(member.read())
