"""Reads a pickle of plain values from a file that nobody has to trust: no class, no function, no code."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

#: Bytes of the largest file that is read: its values take up to ten times as much memory.
LARGEST = 1 << 30
#: What a pickle may name beside what it writes without a name: Python's own sets.
_SETS = {(module, made.__name__): made for module in ("builtins", "__builtin__") for made in (set, frozenset)}


def read_plain(path: Path) -> Any:
    """Returns the values of a pickle that has numbers, texts, bytes, lists, tuples, dicts and sets alone.

    torch's flight recorder and memory snapshots have nothing else.

    Raises:
        ValueError: it has anything else, is too large, or is no whole pickle; nothing of it was run.
    """
    if (size := os.path.getsize(path)) > LARGEST:
        raise ValueError(f"{path.name} has {size / 2**30:.1f} GiB: pickles of up to {LARGEST >> 30} GiB are read")
    try:
        return _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # what broken bytes raise has no common class
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path.name} is no whole pickle of plain values: {text}") from None


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that finds no class and no function but :data:`_SETS`."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a set's class; refuses all other names, before anything is imported."""
        if (module, name) not in _SETS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
        return _SETS[module, name]

    def persistent_load(self, key: Any) -> Any:
        """Refuses what is stored elsewhere."""
        raise pickle.UnpicklingError("it names values that are stored elsewhere")
