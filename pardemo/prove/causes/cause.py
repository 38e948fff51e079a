"""What a cause is, and when two tensors are the same to it."""

from collections.abc import Sequence
from typing import Protocol

import torch

from pardemo.prove.facts import Facts, Pair
from pardemo.prove.record.facts import Step


class Cause(Protocol):
    """Looks at parameters that are wrong together; a sentence where it explains them all, else None."""

    name: str

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None: ...


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float, scale: float | None = None) -> bool:
    """Whether two tensors are the same up to a part of the second's norm."""
    size = float(b.double().norm()) if scale is None else scale
    return float((a.double() - b.double()).norm()) <= tolerance * max(size, 1e-300)


def close_enough(facts: Facts) -> float:
    """What a predicate takes for the same: ten times what a comparison does, since it computes with both."""
    return facts.tolerance * 10
