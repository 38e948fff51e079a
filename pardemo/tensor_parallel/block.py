"""An MLP and a whole transformer block, cut first by columns, then by rows."""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from pardemo.tensor_parallel.attention import ParallelAttention
from pardemo.tensor_parallel.full import compare, linears, reaches_parameters, values_of
from pardemo.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pardemo.tensor_parallel.module import GroupModule, on_shards


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
        ValueError: the inner width does not divide by the ranks, the layers do not fit one another or differ between
            the ranks; the activation has parameters (each rank would train its own), or looks at several elements (it
            would see this rank's alone).
        TypeError: a layer is not a plain ``nn.Linear``.
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
        layers = linears(first)
        (second,) = linears(second)
        if len(layers) not in (1, 2) or any(layer.out_features != second.in_features for layer in layers):
            widths = " and ".join(str(layer.out_features) for layer in layers)
            raise ValueError(f"the first layer's outputs, {widths}, are not the second's {second.in_features} inputs")
        _check_activation(activation)
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


class ParallelBlock(GroupModule):
    """x + attention(norm(x)), then x + mlp(norm(x)): two all-reduces forward, two backward.

    Input and output [batch, sequence, hidden]. With ``sequence_parallel`` they are [batch, sequence/N, hidden] (see
    ``scatter_sequence``), everything between the layers too, and each all-reduce becomes a reduce-scatter and an
    all-gather.

    Args:
        norm_1, norm_2: the full norms; every rank keeps a copy.
        attention, mlp: parallel layers of the same group and with the same ``sequence_parallel``. Dropout belongs in
            an attention's core or in an activation, where each rank has elements of its own; elsewhere only with
            ``sequence_parallel``: ranks that hold the same tokens would each drop others of them.
        group: the tensor-parallel ranks; the default group when None.
        sequence_parallel: the norms run on this rank's tokens.

    Made by all ranks of the group together.

    Raises:
        ValueError: a layer inside has another group or another ``sequence_parallel``, the norms differ between the
            ranks, or there is dropout on tokens that all ranks hold.
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
        if not sequence_parallel:
            for layer in (norm_1, attention, norm_2, mlp):
                _refuse_dropout(layer)
        compare(
            "ParallelBlock",
            values_of(norm_1, "norm_1") | values_of(norm_2, "norm_2"),
            self.group,
            sequence_parallel=sequence_parallel,
        )
        self.norm_1, self.norm_2 = copy.deepcopy(norm_1), copy.deepcopy(norm_2)
        self.attention, self.mlp, self.sequence_parallel = attention, mlp, sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self._norm(self.norm_1, x))
        return x + self.mlp(self._norm(self.norm_2, x))

    def _norm(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return on_shards(norm, self.group, x) if self.sequence_parallel else norm(x)


def _check_activation(activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    name = getattr(activation, "__name__", type(activation).__name__)
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        raise ValueError(f"{name} has parameters, which each rank would train for itself")
    if reaches_parameters(activation):
        raise ValueError(f"{name} uses parameters from outside, which each rank would train for itself")
    probe = torch.linspace(-3, 3, 8).view(1, 1, 8)
    quiet = copy.deepcopy(activation).eval() if isinstance(activation, nn.Module) else activation
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        whole, halves = quiet(probe), [quiet(half) for half in probe.chunk(2, -1)]
    if whole.shape != probe.shape or not torch.allclose(whole, torch.cat(halves, -1), atol=1e-6):
        raise ValueError(f"{name} does not work element by element: a rank would show it its own columns alone")


def _refuse_dropout(module: nn.Module) -> None:
    """Outside of attention and MLP every rank has the same tokens, and would draw a mask of its own."""
    if isinstance(module, ParallelAttention | ParallelMLP):
        return
    if isinstance(module, _DropoutNd) and module.p > 0:
        raise ValueError(
            f"{module} would drop other elements on every rank: put it into the attention's core or the activation, or "
            "use sequence_parallel=True"
        )
    for child in module.children():
        _refuse_dropout(child)
