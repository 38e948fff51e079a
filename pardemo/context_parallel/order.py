"""Orders a sequence's tokens over ranks: as they follow, or one piece from the front and one from the back to each.

Causal attention gives the last token as many products as there are tokens, and the first one a single one. Cut in the
plain order, rank 0 has 1/N² of the work and the last one (2N−1)/N². The zigzag cuts 2N pieces and gives rank r pieces r
and 2N−1−r, which together are as much for all (zhuzilin/ring-flash-attention; Llama 3, arXiv 2407.21783, 3.3.2)::

    4 ranks, plain     0 0 1 1 2 2 3 3
    4 ranks, zigzag    0 1 2 3 3 2 1 0
"""

import torch
import torch.distributed as dist

from pardemo.collectives import ring_all_gather
from pardemo.groups import group_of

ORDERS = ("zigzag", "plain")


def pieces_of(rank: int, ranks: int, order: str = "zigzag") -> tuple[int, ...]:
    """The pieces of the sequence on ``rank``, in their order: one of N, or two of 2N.

    Raises:
        ValueError: there is no such order.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    return (rank, 2 * ranks - 1 - rank) if order == "zigzag" else (rank,)


def positions(
    tokens: int, rank: int, ranks: int, order: str = "zigzag", device: "torch.device | str | None" = None
) -> torch.Tensor:
    """Positions in the whole sequence of the tokens on ``rank`` [tokens/N]: what rotary embeddings have to be told.

    Args:
        tokens: of the whole sequence.

    Raises:
        ValueError: the sequence does not divide into the order's pieces.
    """
    mine = pieces_of(rank, ranks, order)
    piece_tokens, left = divmod(tokens, ranks * len(mine))
    if left:
        raise ValueError(
            f"a sequence of {tokens} tokens does not divide into the {ranks * len(mine)} pieces of the {order} order"
        )
    return torch.cat([torch.arange(piece * piece_tokens, (piece + 1) * piece_tokens, device=device) for piece in mine])


def cut(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = 1, order: str = "zigzag"
) -> torch.Tensor:
    """This rank's tokens of a whole sequence [.., S, ..] along ``dim``: [.., S/N, ..], a copy.

    Cut inputs, labels and positions alike; labels are shifted *before* they are cut, since the token that follows a
    piece's last one lies on another rank.

    Raises:
        ValueError: the sequence does not divide into N pieces (plain) or 2N (zigzag).
    """
    group = group_of(group)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    here = positions(tensor.shape[dim], rank, ranks, order, tensor.device)
    return tensor.index_select(dim, here)


def join(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, dim: int = 1, order: str = "zigzag"
) -> torch.Tensor:
    """The whole sequence [.., S, ..] of the ranks' tokens [.., S/N, ..], in its order, on every rank. No gradient."""
    group = group_of(group)
    ranks = dist.get_world_size(group)
    moved = tensor.detach().movedim(dim, 0).contiguous()
    gathered = ring_all_gather(moved, group, label="a sequence's pieces").view(-1, *moved.shape[1:])
    tokens = gathered.shape[0]
    here = torch.cat([positions(tokens, rank, ranks, order, tensor.device) for rank in range(ranks)])
    joined = torch.empty_like(gathered)
    joined[here] = gathered
    return joined.movedim(0, dim)
