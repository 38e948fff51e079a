"""An MLP and a whole transformer block, cut first by columns, then by rows."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import compat
from pardemo.groups import group_of
from pardemo.tensor_parallel.attention import ParallelAttention
from pardemo.tensor_parallel.full_layers import compare, linears, values_of
from pardemo.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from pardemo.tensor_parallel.module import GroupModule, on_shards, sections_of
from pardemo.tensor_parallel.probes import DimPart, name_of, numbers, probe
from pardemo.tensor_parallel.replicas import own_draws, refuse_draws, refuse_mixed_tokens


class ParallelMLP(nn.Module):
    """Z = Σᵢ GeLU(XW₁⁽ⁱ⁾)W₂⁽ⁱ⁾ (1909.08053 3): W₁ by columns, so that a rank's GeLU needs no other rank; W₂ by rows.

    One all-reduce forward, one backward. Input and output [batch, sequence, hidden], or [batch, sequence/t, hidden]
    with ``sequence_parallel``.

    Args:
        first: the full layer of W₁; or the pair (gate, up) of a gated MLP, activation(gate(x))·up(x).
        second: the full layer of W₂.
        group: the tensor-parallel ranks; the default group when None.
        activation: element by element, without parameters of its own, with dropout if you like. It is run once on
            all columns and on each rank's, and the results are compared.
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
        _check_activation(activation, second.in_features, group_of(group).size(), second.weight)
        self.activation, self.gated = activation, len(layers) == 2
        shared: dict[str, Any] = {
            "sequence_parallel": sequence_parallel,
            "keep_gathered": keep_gathered,
            "overlap": overlap,
        }
        self.first = ColumnParallelLinear(layers, group, **shared)
        self.second = RowParallelLinear(second, group, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x)  # [b, s, inner/t], of both gate and up where there are two
        if self.gated:
            gate, up = sections_of(inner, self.first.sections)  # [b, s, inner/t] each
            return self.second(own_draws(self.activation, gate) * up)  # [b, s, h]
        return self.second(own_draws(self.activation, inner))  # [b, s, h]


class ParallelBlock(GroupModule):
    """x + attention(norm(x)), then x + mlp(norm(x)): two all-reduces forward, two backward.

    Input and output [batch, sequence, hidden]. With ``sequence_parallel`` they are [batch, sequence/t, hidden] (see
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
            ranks, there is dropout on tokens that all ranks hold, or with ``sequence_parallel`` a norm that mixes
            tokens (batch norm), or drop path. The first training step: something draws random numbers on tokens that
            all ranks hold, or a parameter is frozen on some ranks alone.
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
        parts = {"norm_1": norm_1, "attention": attention, "norm_2": norm_2, "mlp": mlp}
        for name, part in parts.items():
            if sequence_parallel:
                refuse_mixed_tokens(name, part)
            else:
                _refuse_dropout(part)
        compare(
            "ParallelBlock",
            values_of(norm_1, "norm_1") | values_of(norm_2, "norm_2"),
            self.group,
            sequence_parallel=sequence_parallel,
        )
        self.norm_1, self.norm_2 = copy.deepcopy(norm_1), copy.deepcopy(norm_2)
        self.attention, self.mlp, self.sequence_parallel = attention, mlp, sequence_parallel
        if sequence_parallel and self.group.size() > 1:
            self._check_norms()
        self._watched = sequence_parallel or self.group.size() == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._tell_what_is_frozen()
        watches = self.training and not self._watched and not torch.compiler.is_compiling()
        for norm, part in (("norm_1", "attention"), ("norm_2", "mlp")):
            x = x + self._run(part, self._run(norm, x, watches), watches)  # [b, s, h], with sequence_parallel s/t
        self._watched = self._watched or watches
        return x

    def _run(self, name: str, x: torch.Tensor, watches: bool) -> torch.Tensor:
        part = getattr(self, name)
        if self.sequence_parallel and name.startswith("norm"):
            return on_shards(part, self.group, x)
        if not watches:
            return part(x)
        with refuse_draws(name, part, x.device):  # once, in training: a first step shows what draws
            return part(x)

    def _tell_what_is_frozen(self) -> None:
        """A parameter frozen on one rank alone would part the replicas: the next sum over the ranks compares."""
        frozen = [name for name, p in self.named_parameters() if not p.requires_grad]
        for layer in self.modules():
            if isinstance(layer, RowParallelLinear):
                layer.beside = f", in its block frozen: {', '.join(frozen)}" if frozen else ""

    def _check_norms(self) -> None:
        """ValueError where a norm gives a token something else among this rank's tokens than among all."""
        columns = next((layer for layer in self.attention.modules() if isinstance(layer, ColumnParallelLinear)), None)
        if columns is None or columns.weight.is_meta:
            return
        tokens = numbers(2, 2 * self.group.size(), columns.in_features, like=columns.weight)
        for name in ("norm_1", "norm_2"):
            answer = probe(getattr(self, name), [tokens], [DimPart(-2, 0, 2)], "a rank's tokens", training=True)
            if answer.objection:
                raise ValueError(
                    f"{name}, a {type(getattr(self, name)).__name__}, {answer.objection}: use a norm of each token, "
                    "such as LayerNorm, or sequence_parallel=False"
                )


def _check_activation(activation: Callable[[torch.Tensor], torch.Tensor], width: int, ranks: int, weight) -> None:
    """ValueError unless the activation makes of each rank's columns what it makes of them among all ``width``."""
    name = name_of(activation)
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        raise ValueError(f"{name} has parameters, which each rank would train for itself")
    if weight.is_meta or width % ranks:
        return
    columns, here = numbers(1, 2, width, like=weight), width // ranks
    for start in range(0, width, here):
        answer = probe(activation, [columns], [DimPart(-1, start, here)], f"columns {start} to {start + here - 1}")
        if answer.trained:
            raise ValueError(f"{name} uses parameters from outside, which each rank would train for itself")
        if answer.objection:
            raise ValueError(
                f"{name} does not work element by element: a rank would show it its own columns alone, and it "
                f"{answer.objection}"
            )


def _refuse_dropout(module: nn.Module) -> None:
    """Outside of attention and MLP every rank has the same tokens, and would draw a mask of its own."""
    if isinstance(module, ParallelAttention | ParallelMLP):
        return
    if isinstance(module, compat.DropoutNd) and module.p > 0:
        raise ValueError(
            f"{module} would drop other elements on every rank: put it into the attention's core or the activation, or "
            "use sequence_parallel=True"
        )
    for child in module.children():
        _refuse_dropout(child)
