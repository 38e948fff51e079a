"""Do all ranks mean the same tensor? Compared before any data moves, so that a mismatch is an error and not a hang."""

import numpy as np
import torch
import torch.distributed as dist

from pardemo.links import Link

MAX_DIMS = 8
COLUMNS = 3 + 2 * MAX_DIMS  # dtype, dimensions, shape, strides, a shard that does not fit
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


def compare_round_the_ring(tensor: torch.Tensor, link: Link, wrong: int = 0) -> None:
    """Passes all ranks' descriptions round the ring in N−1 small steps; ValueError where they differ.

    ``wrong`` is 0, or 1 + the size of a shard that does not fit on this rank.
    """
    table = np.zeros((link.size, COLUMNS), dtype=np.int64)
    table[link.rank] = _description(tensor, wrong)
    for step in range(link.size - 1):
        link.send(memoryview(table[(link.rank - step) % link.size]).cast("B"))
        link.receive(memoryview(table[(link.rank - 1 - step) % link.size]).cast("B"))
    _compare(table)


def compare_in_group(tensor: torch.Tensor, group: dist.ProcessGroup, wrong: int = 0) -> None:
    """The same through the group's own all_gather; ValueError where the ranks' tensors differ."""
    size = dist.get_world_size(group)
    mine = torch.from_numpy(_description(tensor, wrong)).to(tensor.device)
    if size > 1:
        table = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(table, mine, group=group)
        _compare(torch.stack(table).cpu().numpy())


def _description(tensor: torch.Tensor, wrong: int) -> np.ndarray:
    """Shape, strides and dtype as integers, so that ranks can compare them before any data moves."""
    if tensor.dim() > MAX_DIMS:  # told by its number of elements alone
        tensor = tensor.reshape(-1)
    row = np.zeros(COLUMNS, dtype=np.int64)
    row[0], row[1] = _DTYPES.index(tensor.dtype), tensor.dim()
    row[2 : 2 + tensor.dim()] = tensor.shape
    if not tensor.is_contiguous():
        row[2 + MAX_DIMS : 2 + MAX_DIMS + tensor.dim()] = tensor.stride()
    row[-1] = wrong
    return row


def _describe(row: np.ndarray) -> str:
    dims = int(row[1])
    shape, strides = row[2 : 2 + dims].tolist(), row[2 + MAX_DIMS : 2 + MAX_DIMS + dims].tolist()
    text = f"{str(_DTYPES[int(row[0])]).removeprefix('torch.')} {tuple(shape)}"
    text += f" strides {tuple(strides)}" if any(strides) else ""
    return text + (f" with a shard of {row[-1] - 1} elements, which does not fit" if row[-1] else "")


def _compare(table: np.ndarray) -> None:
    descriptions = [_describe(row) for row in table]
    if len(set(descriptions)) > 1:
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(descriptions):
            ranks.setdefault(text, []).append(rank)
        told = "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in ranks.items())
        raise ValueError(f"the ranks' tensors differ ({told}); a collective needs the same on every rank")
