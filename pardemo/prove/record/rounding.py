"""A run whose numbers are rounded otherwise: how far that moves each gradient is what a layout's may differ by.

As TTrace does it (arXiv 2506.09280): no fixed bound fits all parameters of a model in bf16, since rounding in a layer
moves the gradients of others by amounts that only the model knows.
"""

import zlib
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from pardemo import compat

#: Types whose rounding shows in gradients. That of fp32 is below what is tolerated anyway.
SHORT = {
    "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
#: Types in which nothing is added or multiplied: what is kept in them was cast, within a layer.
_CAST = (torch.float8_e4m3fn, torch.float8_e5m2)


def moved(tensor: torch.Tensor, seed: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor in a short type with each element moved by up to one unit of its last place; the same for a seed.

    Args:
        dtype: the short type, where the tensor is of a longer one.
    """
    dtype = dtype or tensor.dtype
    info = torch.finfo(dtype)
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(seed.encode()))
    by = torch.rand(tensor.shape, generator=generator, device="cpu", dtype=torch.float32).to(tensor.device) * 2 - 1
    moves = tensor.float() * (1 + info.eps * by)
    return moves.clamp(info.min, info.max).to(dtype) if dtype in _CAST else moves.to(dtype)


class Casts:
    """Notes casts to fp8 by ``Tensor.to`` while the block runs; ``rounded`` rounds them otherwise.

    Such a cast is within a layer, whose output is of another type. A scale that is found in a micro-batch is another
    one where micro-batches are, so that each number may be rounded otherwise.
    """

    def __init__(self, computed_in: set[str], rounded: bool):
        cast = torch.Tensor.to

        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            made = cast(tensor, *args, **kwargs)
            if made.dtype not in _CAST or made.dtype == tensor.dtype:
                return made
            computed_in.add(str(made.dtype).removeprefix("torch."))
            if rounded:
                with compat.replaced(torch.Tensor, "to", cast):
                    return moved(tensor, f"{made.dtype} {tuple(made.shape)}", made.dtype)
            return made

        self._to = compat.replaced(torch.Tensor, "to", to)

    def __enter__(self) -> "Casts":
        self._to.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._to.__exit__(None, None, None)


class Rounding:
    """Within the block, outputs of layers in bf16 or fp16 are rounded otherwise, and gradients in them.

    A layer is a module without others in it. A forward pass that is run again, for its activations, gets the same.
    """

    def __enter__(self) -> "Rounding":
        self._hook = register_module_forward_hook(self._ends)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or next(module.children(), None) is not None:
            return None
        seed = f"{type(module).__name__} {[tuple(p.shape) for p in module.parameters()]}"
        changed = compat.tree_map(lambda leaf: moved(leaf, seed) if _is_short(leaf) else leaf, output)
        return changed if any(_is_short(leaf) for leaf in compat.tree_leaves(output)) else None

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer's step: sums over ranks and micro-batches are rounded otherwise, too."""
        with torch.no_grad():
            for group in optimizer.param_groups:
                for number, parameter in enumerate(group["params"]):
                    if parameter.grad is not None and _is_short(parameter.grad):
                        parameter.grad.copy_(moved(parameter.grad, str(number)))


def _is_short(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in SHORT.values() and not hasattr(leaf, "placements")
