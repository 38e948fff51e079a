"""Do all ranks mean the same tensor, and the same exchange of it? Compared before any data moves, so that a mismatch is
an error and neither a hang nor a wrong sum."""

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist

from pardemo import compat
from pardemo.collectives.links import Link

MAX_DIMS = 8  # of more, the columns of the shape and the strides hold both in words
EXCHANGE_COLUMNS = 16  # of 8 bytes each: the exchange in words
COLUMNS = 3 + 2 * MAX_DIMS + EXCHANGE_COLUMNS  # dtype, dimensions, shape, strides, a shard that does not fit, words
_WRONG, _WORDS = 2 + 2 * MAX_DIMS, 3 + 2 * MAX_DIMS
_DTYPES = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)


def description(tensor: torch.Tensor, exchange: str = "", wrong: int = 0) -> np.ndarray:
    """A tensor and what is done with it, as integers that the ranks can compare before any data moves.

    Args:
        exchange: the collective and whose turn it is, such as ``all_gather of unit 3``: ranks at different exchanges
            would add what does not belong together. Of words of more than 128 bytes the end is told by a checksum.
        wrong: 0, or 1 + the size of a shard that does not fit on this rank.
    """
    row = np.zeros(COLUMNS, dtype=np.int64)
    row[0], row[1] = _DTYPES.index(tensor.dtype), tensor.dim()
    if tensor.dim() > MAX_DIMS:
        _write(row[2:_WRONG], _form(tuple(tensor.shape), () if tensor.is_contiguous() else tensor.stride()))
    else:
        row[2 : 2 + tensor.dim()] = tensor.shape
        if not tensor.is_contiguous():
            row[2 + MAX_DIMS : 2 + MAX_DIMS + tensor.dim()] = tensor.stride()
    row[_WRONG] = wrong
    _write(row[_WORDS:], exchange)
    return row


def compare_round_the_ring(mine: np.ndarray, link: Link) -> None:
    """Passes all ranks' descriptions round the ring in N−1 small steps; ValueError where they differ."""
    table = np.zeros((link.size, COLUMNS), dtype=np.int64)  # [N, columns]: a row of each rank
    table[link.rank] = mine
    for step in range(link.size - 1):
        link.send(memoryview(table[(link.rank - step) % link.size]).cast("B"))
        link.receive(memoryview(table[(link.rank - 1 - step) % link.size]).cast("B"))
    _compare(table)


def compare_in_group(mine: np.ndarray, group: dist.ProcessGroup, device: torch.device) -> None:
    """The same through the group's own all_gather; ValueError where the ranks' descriptions differ."""
    size = dist.get_world_size(group)
    if size > 1:
        row = torch.from_numpy(mine).to(device)
        table = [torch.empty_like(row) for _ in range(size)]
        dist.all_gather(table, row, group=group)
        _compare(torch.stack(table).cpu().numpy())


def compare_lines(what: str, lines: Sequence[str], group: dist.ProcessGroup) -> None:
    """Collective: all ranks describe what they are making in the same lines.

    Raises:
        ValueError: they do not; ``what``, and the first line that differs. The same text on every rank.
    """
    ranks: list = [None] * dist.get_world_size(group)
    with compat.without_modes():  # meters: the caller did not ask for these messages
        dist.all_gather_object(ranks, list(lines), group=group)
    for rank, theirs in enumerate(ranks):
        for here, there in zip_longest(ranks[0], theirs, fillvalue="nothing more"):
            if here != there:
                raise ValueError(f"{what}; rank 0 of the group has {here}, rank {rank} {there}")


def _compare(table: np.ndarray) -> None:
    if (table == table[0]).all():
        return
    exchanges = [_exchange(row) for row in table]
    if len(set(exchanges)) > 1:
        raise ValueError(
            f"the ranks are at different exchanges ({_by_rank(exchanges)}); all have to call the same ones in one order"
        )
    descriptions = _by_rank([_describe(row) for row in table])
    raise ValueError(f"the ranks' tensors differ ({descriptions}); a collective needs the same on every rank")


def _by_rank(texts: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in ranks.items())


def _write(columns: np.ndarray, text: str) -> None:
    """Puts 128 bytes of text into 16 columns; of a longer one the first 96 and a checksum of the whole."""
    words = text.encode()
    if len(words) > 8 * len(columns):
        words = words[: 8 * len(columns) - 32] + hashlib.sha256(words).hexdigest()[:32].encode()
    columns.view(np.uint8)[: len(words)] = np.frombuffer(words, np.uint8)


def _read(columns: np.ndarray) -> str:
    return columns.tobytes().rstrip(b"\0").decode("utf-8", "replace")


def _exchange(row: np.ndarray) -> str:
    return _read(row[_WORDS:])


def _form(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    return f"{shape} strides {strides}" if any(strides) else str(shape)


def _describe(row: np.ndarray) -> str:
    dims = int(row[1])
    if dims > MAX_DIMS:
        form = _read(row[2:_WRONG])
    else:
        form = _form(tuple(row[2 : 2 + dims].tolist()), tuple(row[2 + MAX_DIMS : 2 + MAX_DIMS + dims].tolist()))
    text = f"{str(_DTYPES[int(row[0])]).removeprefix('torch.')} {form}"
    return text + (f" with a shard of {row[_WRONG] - 1} elements, which does not fit" if row[_WRONG] else "")
