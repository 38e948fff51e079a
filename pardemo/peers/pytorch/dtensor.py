"""torch's own tensor parallelism: DTensor with Colwise, Rowwise and SequenceParallel plans, on the plain modules."""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from pardemo.small_models import gpt as plain
from pardemo.world.rank import device


class Attention(nn.Module):
    """The plain attention with three layers for query, key and value: a plan cuts a fused one in the wrong places."""

    def __init__(self, attention: plain.Attention):
        super().__init__()
        self.head_dim, self.grouped = attention.head_dim, attention.heads != attention.kv_heads
        widths = [n * self.head_dim for n in (attention.heads, attention.kv_heads, attention.kv_heads)]
        weights, biases = (t.detach().split(widths) for t in (attention.qkv.weight, attention.qkv.bias))
        self.query, self.key, self.value = (_linear(w, b) for w, b in zip(weights, biases, strict=True))
        self.out = copy.deepcopy(attention.out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(y.transpose(1, 2).flatten(2))


def mesh(ranks: int) -> DeviceMesh:
    """All ranks of the job in one tensor-parallel dimension."""
    return init_device_mesh(device().type, (ranks,), mesh_dim_names=("tp",))


def mlp(module: plain.MLP, tp: DeviceMesh) -> nn.Module:
    """A copy with Colwise then Rowwise; input and output [batch, sequence, hidden], whole."""
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(copy.deepcopy(module), tp, plan)


def block(module: plain.Block, tp: DeviceMesh, sequence_parallel: bool = False) -> nn.Module:
    """A copy with the plan of torch's tensor-parallel tutorial; whole activations, or this rank's tokens.

    One input preparation per half, so that query, key and value share one all-reduce of the input's gradient.
    """
    copied: Any = copy.deepcopy(module)
    copied.attention = Attention(module.attention)
    tokens = Shard(1) if sequence_parallel else Replicate()
    gather = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),))
    rows = RowwiseParallel(output_layouts=tokens, use_local_output=not sequence_parallel)
    plan = {
        "attention": gather,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": rows,
        "mlp": gather,
        "mlp.first": ColwiseParallel(),
        "mlp.second": rows,
    }
    if sequence_parallel:
        shards = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(tokens,))
        plan |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel(), "": shards}
        copied = parallelize_module(copied, tp, plan)
        return parallelize_module(copied, tp, PrepareModuleOutput(output_layouts=tokens, desired_output_layouts=tokens))
    return parallelize_module(copied, tp, plan)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by the plain module's names (collective)."""
    gradients_by_name: dict[str, Any] = {name: _whole(p.grad) for name, p in module.named_parameters()}
    for kind in ("weight", "bias"):
        parts = [gradients_by_name.pop(f"attention.{part}.{kind}", None) for part in ("query", "key", "value")]
        if parts[0] is not None:
            gradients_by_name[f"attention.qkv.{kind}"] = torch.cat(parts)
    return gradients_by_name


def _whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer
