"""Counts what a framework's ranks keep: bytes of model states by kind, and of everything else that is alive."""

import gc
import time
from collections.abc import Iterable, Mapping

import torch

from pardemo.meters.tensors import storage_bytes

#: A thread of gloo's lets go of the last collective's tensors in its own time, and needs Python for it: it gets some.
SETTLE_S = 0.1


def alive() -> list[torch.Tensor]:
    """Every tensor that Python still knows in this process; not what C++ alone holds (a reducer's buckets)."""
    time.sleep(SETTLE_S)
    gc.collect()
    tensors = []
    for item in gc.get_objects():
        try:
            if isinstance(item, torch.Tensor):
                tensors.append(item)
        except ReferenceError:  # a weak proxy whose object is gone
            continue
    return tensors


def by_kind(kinds: Mapping[str, Iterable[torch.Tensor | None]], before: int = 0) -> dict[str, int]:
    """Bytes of each kind, and ``"others"``: what is alive beyond them and beyond the ``before`` bytes of the start.

    Raises:
        RuntimeError: fewer bytes are alive than are listed: ``before`` counted something that has gone since.
    """
    listed = {kind: list(tensors) for kind, tensors in kinds.items()}
    table = {kind: storage_bytes(tensors) for kind, tensors in listed.items()}
    table["others"] = storage_bytes(alive()) - before - storage_bytes(t for tensors in listed.values() for t in tensors)
    if table["others"] < 0:
        raise RuntimeError(f"{-table['others']} bytes that were alive before have gone since: measure in a fresh World")
    return table
