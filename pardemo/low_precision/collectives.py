"""All-gather and reduce-scatter of numbers in few bits: fewer bytes on the links, and an error that can be kept.

- The **all-gather** encodes each shard once and sends codes: every rank decodes the same ones, its own too, so that all
  have the same numbers (ZeRO++'s qwZ, Wang et al. 2023, arXiv 2306.10209, 3.1).
- The **reduce-scatter** cannot add codes. On a ring it would decode, add and encode again N−1 times; instead each rank
  sends each other rank its part once, and the sums are made in fp32 where they end: one error for each summand (qgZ of
  ZeRO++, 3.3, in one step).

A rank sends (N−1)/N of what the numbers take in their format, as it does of fp32's. With ``error``, what a rank's
numbers lost is added to them the next time (Karimireddy et al. 2019, arXiv 1901.09847).
"""

import torch
import torch.distributed as dist

from pardemo.collectives.ring import agree
from pardemo.groups import group_of
from pardemo.low_precision.formats import FORMATS, Encoded, decode, encode


def quantised_all_gather(
    shard: torch.Tensor, group: dist.ProcessGroup | None = None, format: str = "int8"
) -> torch.Tensor:
    """The ranks' shards one after the other, as their codes say [N, *shard], the same on all ranks.

    Raises:
        ValueError: shards or formats differ between ranks; there is no such format.
    """
    group = group_of(group)
    mine = encode(shard, format)
    agree(shard, f"all_gather in {format}", group)
    packed = _pack(mine)
    gathered = packed.new_empty(group.size() * packed.numel())
    dist.all_gather_single(gathered, packed, group=group)
    return torch.stack([decode(_unpack(part, mine)) for part in gathered.chunk(group.size())])


def quantised_reduce_scatter(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, format: str = "int8",
    error: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """This rank's part of the ranks' sum [S/N, ..] of ``tensor`` [S, ..]; summed in fp32, in ``tensor``'s dtype.

    Args:
        error: like ``tensor``, in fp32: what was lost so far, which is added, and replaced by what is lost now; its own
            for each tensor of a step. None: it is forgotten.

    Raises:
        ValueError: S does not divide by the ranks; tensors or formats differ; ``error`` is of another shape.
    """
    group = group_of(group)
    ranks = group.size()
    if format not in FORMATS:
        raise ValueError(f"no format {format!r}; there are {', '.join(FORMATS)}")
    if not tensor.dim() or tensor.shape[0] % ranks:
        raise ValueError(f"a tensor {tuple(tensor.shape)} does not divide into {ranks} parts along its first dimension")
    if error is not None and (error.shape != tensor.shape or error.dtype != torch.float32):
        raise ValueError(f"error is fp32 {tuple(tensor.shape)}, as the tensor, not {error.dtype} {tuple(error.shape)}")
    agree(tensor, f"reduce_scatter in {format}", group)
    values = tensor.detach().float()
    if error is not None:
        values = values + error
    parts = [encode(part, format) for part in values.chunk(ranks)]
    if error is not None:
        error.copy_(values - torch.cat([decode(part) for part in parts]))
    leaving = torch.cat([_pack(part) for part in parts])
    coming = torch.empty_like(leaving)
    dist.all_to_all_single(coming, leaving, group=group)
    return sum(decode(_unpack(each, parts[0])) for each in coming.chunk(ranks)).to(tensor.dtype)  # type: ignore[union-attr]


def _pack(encoded: Encoded) -> torch.Tensor:
    """All parts as bytes, one after the other."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in encoded.parts])


def _unpack(packed: torch.Tensor, like: Encoded) -> Encoded:
    """The reverse, of a tensor of the same shape."""
    sizes = [part.numel() * part.element_size() for part in like.parts]
    pieces = packed.split(sizes)
    parts = (piece.clone().view(part.dtype).view(part.shape) for piece, part in zip(pieces, like.parts, strict=True))
    return Encoded(like.format, tuple(parts), like.shape, like.dtype)
