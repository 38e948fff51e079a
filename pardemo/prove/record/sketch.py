"""Short numbers for large tensors: hashes of samples, projections of outputs, sketches of parameters."""

import hashlib
from dataclasses import replace
from functools import cache

import torch

from pardemo.prove.record.facts import Piece

#: Numbers kept of each cell of a module's output: two random projections, and its norm.
PER_CELL = 3
#: Edge of the block of which a sketch keeps one number, along each of a parameter's last two axes.
BLOCK = 16


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's shape and bits; equal for equal tensors only."""
    plain = tensor.detach().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.blake2b(raw, digest_size=12, person=str(tuple(plain.shape)).encode()[:16]).hexdigest()


@cache
def signs(elements: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random signs, the same on every rank and in every run. [elements]"""
    generator = torch.Generator(device="cpu").manual_seed(0x9E3779B9 + seed)
    drawn = torch.randint(0, 2, (elements,), generator=generator, device="cpu")
    return (drawn * 2 - 1).to(dtype)


def cells(output: torch.Tensor) -> torch.Tensor:
    """Two projections and the norm of each row of the last axis, fp64: [d0, d1, …, h] → [d0, d1, …, 3].

    An output without rows, [n] or a number, is kept as it is, [n, 1].
    """
    plain = output.detach().to(torch.float64)
    if plain.dim() < 2:
        return plain.reshape(-1, 1).clone()  # a wrapper gives what it wraps gives: files keep no memory twice
    width = plain.shape[-1]
    basis = torch.stack([signs(width, 0), signs(width, 1)], dim=1)  # [h, 2]
    return torch.cat([plain @ basis, plain.norm(dim=-1, keepdim=True)], dim=-1)


def token_hashes(batch: torch.Tensor) -> torch.Tensor:
    """A number for each token of a batch: [b, s] of whole numbers as they are, else a hash of each [b, s, …] → [b, s].

    A batch [b, h] of floating point has one token for each sample.
    """
    plain = batch.detach()
    if not plain.is_floating_point() and not plain.is_complex():
        # a copy: a batch may be trained on twice in a step, and files keep no memory twice
        return plain.to(torch.int64, copy=True).reshape(plain.shape[0] if plain.dim() else 1, -1)
    if plain.dim() < 3:
        plain = plain.reshape(plain.shape[0] if plain.dim() else 1, 1, -1)
    elif plain.dim() > 3:
        plain = plain.flatten(2)
    rows = plain.to(torch.float64).contiguous().view(torch.int64)
    weights = torch.arange(1, rows.shape[-1] + 1, dtype=torch.int64) * 0x9E3779B97F4A7C1 + 1
    return (rows.bitwise_xor(rows >> 29) * weights).sum(-1)  # whole numbers overflow, and are the same everywhere


def of_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter's sketch, cut as the parameter is: one number for each block of :data:`BLOCK` × :data:`BLOCK`.

    A block's number is the sum of its elements with random signs, which depend on the place within the block: the
    sketch of a part that begins and ends at blocks is the part of the sketch. An axis that does not divide into blocks
    is kept. Sums of squares stay what they are, on average, and so do factors, exactly. [a, b] → [a / 16, b / 16]
    """
    plain = tensor.detach().to(torch.float64)
    for axis in range(max(plain.dim() - 2, 0), plain.dim()):
        size = plain.shape[axis]
        if size % BLOCK == 0 and size:
            shape = (*plain.shape[:axis], size // BLOCK, BLOCK, *plain.shape[axis + 1 :])
            plain = torch.tensordot(plain.reshape(shape), signs(BLOCK, 7 + axis), dims=([axis + 1], [0]))
    return plain.clone() if plain.data_ptr() == tensor.data_ptr() else plain


def scaled(piece: Piece, shape: tuple[int, ...]) -> Piece:
    """A parameter's piece as it lies in the whole's sketch, where it begins and ends at blocks.

    ``shape``: of the piece's own sketch.
    """
    if shape == piece.shape or piece.whole is None or piece.start is None:
        return piece
    steps = [BLOCK if own != size else 1 for own, size in zip(piece.shape, shape, strict=True)]
    if any(of % step or at % step for of, at, step in zip(piece.whole, piece.start, steps, strict=True)):
        return piece
    whole = tuple(of // step for of, step in zip(piece.whole, steps, strict=True))
    start = tuple(at // step for at, step in zip(piece.start, steps, strict=True))
    return replace(piece, shape=shape, whole=whole, start=start)
