"""A run whose numbers are rounded otherwise: how far that moves each gradient is what a layout's may differ by.

As TTrace does it (arXiv 2506.09280): no fixed bound fits all parameters of a model in bf16, since rounding in a layer
moves the gradients of others by amounts that only the model knows.
"""

import zlib
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from pardemo import compat

#: Types whose rounding shows in gradients. fp32's is below what is tolerated anyway.
SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def moved(tensor: torch.Tensor, seed: str) -> torch.Tensor:
    """A tensor of a short type with each element moved by up to one unit of its last place; the same for a seed."""
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(seed.encode()))
    by = torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor.device) * 2 - 1
    return (tensor.float() * (1 + torch.finfo(tensor.dtype).eps * by)).to(tensor.dtype)


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
