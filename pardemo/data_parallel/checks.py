"""What a data-parallel wrapper refuses in a backward pass, because it would use one rank's gradients for the mean."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pardemo import compat


def has_hook_of_others(parameter: nn.Parameter) -> bool:
    """Whether somebody else than this package (engines, meters) registered a post-accumulate-grad hook."""
    hooks = compat.accumulate_hooks(parameter)
    return any(not (getattr(hook, "__module__", None) or "").startswith("pardemo.") for hook in hooks.values())


def hook_words(name: str) -> str:
    """Why such a hook on the parameter of that name is refused."""
    return (
        f"{name} has a hook by register_post_accumulate_grad_hook, which would see this rank's gradient and not the "
        "ranks' mean: remove it, and do what it does (an optimizer's step, a factor) after backward()"
    )


def refuse_a_graph_of_gradients() -> None:
    """From a hook on a parameter: RuntimeError in ``backward(create_graph=True)``, the mean has no graph behind it."""
    if torch.is_grad_enabled():  # in a backward pass: exactly where a graph of it is created
        raise RuntimeError(
            "backward(create_graph=True) on a data-parallel module: the ranks' mean has no graph, a second derivative "
            "of it would be wrong; take torch.autograd.grad(…, create_graph=True) of the loss, add what you make of it "
            "to the loss, and call backward() once"
        )


def is_taken_by_autograd_grad(parameters: Iterable[nn.Parameter]) -> bool:
    """Within a backward pass: whether ``torch.autograd.grad`` runs it, for one of these parameters."""
    for parameter in parameters:
        if parameter.requires_grad:
            try:
                compat.will_run(get_gradient_edge(parameter).node)
            except RuntimeError as error:  # so it answers for a leaf whose gradient is handed out and not accumulated
                return "autograd.grad" in str(error)
    return False
