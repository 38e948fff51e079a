"""One notebook, several sizes: ``preset="laptop"`` by default, others for larger machines."""

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
