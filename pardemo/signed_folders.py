"""Signs folders with this user's key, and says whether a folder is what the user's own run wrote.

A library's checkpoint may be a pickle, and reading a pickle can run code. So such a folder is read only where each file
has the checksum that the run signed, with a key that lies in the user's configuration folder. The signature is written
last; a folder without one was never finished.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

from pardemo import project

SIGNATURE = "pardemo-seal.json"
KEY_BYTES = 32


def sign(folder: Path, **about: Any) -> None:
    """Writes the signature file of a complete checkpoint; ``about`` is kept in it (ranks, step)."""
    body = {"about": about, "files": checksums(folder)}
    project.write_json(folder / SIGNATURE, {**body, "signature": _signature(body)})


def fault(folder: Path) -> str | None:
    """Says why the folder is not to be read; None when it is whole and ours."""
    try:
        signed = json.loads((folder / SIGNATURE).read_text("utf-8"))
        body = {key: signed[key] for key in ("about", "files")}
        ours = hmac.compare_digest(str(signed["signature"]).encode(), _signature(body).encode())
    except FileNotFoundError:
        return "it was never finished"
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return "its signature cannot be read"
    if not ours:
        return f"another user or machine wrote it (another key than {_key_file()})"
    now = checksums(folder)
    missing, changed = sorted(set(body["files"]) - set(now)), sorted(n for n in now if body["files"].get(n) != now[n])
    if missing:
        return f"{missing[0]} is missing"
    return f"{changed[0]} is not what was written" if changed else None


def about(folder: Path) -> dict[str, Any]:
    """Returns what was kept beside the signature."""
    return json.loads((folder / SIGNATURE).read_text("utf-8"))["about"]


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below the folder but the signature."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != SIGNATURE:
            with open(path, "rb") as file:
                sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _signature(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, ensure_ascii=False).encode()
    return hmac.new(_key(), text, "sha256").hexdigest()


def _key_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("PARDEMO_KEY") or Path(home) / "pardemo" / "key")


def _key() -> bytes:
    path = _key_file()
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)  # for the user alone, and linked when it is whole
        with open(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):  # another run was quicker
            os.link(name, path)
        os.unlink(name)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} holds {len(key)} bytes, not a key of {KEY_BYTES}: remove it")
    return key
