"""The tensors in what a module returns: the backward pass comes back through them."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

import torch

from pardemo import compat
from pardemo.collectives.decorators import not_compiled


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """Those in tuples, lists, dicts, dataclasses and whatever torch's pytrees know, however deep."""
    for leaf in compat.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))


@not_compiled
def before_backward(output: object, call: Callable[[], object]) -> None:
    """``call()`` when the gradient of a tensor in ``output`` is there."""
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: call())


def hides(output: object) -> object | None:
    """An object in ``output`` that may have tensors where nobody looks for them; None where there is none."""
    plain = (torch.Tensor, str, bytes, int, float, complex, bool, type(None), type)
    return next(
        (leaf for leaf in compat.tree_leaves(output) if not isinstance(leaf, plain) and not is_dataclass(leaf)), None
    )
