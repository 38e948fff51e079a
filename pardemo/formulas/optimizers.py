"""Computes what an optimizer keeps for each matrix, and what Muon computes and sends for it.

A shape is that of one parameter, in fp32 as the optimizers of ``torch.optim`` keep their states; the fp32 copy of the
parameters of mixed precision (4 bytes) comes on top. Sources: Adam, Kingma and Ba 2015 (arXiv 1412.6980); 8-bit Adam,
Dettmers et al. 2022 (arXiv 2110.02861); Adafactor, Shazeer and Stern 2018 (arXiv 1804.04235, section 3); Muon, Jordan
2024 (kellerjordan.github.io/posts/muon); Shampoo, Gupta et al. 2018 (arXiv 1802.09568, algorithm 1).
"""

import math
from collections.abc import Callable, Iterable, Sequence

Shape = Sequence[int]
BLOCK = 256  # numbers that share a scale in 8-bit Adam
ROUNDS = 5  # of Muon's Newton-Schulz iteration


def _numbers(shape: Shape) -> int:
    return math.prod(shape)


def _adam_8_bit(shape: Shape) -> int:
    """Two states of a byte a number, in blocks with a scale in fp32 each; the last block is filled up."""
    return 2 * -(-_numbers(shape) // BLOCK) * (BLOCK + 4)


def _adafactor(shape: Shape) -> int:
    """Second moments: one number for each row and one for each column of a matrix; a vector keeps all of its own."""
    return 4 * (sum(shape) if len(shape) == 2 else _numbers(shape))


def _shampoo(shape: Shape) -> int:
    """For a matrix a square matrix of its rows and one of its columns, and the inverse root of each."""
    return 4 * 2 * (shape[0] ** 2 + shape[1] ** 2) if len(shape) == 2 else 4 * _numbers(shape)


#: Bytes that each optimizer keeps for one parameter of a shape.
KEPT: dict[str, Callable[[Shape], int]] = {
    "SGD, momentum": lambda shape: 4 * _numbers(shape),
    "Adam": lambda shape: 8 * _numbers(shape),
    "8-bit Adam": _adam_8_bit,
    "Adafactor": _adafactor,
    "Muon": lambda shape: 4 * _numbers(shape),
    "Shampoo": _shampoo,
}


def kept_bytes(optimizer: str, shapes: Iterable[Shape]) -> int:
    """Bytes of states of one of :data:`KEPT` for parameters of these shapes.

    Raises:
        ValueError: there is no such optimizer, or Muon is to take what is no matrix.
    """
    if optimizer not in KEPT:
        raise ValueError(f"no optimizer {optimizer!r}; there are: {', '.join(KEPT)}")
    shapes = [tuple(shape) for shape in shapes]
    if optimizer == "Muon" and any(len(shape) != 2 for shape in shapes):
        raise ValueError("Muon is for matrices; what is none is for another optimizer, as Adam")
    return sum(KEPT[optimizer](shape) for shape in shapes)


def newton_schulz(singular_value: float, rounds: int = ROUNDS) -> float:
    """Applies Muon's iteration to one singular value of a matrix whose norm is 1: an odd polynomial, applied again
    and again (Jordan 2024)."""
    linear, cubic, quintic = 3.4445, -4.7750, 2.0315
    for _ in range(rounds):
        singular_value = linear * singular_value + cubic * singular_value**3 + quintic * singular_value**5
    return singular_value


def newton_schulz_flops(rows: int, columns: int, rounds: int = ROUNDS) -> int:
    """Operations of the iteration's three products a round, two for each multiplication and addition."""
    short, long = sorted((rows, columns))
    return rounds * (2 * short * short * long + 2 * short**3 + 2 * short * short * long)


def muon_by_products(rows: int, columns: int, ranks: int) -> tuple[float, float, float]:
    """Numbers that a rank sends for each of a round's three products where DTensor makes them, of a matrix that is cut
    by rows.

    A wide or square matrix is gathered for each product. A tall one is turned first and is then cut by columns: the
    product with itself is a sum over the ranks, which the other two each all-reduce.
    """
    share = (ranks - 1) / ranks
    if rows > columns:
        return 0.0, 2 * share * columns**2, 2 * share * columns**2
    return share * rows * columns, share * rows**2, share * rows * columns


def muon_dtensor(rows: int, columns: int, ranks: int, rounds: int = ROUNDS) -> float:
    """Numbers that a rank sends in one step of ``torch.optim.Muon`` for a matrix under FSDP2."""
    return rounds * sum(muon_by_products(rows, columns, ranks))


def muon_owned(params: float, ranks: int) -> float:
    """Numbers that a rank sends where each matrix is put together on one rank and its update goes back in shards:
    2(N−1)/N² of ``params``, the mean over the ranks."""
    return 2 * (ranks - 1) / ranks**2 * params


def muon_across(params: float, hosts: int) -> float:
    """Numbers of these that leave one host, of all its ranks together: 2(H−1)/H² of ``params``."""
    return muon_owned(params, hosts)
