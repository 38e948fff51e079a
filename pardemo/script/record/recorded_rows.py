"""Finds which rows of the recorded global batch belong to a rank's micro-batch."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class SampleRows:
    """The samples of a rank's micro-batch: their ``rows`` in the global batch, and the ``total`` of rows there.

    ``replaced``: whether the script's samples were replaced by them. ``positions``: of the rank's tokens, where each
    rank has a part of each sample.
    """

    rows: torch.Tensor
    total: int
    replaced: bool
    positions: torch.Tensor | None = None

    def part_of(self, parts: list[torch.Tensor]) -> torch.Tensor | None:
        """Returns the tensor of the recorded micro-batch with these samples; None if they are in several."""
        which = (self.rows * len(parts) // self.total).unique()
        return parts[int(which)] if len(which) == 1 else None


def take_rows(parts: list[torch.Tensor], rows: torch.Tensor, axis: int = 0) -> torch.Tensor | None:
    """Returns rows, numbered over all micro-batches; None if they lie in several micro-batches of different shapes."""
    if len({(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}) == 1:
        return torch.cat(parts, axis).index_select(axis, rows)
    for part in parts:
        if int(rows.min()) >= 0 and int(rows.max()) < part.shape[axis]:
            return part.index_select(axis, rows)
        rows = rows - part.shape[axis]
    return None


def part_of_tokens(tensor: torch.Tensor, local: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Selects a rank's tokens from a recorded tensor, along each axis on which its local tensor has as many."""
    if positions is None or tensor.dim() != local.dim():
        return tensor
    for axis in range(local.dim()):
        if local.shape[axis] == len(positions) < tensor.shape[axis] and int(positions.max()) < tensor.shape[axis]:
            tensor = tensor.index_select(axis, positions)
    return tensor


def once_for_each_replica(parts: list[torch.Tensor], replicas: int) -> list[torch.Tensor]:
    """Returns a single tensor for each replica where all its micro-batches have the same; else all tensors."""
    many = len(parts) // replicas
    if many < 2 or len(parts) % replicas:
        return parts
    of_each = [parts[begin : begin + many] for begin in range(0, len(parts), many)]
    alike = all(part.shape == first.shape and torch.equal(part, first) for first, *others in of_each for part in others)
    return [first for first, *_ in of_each] if alike else parts


def mean_distance(local: torch.Tensor, recorded: torch.Tensor | None) -> float:
    """Computes the mean distance of rows' scores from the recorded ones, relative to the largest of these."""
    if recorded is None or recorded.shape != local.shape:
        return float("inf")
    scale = float(recorded.abs().max()) or 1.0
    return float((local - recorded).abs().amax(-1).mean()) / scale


def token_rows(micro: SampleRows, total: int, count: int, parts: int) -> Iterator[torch.Tensor]:
    """Lists which recorded rows may be a router's rows: those of the micro-batch's samples, as [b, s] and as [s, b].

    Where a rank has a part of each sample, they are each block of its tokens, or the tokens at the known positions.

    Args:
        total: recorded rows, of ``parts`` micro-batches. count: the router's rows.
    """
    samples = len(micro.rows)
    of_each, here = total // micro.total, count // samples
    known = torch.arange(of_each) if micro.positions is None else micro.positions
    if not here or total % micro.total or count % samples or len(known) % here or int(known.max()) >= of_each:
        return
    for tokens in known.split(here):
        yield (micro.rows[:, None] * of_each + tokens).reshape(-1)
        of_part = micro.total // parts  # [s, b]: each micro-batch has its tokens in front
        part, row = micro.rows // of_part, micro.rows % of_part
        yield (part * of_part * of_each + tokens[:, None] * of_part + row).reshape(-1)


def same_rows(local: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """Compares each row with each recorded one, up to padding by one value at either end of the longer: → [b, B]."""
    if local.shape[1:] == recorded.shape[1:]:
        return (local.reshape(len(local), 1, -1) == recorded.reshape(1, len(recorded), -1)).all(-1)
    if local.dim() != 2 or recorded.dim() != 2:
        return torch.zeros(len(local), len(recorded), dtype=torch.bool)
    size = min(local.shape[1], recorded.shape[1])
    same = torch.zeros(len(local), len(recorded), dtype=torch.bool)
    for kept, left in ((slice(None, size), slice(size, None)), (slice(-size, None), slice(None, -size))):
        padding = local[:, left] if local.shape[1] > size else recorded[:, left]
        alike = (padding == padding[:, 0 if left.start is None else -1].mode().values).all(1)
        alike = alike[:, None] if local.shape[1] > size else alike[None]
        same |= (local[:, None, kept] == recorded[None, :, kept]).all(-1) & alike
    return same
