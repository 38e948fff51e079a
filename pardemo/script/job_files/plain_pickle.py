"""Reads pickles of plain values from files that need not be trusted: it loads no class and runs no code."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

#: Bytes of the largest file that is read: its values take up to ten times as much memory.
LARGEST = 1 << 30
#: The only classes that a pickle may name: Python's sets. All other plain values need no name.
_SETS = {(module, made.__name__): made for module in ("builtins", "__builtin__") for made in (set, frozenset)}


def read_plain(path: Path) -> Any:
    """Reads a pickle that has only numbers, texts, bytes, lists, tuples, dicts and sets.

    Dumps of torch's flight recorder and memory snapshots have nothing else.

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
    """Loads a pickle, and refuses all classes and functions but :data:`_SETS`."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of :data:`_SETS`, and refuses all other names before anything is imported."""
        if (module, name) not in _SETS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")
        return _SETS[module, name]

    def persistent_load(self, key: Any) -> Any:
        """Refuses values that are stored outside the pickle."""
        raise pickle.UnpicklingError("it names values that are stored elsewhere")
