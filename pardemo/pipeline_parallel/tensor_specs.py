"""What a stage hands on looks like: told to the next stage once per step, ahead of the first micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

#: What a tensor between stages can be made of; a dtype's place in here is what travels.
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MAX_DIMENSIONS = 8
COLUMNS = 3 + MAX_DIMENSIONS  # dtype, whether it has a gradient, dimensions, sizes


@dataclass(frozen=True)
class TensorSpec:
    """One tensor's shape and dtype, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} {'with' if self.has_gradient else 'without'} a gradient"


def outputs_of(stage: int, output: object) -> tuple[torch.Tensor, ...]:
    """A stage's output as a tuple of tensors.

    Raises:
        TypeError: it is something else, its elements cannot travel, or it has too many dimensions.
    """
    outputs = output if isinstance(output, tuple) else (output,)
    for one in outputs:
        if not isinstance(one, torch.Tensor):
            kind = f"a tuple with a {type(one).__name__} in it" if isinstance(output, tuple) else type(one).__name__
            raise TypeError(f"stage {stage} hands on {kind}: return a tensor, or a tuple of tensors")
        if one.dtype not in DTYPES or one.dim() > MAX_DIMENSIONS:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(
                f"stage {stage} hands on {one.dtype} of shape {tuple(one.shape)}: stages exchange real numbers and "
                f"truth values ({names}) of at most {MAX_DIMENSIONS} dimensions"
            )
    if not outputs:
        raise TypeError(f"stage {stage} hands on an empty tuple: return a tensor, or a tuple of tensors")
    return outputs


def encode(forms: Sequence[TensorSpec]) -> torch.Tensor:
    """Forms as numbers [tensors, COLUMNS]."""
    rows = [[DTYPES.index(f.dtype), f.has_gradient, len(f.shape), *f.shape] for f in forms]
    return torch.tensor([row + [0] * (COLUMNS - len(row)) for row in rows], dtype=torch.int32)


def decode(numbers: torch.Tensor) -> tuple[TensorSpec, ...]:
    """The inverse of :func:`encode`."""
    rows = numbers.tolist()
    return tuple(
        TensorSpec(tuple(sizes[:dimensions]), DTYPES[dtype], bool(grad)) for dtype, grad, dimensions, *sizes in rows
    )


def words(forms: Sequence[TensorSpec]) -> str:
    """Forms for a message."""
    return ", ".join(map(str, forms))
