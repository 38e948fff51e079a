"""What a framework's ranks keep: bytes of model states by kind, and of everything else that is alive."""

import gc
import time
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from pardemo import compat

#: A thread of gloo's lets go of the last collective's tensors in its own time, and needs Python for it: it gets some.
SETTLE_S = 0.1


def nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the tensors' storages, each once; of a DTensor, this rank's part; a meta tensor has none."""
    parts = (local(tensor) for tensor in tensors if tensor is not None)
    storages = (part.untyped_storage() for part in parts if not part.is_meta)  # DeepSpeed keeps parameters' shapes so
    # torch.compile keeps shapes of tensors whose sizes are symbols
    sizes = {compat.storage_address(each): each.nbytes() for each in storages if isinstance(each.nbytes(), int)}
    return sum(sizes.values())


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
    table = {kind: nbytes(tensors) for kind, tensors in listed.items()}
    table["others"] = nbytes(alive()) - before - nbytes(t for tensors in listed.values() for t in tensors)
    if table["others"] < 0:
        raise RuntimeError(f"{-table['others']} bytes that were alive before have gone since: measure in a fresh World")
    return table


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it: a DTensor's shard, any other tensor itself."""
    return compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
