"""An MLP and a whole transformer block, cut first by columns, then by rows."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from pardemo.tensor_parallel import exchange
from pardemo.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pardemo.tensor_parallel.operators import copy_to


class ParallelMLP(nn.Module):
    """Z = Σ GeLU(XAᵢ)Bᵢ (1909.08053 §3): A by columns, so that each rank's activation needs nobody else's; B by rows.

    One all-reduce forward, one backward. Input and output [batch, sequence, hidden], or [batch, sequence/N, hidden]
    with ``sequence_parallel``.

    Args:
        first: the full layer A; or the pair (gate, up) of a gated MLP, activation(gate(x))·up(x).
        second: the full layer B.
        group: the tensor-parallel ranks; the default group when None.
        activation: element by element.
        sequence_parallel, keep_gathered, overlap: as in :class:`ColumnParallelLinear`.

    Raises:
        ValueError: the inner width does not divide by the ranks, or the layers do not fit one another.
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


class OnShards(nn.Module):
    """A module that all ranks hold whole, such as a norm, run on each rank's own tokens (sequence parallelism).

    Its parameters' gradients are parts of a sum over all tokens; they are all-reduced here, in one message, as they
    appear. Forgetting this leaves replicas that drift apart without a word.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module, self.group = module, exchange.group_of(group)

    def forward(self, *args, **kwargs):
        names, parameters = zip(*((n, p) for n, p in self.module.named_parameters() if p.requires_grad), strict=True)
        shared = copy_to(*parameters, group=self.group)
        shared = shared if isinstance(shared, tuple) else (shared,)
        return functional_call(self.module, dict(zip(names, shared, strict=True)), args, kwargs)


class ParallelBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): two all-reduces forward, two backward.

    Input and output [batch, sequence, hidden]. With ``sequence_parallel`` they are [batch, sequence/N, hidden] (see
    ``scatter_sequence``), everything between the layers too, and each all-reduce becomes a reduce-scatter and an
    all-gather.

    Args:
        norm_1, norm_2: the full norms, which every rank keeps.
        attention, mlp: built with the same group and the same ``sequence_parallel``.
        group: the tensor-parallel ranks; the default group when None.
        sequence_parallel: the norms run on this rank's tokens.
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
        super().__init__()
        if sequence_parallel:
            norm_1, norm_2 = OnShards(norm_1, group), OnShards(norm_2, group)
        self.norm_1, self.attention, self.norm_2, self.mlp = norm_1, attention, norm_2, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))
