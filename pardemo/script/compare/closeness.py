"""Compares two tensors to rounding: element by element, or by the norm of their difference."""

import torch


def within_rounding(a: torch.Tensor, b: torch.Tensor, tolerance: float, scale: torch.Tensor | None = None) -> bool:
    """Whether no element differs by more than a part of the second's largest number, or of that of ``scale``."""
    largest = b if scale is None else scale
    return a.shape == b.shape and (
        not b.numel() or bool(((a - b).abs() <= tolerance * largest.abs().max().item()).all())
    )


def nearly_equal(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether tensors of any type are the same to rounding, or have NaN in the same places; whole numbers exactly."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return within_rounding(a, b, tolerance) or bool(torch.equal(a.isnan(), b.isnan()) and a.isnan().any())


def near_in_norm(a: torch.Tensor, b: torch.Tensor, tolerance: float, scale: float | None = None) -> bool:
    """Whether the norm of the difference is at most a part of the second's norm, or of ``scale``."""
    size = float(b.double().norm()) if scale is None else scale
    return float((a.double() - b.double()).norm()) <= tolerance * max(size, 1e-300)
