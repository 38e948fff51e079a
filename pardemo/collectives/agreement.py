"""Compares what the ranks are about to do before any data moves: a mismatch is an error, no hang and no wrong sum."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist

from pardemo import compat
from pardemo.collectives.links import Link
from pardemo.world.errors import ranks_by_value

#: Bytes of a description: the tensor as text, and the collective as text. A longer text ends in a checksum.
TENSOR_BYTES, EXCHANGE_BYTES = 160, 128


def description(tensor: torch.Tensor, exchange: str = "", misfit: int | None = None) -> np.ndarray:
    """A tensor and what is done with it, as bytes that the ranks can compare before any data moves.

    Args:
        exchange: the collective and whose turn it is, such as ``all_gather of unit 3``: ranks at different exchanges
            would add what does not belong together.
        misfit: size of this rank's shard where it does not fit.
    """
    text = f"{compat.dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
    if not tensor.is_contiguous():
        text += f" strides {tensor.stride()}"
    if misfit is not None:
        text += f" with a shard of {misfit} elements, which does not fit"
    return np.frombuffer(_padded(text, TENSOR_BYTES) + _padded(exchange, EXCHANGE_BYTES), np.uint8)


def compare_round_the_ring(mine: np.ndarray, link: Link) -> None:
    """Passes all ranks' descriptions round the ring in N−1 small steps; ValueError where they differ."""
    table = np.zeros((link.size, len(mine)), np.uint8)  # [N, bytes]: a row of each rank
    table[link.rank] = mine
    for step in range(link.size - 1):
        link.send(memoryview(table[(link.rank - step) % link.size]))
        link.receive(memoryview(table[(link.rank - 1 - step) % link.size]))
    _compare_rows(table)


def compare_in_group(mine: np.ndarray, group: dist.ProcessGroup, device: torch.device) -> None:
    """The same through the group's own all_gather; ValueError where the ranks' descriptions differ."""
    size = dist.get_world_size(group)
    if size > 1:
        row = torch.from_numpy(mine.copy()).to(device)
        table = [torch.empty_like(row) for _ in range(size)]
        dist.all_gather(table, row, group=group)
        _compare_rows(torch.stack(table).cpu().numpy())


def compare_lines(message: str, lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Collective: all ranks describe what they are making in the same lines.

    Raises:
        ValueError: they do not; ``message``, and the first line that differs. The same text on every rank.
    """
    ranks: list = [None] * dist.get_world_size(group)
    with compat.without_modes():  # meters: the caller did not ask for these messages
        dist.all_gather_object(ranks, list(lines), group=group)
    for rank, theirs in enumerate(ranks):
        for here, there in zip_longest(ranks[0], theirs, fillvalue="nothing more"):
            if here != there:
                raise ValueError(f"{message}; rank 0 of the group has {here}, rank {rank} {there}")


def _compare_rows(table: np.ndarray) -> None:
    if (table == table[0]).all():
        return
    tensors, exchanges = ([_text(row) for row in part] for part in np.split(table, [TENSOR_BYTES], axis=1))
    if len(set(exchanges)) > 1:
        raise ValueError(
            f"the ranks are at different exchanges ({_by_rank(exchanges)}); all have to call the same ones in one order"
        )
    raise ValueError(f"the ranks' tensors differ ({_by_rank(tensors)}); a collective needs the same on every rank")


def _by_rank(texts: list[str]) -> str:
    ranks = ranks_by_value(dict(enumerate(texts)))
    return "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in ranks.items())


def _padded(text: str, size: int) -> bytes:
    """So many bytes of the text; the end of a longer one is a checksum of all of it."""
    data = text.encode()
    if len(data) > size:
        data = data[: size - 32] + hashlib.sha256(data).hexdigest()[:32].encode()
    return data.ljust(size, b"\0")


def _text(row: np.ndarray) -> str:
    return row.tobytes().rstrip(b"\0").decode("utf-8", "replace")
