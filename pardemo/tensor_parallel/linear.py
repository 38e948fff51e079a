"""A linear layer cut by columns of W (its outputs) or by rows of W (its inputs), over t ranks.

The layer is Y = XW, and ``nn.Linear`` stores Wᵀ [out, in]: columns of W are rows of ``weight``.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import compat
from pardemo.collectives.decorators import first_derivative_only, not_compiled
from pardemo.tensor_parallel import exchange
from pardemo.tensor_parallel.full_layers import compare, linears
from pardemo.tensor_parallel.gradients import show_parts
from pardemo.tensor_parallel.module import GroupModule, Span
from pardemo.tensor_parallel.operators import (
    SEQUENCE,
    copy_to,
    gather_from,
    gather_sequence,
    positive,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
)
from pardemo.tensor_parallel.shards import Section, copied, part_of

_PARAMETERS = ("weight", "bias")


class _Column(torch.autograd.Function):
    """f and the linear layer in one, so that the way back can exchange and compute side by side.

    Backward: the input's gradient is summed over the ranks *while* the weight's gradient is computed. With sequence
    parallelism the input is this rank's tokens: they are gathered forward, only the shard is kept, and they are
    gathered once more, while the input's gradient is computed, for the weight's gradient (2205.05198 4.2.2).
    """

    @staticmethod
    def forward(ctx, group, x, weight, bias, sequence_parallel, overlap, what):
        ctx.group, ctx.overlap, ctx.what = group, overlap, what
        ctx.sequence = positive(x, SEQUENCE) if sequence_parallel else None
        _, wants_dx, wants_dw, *_ = ctx.needs_input_grad  # a frozen weight (LoRA) needs no input to be kept
        ctx.save_for_backward(x if wants_dw else None, weight if wants_dx else None)
        if sequence_parallel:
            x = exchange.all_gather(x, group, ctx.sequence)  # [b, s/t, in] -> [b, s, in]
        y = F.linear(_rows(x), weight, bias)
        # F.linear of three dimensions may return a view, which nobody could change in place behind this function.
        return compat.unsafe_view(y, (*x.shape[:-1], y.shape[-1]))  # [b, s, out/t]

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        _, wants_dx, wants_dw, wants_db, *_ = ctx.needs_input_grad
        start = exchange.start if ctx.overlap else _at_once
        gathered = dx = dw = db = None
        if ctx.sequence is not None and wants_dw:
            gathered = start(exchange.all_gather, x, ctx.group, ctx.sequence)  # [b, s/t, in] to [b, s, in]
        if wants_dx:
            partial = dy @ weight  # [b, s, out/t] to [b, s, in], this rank's summand
            if gathered is not None:
                x, gathered = gathered(), None  # one exchange of a group at a time
            if ctx.sequence is None:
                dx = start(exchange.all_reduce_in_place, partial, ctx.group, "sum", ctx.what)
            else:
                dx = start(exchange.reduce_scatter, partial, ctx.group, ctx.sequence, ctx.what)
        if wants_dw:
            x = x if gathered is None else gathered()
            dw = _rows(dy).t() @ _rows(x)  # [out/t, in]
        if wants_db:
            db = _rows(dy).sum(0)  # [out/t]
        return None, dx() if wants_dx else None, dw, db, None, None, None


class ColumnParallelLinear(GroupModule):
    """This rank's outputs of a linear layer: [Y⁽⁰⁾, Y⁽¹⁾, …] = [XW⁽⁰⁾, XW⁽¹⁾, …]. Forward sends nothing.

    Input [..., in], the same on every rank; output [..., out/t], or [..., out] with ``gather_output``.

    Args:
        linear: the full layer, or several that share their input (gate and up; query, key and value): they become
            one matrix multiplication, and one all-reduce on the way back.
        group: the tensor-parallel ranks; the default group when None.
        sections: outputs of each part of a fused layer that is to be cut on its own (query, key, value); their sum is
            ``linear.out_features``. By default one part per linear.
        copies: for each section, how many neighbouring ranks hold the same part of it (key and value heads that are
            fewer than the ranks). Their gradients are summed: one all-reduce more on the way back, of the full
            gradients of these sections.
        gather_output: put the outputs of all ranks together again.
        sequence_parallel: the input is this rank's tokens [..., sequence/t, in]; they are gathered here.
        keep_gathered: with ``sequence_parallel``, keep the gathered input for the backward pass: t times the memory,
            one all-gather less.
        overlap: exchange the input's gradient while the weight's is computed.

    Made by all ranks of the group together.

    Raises:
        ValueError: a part does not divide by the ranks, ``sections`` do not add up, the layers' inputs, dtypes or
            biases differ, or the ranks' full layers do.
        TypeError: a layer is not a plain ``nn.Linear``.
    """

    cut = ("weight", "bias")

    def __init__(
        self,
        linear: nn.Linear | Sequence[nn.Linear],
        group: dist.ProcessGroup | None = None,
        *,
        sections: Sequence[int] | None = None,
        copies: Sequence[int] | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
        overlap: bool = True,
    ):
        super().__init__(group)
        layers = linears(linear)
        _check_same_input(layers)
        self.in_features, self.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)
        sections = [layer.out_features for layer in layers] if sections is None else list(sections)
        if sum(sections) != self.out_features:
            parts = " + ".join(map(str, sections))
            raise ValueError(f"sections {parts} = {sum(sections)} are not the layer's {self.out_features} outputs")
        copies = [1] * len(sections) if copies is None else list(copies)
        if len(copies) != len(sections):
            raise ValueError(f"{len(copies)} numbers of copies were given for {len(sections)} sections")
        self._cuts = [Section.of(total, n, self.group) for total, n in zip(sections, copies, strict=True)]
        #: outputs of each section on this rank
        self.sections = [cut.here for cut in self._cuts]
        #: how many ranks hold the same part of each section
        self.copies = copies
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel
        self.keep_gathered, self.overlap = keep_gathered, overlap
        if gather_output and (len(sections) > 1 or max(copies) > 1):
            raise ValueError("gather_output would mix the sections of several ranks; gather each part itself")
        settings = {name: getattr(self, name) for name in ("gather_output", "sequence_parallel", "keep_gathered")}
        _compare(self, layers, sections=sections, copies=copies, **settings)
        self.weight = part_of([layer.weight for layer in layers], self._cuts, dim=0)  # [out/t, in]
        self.bias = None
        if layers[0].bias is not None:
            self.bias = part_of([layer.bias for layer in layers], self._cuts, dim=0)  # [out/t]
        show_parts(self)

    @not_compiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_input(x, self.in_features, self.weight)
        x, weight, bias = _autocast(x, *copied((self.weight, self.bias), self._cuts, self.group))
        if self.group.size() == 1:
            return F.linear(x, weight, bias)
        if self.sequence_parallel and self.keep_gathered:
            y = F.linear(gather_sequence(x, self.group), weight, bias)  # [b, s/t, in] to [b, s, out/t]
        else:
            what = f"the gradient of a column-parallel layer's input ({self.trained()})"
            y = _Column.apply(self.group, x, weight, bias, self.sequence_parallel, self.overlap, what)
        return gather_from(y, self.group) if self.gather_output else y

    def counted_here(self, parameter: nn.Parameter) -> list[Span]:
        each, rank = parameter.numel() // sum(self.sections), dist.get_rank(self.group)
        ends = [each * end for end in accumulate(self.sections)]
        spans = zip([0, *ends[:-1]], ends, strict=True)
        return [span for span, copies in zip(spans, self.copies, strict=True) if rank % copies == 0]

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {sum(self.sections)} of {self.out_features}, bias={self.bias is not None}"


class RowParallelLinear(GroupModule):
    """A linear layer over this rank's inputs: Y = Σᵢ X⁽ⁱ⁾W⁽ⁱ⁾, one all-reduce forward, the bias added once, after it.

    Input [..., in/t], as a :class:`ColumnParallelLinear` leaves it; output [..., out], the same on every rank.

    Args:
        linear: the full layer.
        group: the tensor-parallel ranks; the default group when None.
        input_is_whole: the input is [..., in] on every rank; take this rank's part of it.
        sequence_parallel: reduce-scatter the sum along the sequence: output [..., sequence/t, out], this rank's tokens.

    Made by all ranks of the group together.

    Raises:
        ValueError: the inputs do not divide by the ranks, or the ranks' full layers differ.
        TypeError: the layer is not a plain ``nn.Linear``.
    """

    cut = ("weight",)

    def __init__(
        self,
        linear: nn.Linear,
        group: dist.ProcessGroup | None = None,
        *,
        input_is_whole: bool = False,
        sequence_parallel: bool = False,
    ):
        super().__init__(group)
        (linear,) = linears(linear)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.input_is_whole, self.sequence_parallel = input_is_whole, sequence_parallel
        #: what else the ranks are to agree on when the layer's sum is taken: a block's frozen parameters
        self.beside = ""
        self.in_features_here = exchange.share(linear.in_features, self.group, "an input width")
        _compare(self, [linear], input_is_whole=input_is_whole, sequence_parallel=sequence_parallel)
        self.weight = part_of([linear.weight], [Section.of(linear.in_features, 1, self.group)], dim=1)  # [out, in/t]
        self.bias = None if linear.bias is None else _whole(linear.bias)  # [out]
        show_parts(self)

    @not_compiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.input_is_whole:
            _check_input(x, self.in_features, self.weight)
            x = scatter_to(x, self.group)  # [b, s, in] to [b, s, in/t]
        _check_input(x, self.in_features_here, self.weight)
        x, weight, bias = _autocast(x, self.weight, self.bias)
        # Two operators, not one: recomputing stops before an all-reduce whose result no backward needs.
        y = F.linear(x, weight)  # [b, s, out], a part of the sum
        what = f"a row-parallel layer's output ({self.trained()}{self.beside})"
        if self.sequence_parallel:
            y = reduce_scatter_sequence(y, self.group, what)  # [b, s/t, out]
            bias = None if bias is None else copy_to(bias, group=self.group)  # each rank adds it to its own tokens
        else:
            y = reduce_from(y, self.group, what)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"{self.in_features_here} of {self.in_features} -> {self.out_features}, bias={self.bias is not None}"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])  # [b, s, h] to [b·s, h]


def _at_once(collective, tensor, *args):
    result = collective(tensor, *args)
    return lambda: result


def _whole(full: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(full.detach().clone(), requires_grad=full.requires_grad)


def _compare(layer: GroupModule, full: Sequence[nn.Linear], **settings: object) -> None:
    """The ranks' full layers are the same, and trained or frozen alike."""
    names = [""] if len(full) == 1 else [f"{number}." for number in range(len(full))]
    tensors = {
        f"{n}{which}": getattr(whole, which) for n, whole in zip(names, full, strict=True) for which in _PARAMETERS
    }
    compare(type(layer).__name__, tensors, layer.group, **settings)


def _check_same_input(layers: Sequence[nn.Linear]) -> None:
    if not layers:
        raise ValueError("no linear layer was given")
    first = layers[0]
    for layer in layers[1:]:
        if layer.in_features != first.in_features:
            raise ValueError(
                f"layers that share their input need one width, not {first.in_features} and {layer.in_features}"
            )
        if (layer.bias is None) != (first.bias is None):
            raise ValueError("of layers that share their input, either all have a bias or none")
        same = layer.weight.dtype == first.weight.dtype and layer.weight.requires_grad == first.weight.requires_grad
        if not same or (first.bias is not None and layer.bias.requires_grad != first.bias.requires_grad):
            raise ValueError("layers that share their input need one dtype, and all be trained or all frozen")


def _check_input(x: torch.Tensor, width: int, weight: torch.Tensor) -> None:
    if x.shape[-1] != width:
        raise ValueError(f"the input's last dimension is {x.shape[-1]}, this rank's layer takes {width}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"the input is {x.dtype}, the layer's weight {weight.dtype}: convert one of them")


def _autocast(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """Inside ``torch.autocast`` what ``nn.Linear`` does by itself: operands in the lower precision, but for fp64."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *others
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, *others))
