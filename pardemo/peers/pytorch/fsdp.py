"""torch's FSDP2 (``fully_shard``): parameters, gradients and optimizer states in shards, bf16 computation."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pardemo.zero import default_layers


def shard(module: nn.Module, reshard_after_forward: bool = True, bf16: bool = True) -> nn.Module:
    """``module`` with each of its layers, and itself, sharded over all ranks; in place, as FSDP2 works.

    The sharded parameters stay fp32, and are what the optimizer updates; they are gathered and computed with in bf16.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    for layer in (*default_layers(module), module):
        fully_shard(layer, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return module


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[torch.Tensor]]:
    """The tensors of each kind of model state that this rank keeps, between backward and step."""
    parameters: list[torch.Tensor] = list(module.parameters())
    return {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer states": [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()],
    }
