"""An MLP and a whole transformer block, cut first by columns, then by rows."""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from pardemo.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pardemo.tensor_parallel.module import GroupModule
from pardemo.tensor_parallel.operators import copy_to


class ParallelMLP(nn.Module):
    """Z = Σ GeLU(XAᵢ)Bᵢ (1909.08053 §3): A by columns, so that each rank's GeLU needs nobody else's; B by rows.

    One all-reduce forward, one backward. Input and output [batch, sequence, hidden], or [batch, sequence/N, hidden]
    with ``sequence_parallel``.

    Args:
        first: the full layer A; or the pair (gate, up) of a gated MLP, activation(gate(x))·up(x).
        second: the full layer B.
        group: the tensor-parallel ranks; the default group when None.
        activation: element by element, without parameters of its own.
        sequence_parallel, keep_gathered, overlap: as in :class:`ColumnParallelLinear`.

    Raises:
        ValueError: the inner width does not divide by the ranks, the layers do not fit one another, or the
            activation has parameters (each rank would train its own).
    """

    def __init__(
        self,
        first: nn.Linear | Sequence[nn.Linear],
        second: nn.Linear,
        group: dist.ProcessGroup | None = None,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
        overlap: bool = True,
    ):
        super().__init__()
        layers = [first] if isinstance(first, nn.Linear) else list(first)
        if len(layers) not in (1, 2) or any(layer.out_features != second.in_features for layer in layers):
            widths = " and ".join(str(layer.out_features) for layer in layers)
            raise ValueError(f"the first layer's outputs, {widths}, are not the second's {second.in_features} inputs")
        if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
            raise ValueError(f"{type(activation).__name__} has parameters, which each rank would train for itself")
        self.activation, self.gated = activation, len(layers) == 2
        shared = {"sequence_parallel": sequence_parallel, "keep_gathered": keep_gathered, "overlap": overlap}
        self.first = ColumnParallelLinear(layers, group, **shared)
        self.second = RowParallelLinear(second, group, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)
        if self.gated:
            gate, up = inner.chunk(2, -1)
            return self.second(self.activation(gate) * up)
        return self.second(self.activation(inner))


def on_shards(module: nn.Module, group: dist.ProcessGroup | None, *args: torch.Tensor) -> torch.Tensor:
    """``module(*args)`` for one that all ranks hold whole, such as a norm, on each rank's own tokens.

    Its parameters' gradients are then parts of a sum over all tokens: they are all-reduced here, in one message, as
    they appear. Forgetting this leaves replicas that drift apart without a word (arXiv 2205.05198, §4.2.2).
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        return module(*args)
    shared = copy_to(*trained.values(), group=group)
    shared = shared if isinstance(shared, tuple) else (shared,)
    return functional_call(module, dict(zip(trained, shared, strict=True)), args)


class ParallelBlock(GroupModule):
    """x + attention(norm(x)), then x + mlp(norm(x)): two all-reduces forward, two backward.

    Input and output [batch, sequence, hidden]. With ``sequence_parallel`` they are [batch, sequence/N, hidden] (see
    ``scatter_sequence``), everything between the layers too, and each all-reduce becomes a reduce-scatter and an
    all-gather.

    Args:
        norm_1, norm_2: the full norms; every rank keeps a copy.
        attention, mlp: parallel layers of the same group and with the same ``sequence_parallel``.
        group: the tensor-parallel ranks; the default group when None.
        sequence_parallel: the norms run on this rank's tokens.

    Raises:
        ValueError: a layer inside has another group or another ``sequence_parallel``.
    """

    def __init__(
        self,
        norm_1: nn.Module,
        attention: nn.Module,
        norm_2: nn.Module,
        mlp: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ):
        super().__init__(group)
        for layer in (*attention.modules(), *mlp.modules()):
            if not isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                continue
            if layer.group is not self.group:
                raise ValueError("the block and the layers in it were given different groups")
            if layer.sequence_parallel != sequence_parallel:
                theirs = layer.sequence_parallel
                raise ValueError(f"sequence_parallel is {sequence_parallel} for the block, {theirs} for a layer in it")
        self.norm_1, self.norm_2 = copy.deepcopy(norm_1), copy.deepcopy(norm_2)
        self.attention, self.mlp, self.sequence_parallel = attention, mlp, sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self._norm(self.norm_1, x))
        return x + self.mlp(self._norm(self.norm_2, x))

    def _norm(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return on_shards(norm, self.group, x) if self.sequence_parallel else norm(x)
