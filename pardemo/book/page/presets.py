"""Sets a notebook's size: ``preset="laptop"`` by default, others for larger machines, and any number of ranks."""

from typing import TypeVar

T = TypeVar("T")


def choose(preset: str, **options: T) -> T:
    """The option that belongs to ``preset``.

    >>> choose("laptop", laptop=8, gpus=256)
    8

    Raises:
        ValueError: a preset that this notebook does not have.
    """
    if preset not in options:
        raise ValueError(f"no preset {preset!r}; this notebook has: {', '.join(options)}")
    return options[preset]


def need_ranks(
    world_size: int, least: int = 1, multiple_of: int = 1, divides: int = 0, notebook: str = "this notebook"
) -> None:
    """Says so where a notebook cannot run with ``world_size`` ranks; ``pardemo run`` says it before anything runs.

    Args:
        divides: what the ranks share equally, such as the heads of an attention or the samples of a batch.

    Raises:
        ValueError: fewer ranks than ``least``, or a number that ``multiple_of`` does not divide or that does not
            divide ``divides``.
    """
    if world_size < least or world_size % multiple_of or divides % world_size:
        even = f" that {multiple_of} divides" if multiple_of > 1 else ""
        even += f" that divides {divides}" if divides else ""
        raise ValueError(f"{notebook} needs world_size of at least {least}{even}, not {world_size}")
