"""What ``copy.deepcopy`` makes of a data-parallel wrapper: the model alone, as an average of weights (EMA) keeps it."""

import torch
from torch import nn


class LocalCopy(nn.Module):
    """A copy of a wrapper's model under the names that the wrapper gives it (``module.…``), without its exchanges.

    For averages of weights, teachers and target networks. It is not to be trained: nothing would average its gradients.
    To train a copy, wrap ``copy.deepcopy(wrapper.module)``.

    Raises:
        RuntimeError: from a forward in training mode with gradients, on a parameter that requires one.
    """

    def __init__(self, module: nn.Module, size: int):
        super().__init__()
        self.module, self.size = module, size

    def forward(self, *args, **kwargs):
        trains = self.training and torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters())
        if trains and self.size > 1:
            raise RuntimeError(
                "a deepcopy of a data-parallel wrapper averages no gradients: use it under no_grad(), in eval() or "
                "with requires_grad_(False); to train a copy, wrap its .module"
            )
        return self.module(*args, **kwargs)
