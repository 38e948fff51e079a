"""A linear layer cut by columns of W (its outputs) or by rows of W (its inputs), over t ranks.

The layer is Y = XW, and ``nn.Linear`` stores Wᵀ [out, in]: columns of W are rows of ``weight``.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import compat
from pardemo.collectives.decorators import first_derivative_only, not_compiled
from pardemo.groups import divide
from pardemo.tensor_parallel import exchange
from pardemo.tensor_parallel.full_layers import compare_layers, linears
from pardemo.tensor_parallel.gradients import mark_part
from pardemo.tensor_parallel.module import GroupModule
from pardemo.tensor_parallel.operators import (
    SEQUENCE,
    copy_to,
    positive,
    reduce_from,
    reduce_scatter_sequence,
)


class _Column(torch.autograd.Function):
    """f and the linear layer in one, so that the way back can exchange and compute side by side.

    Backward: the input's gradient is summed over the ranks *while* the weight's gradient is computed. With sequence
    parallelism the input is this rank's tokens: they are gathered forward, only the shard is kept, and they are
    gathered once more, while the input's gradient is computed, for the weight's gradient (2205.05198 4.2.2).
    """

    @staticmethod
    def forward(ctx, group, x, weight, bias, sequence_parallel):
        ctx.group = group
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
        gathered = dx = dw = db = None
        if ctx.sequence is not None and wants_dw:
            gathered = exchange.start(exchange.all_gather, x, ctx.group, ctx.sequence)  # [b, s/t, in] to [b, s, in]
        if wants_dx:
            partial = dy @ weight  # [b, s, out/t] to [b, s, in], this rank's summand
            if gathered is not None:
                x, gathered = gathered(), None  # one exchange of a group at a time
            if ctx.sequence is None:
                dx = exchange.start(exchange.all_reduce_in_place, partial, ctx.group)
            else:
                dx = exchange.start(exchange.reduce_scatter, partial, ctx.group, ctx.sequence)
        if wants_dw:
            x = x if gathered is None else gathered()
            dw = _rows(dy).t() @ _rows(x)  # [out/t, in]
        if wants_db:
            db = _rows(dy).sum(0)  # [out/t]
        return None, dx() if wants_dx else None, dw, db, None


class _SumCopies(torch.autograd.Function):
    """A weight and a bias as they are; backward, ``rows`` of which other ranks have a copy get the sum of gradients.

    The ranks' gradients of these rows are put beside each other and summed over the whole group, in one message: every
    holder ends with the same bits. Two key heads (``parts``) on four ranks::

        rank 0   [ a | 0 ]                         rank 0   a + b
        rank 1   [ b | 0 ]     all-reduce          rank 1   a + b
        rank 2   [ 0 | c ]    ------------>        rank 2   c + d
        rank 3   [ 0 | d ]   [ a+b | c+d ]         rank 3   c + d
    """

    @staticmethod
    def forward(ctx, group, rows, parts, *tensors):
        ctx.group, ctx.rows, ctx.parts = group, rows, parts
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @first_derivative_only
    def backward(ctx, *gradients):
        flat = torch.cat([g[ctx.rows].reshape(-1) for g in gradients])  # [numel]
        table, part = flat.new_zeros(ctx.parts, flat.numel()), dist.get_rank(ctx.group) * ctx.parts // ctx.group.size()
        table[part] = flat
        total = exchange.all_reduce_in_place(table, ctx.group)[part]
        results = [g.clone() for g in gradients]
        for result, rows in zip(results, total.split([g[ctx.rows].numel() for g in gradients]), strict=True):
            result[ctx.rows] = rows.view(-1, *result.shape[1:])
        return None, None, None, *results


class ColumnParallelLinear(GroupModule):
    """This rank's outputs of a linear layer: [Y⁽⁰⁾, Y⁽¹⁾, …] = [XW⁽⁰⁾, XW⁽¹⁾, …]. Forward sends nothing.

    Input [..., in], the same on every rank; output [..., out/t].

    Args:
        linear: the full layer, or several that share their input (gate and up; query, key and value): they become
            one matrix multiplication, and one all-reduce on the way back.
        group: the tensor-parallel ranks; the default group when None.
        sections: outputs of each part of a fused layer that is to be cut on its own (query, key, value); their sum is
            ``linear.out_features``. By default one part per linear.
        copies: for each section, how many neighbouring ranks hold the same part of it: 1, or one other number (key and
            value heads that are fewer than the ranks). Their gradients are summed: one all-reduce more on the way back,
            of the full gradients of these sections.
        sequence_parallel: the input is this rank's tokens [..., sequence/t, in]; they are gathered here.

    Made by all ranks of the group together.

    Raises:
        ValueError: a part does not divide by the ranks, ``sections`` do not add up, the layers' dtypes or biases
            differ, or the ranks' full layers do.
        TypeError: a layer is not a plain ``nn.Linear``.
    """

    def __init__(
        self,
        linear: nn.Linear | Sequence[nn.Linear],
        group: dist.ProcessGroup | None = None,
        *,
        sections: Sequence[int] | None = None,
        copies: Sequence[int] | None = None,
        sequence_parallel: bool = False,
    ):
        super().__init__(group)
        layers = linears(linear)
        self.in_features, self.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)
        sections = [layer.out_features for layer in layers] if sections is None else list(sections)
        if sum(sections) != self.out_features:
            raise ValueError(f"sections {sections} add up to {sum(sections)}, not to {self.out_features} outputs")
        #: how many ranks hold the same part of each section
        self.copies = [1] * len(sections) if copies is None else list(copies)
        ranks, most = self.group.size(), max(self.copies)
        if len(self.copies) != len(sections) or ranks % most or {1, most} < set(self.copies):
            raise ValueError(f"copies {self.copies}: for each of {len(sections)} sections 1, or a divisor of {ranks}")
        #: outputs of each section on this rank
        self.sections = [
            divide(total * n, self.group, "an output width") for total, n in zip(sections, self.copies, strict=True)
        ]
        self.sequence_parallel = sequence_parallel
        _compare_linears(self, layers, sections=sections, copies=self.copies, sequence_parallel=sequence_parallel)
        rank = dist.get_rank(self.group)

        def part(full: Sequence[torch.Tensor]) -> nn.Parameter:
            """This rank's rows of every section, one section after the other."""
            stacked = full[0].detach() if len(full) == 1 else torch.cat([tensor.detach() for tensor in full])
            pieces = stacked.split(sections)
            shards = [piece.chunk(ranks // n)[rank // n] for piece, n in zip(pieces, self.copies, strict=True)]
            return nn.Parameter(torch.cat(shards), requires_grad=full[0].requires_grad)

        self.weight = part([layer.weight for layer in layers])  # [out/t, in]
        self.bias = None if layers[0].bias is None else part([layer.bias for layer in layers])  # [out/t]
        self.mark_parts()

    def mark_parts(self) -> None:
        ends, rank = [0, *accumulate(self.sections)], dist.get_rank(self.group)
        spans = [span for span, n in zip(pairwise(ends), self.copies, strict=True) if rank % n == 0]
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                row = parameter.numel() // ends[-1]
                mark_part(parameter, self.group, 0, tuple((row * first, row * end) for first, end in spans))

    @not_compiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight, bias = _autocast(x, *self._with_summed_gradients())
        if self.group.size() == 1:
            return F.linear(x, weight, bias)
        return _Column.apply(self.group, x, weight, bias, self.sequence_parallel)

    def _with_summed_gradients(self) -> tuple[torch.Tensor | None, ...]:
        trained = [p for p in (self.weight, self.bias) if p is not None and p.requires_grad]
        if max(self.copies) == 1 or not trained:
            return self.weight, self.bias
        several = [n > 1 for n, width in zip(self.copies, self.sections, strict=True) for _ in range(width)]
        rows = torch.tensor(several, device=self.weight.device)  # [out/t]
        summed = _SumCopies.apply(self.group, rows, self.group.size() // max(self.copies), *trained)
        by_parameter = dict(zip(trained, summed, strict=True))
        return tuple(p if p is None else by_parameter.get(p, p) for p in (self.weight, self.bias))

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {sum(self.sections)} of {self.out_features}, bias={self.bias is not None}"


class RowParallelLinear(GroupModule):
    """A linear layer over this rank's inputs: Y = Σᵢ X⁽ⁱ⁾W⁽ⁱ⁾, one all-reduce forward, the bias added once, after it.

    Input [..., in/t], as a :class:`ColumnParallelLinear` leaves it; output [..., out], the same on every rank.

    Args:
        linear: the full layer.
        group: the tensor-parallel ranks; the default group when None.
        sequence_parallel: reduce-scatter the sum along the sequence: output [..., sequence/t, out], this rank's tokens.

    Made by all ranks of the group together.

    Raises:
        ValueError: the inputs do not divide by the ranks, or the ranks' full layers differ.
        TypeError: the layer is not a plain ``nn.Linear``.
    """

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False):
        super().__init__(group)
        (linear,) = linears(linear)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.sequence_parallel = sequence_parallel
        divide(linear.in_features, self.group, "an input width")
        _compare_linears(self, [linear], sequence_parallel=sequence_parallel)
        shard = linear.weight.detach().chunk(self.group.size(), 1)[dist.get_rank(self.group)]  # [out, in/t]
        self.weight = nn.Parameter(
            shard.clone(memory_format=torch.contiguous_format), requires_grad=linear.weight.requires_grad
        )
        self.bias = None
        if linear.bias is not None:  # [out], whole on every rank
            self.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=linear.bias.requires_grad)
        self.mark_parts()

    def mark_parts(self) -> None:
        mark_part(self.weight, self.group, 1)

    @not_compiled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight, bias = _autocast(x, self.weight, self.bias)
        # Two operators, not one: recomputing stops before an all-reduce whose result no backward needs.
        y = F.linear(x, weight)  # [b, s, out], a part of the sum
        if self.sequence_parallel:
            y = reduce_scatter_sequence(y, self.group)  # [b, s/t, out]
            bias = None if bias is None else copy_to(bias, group=self.group)  # each rank adds it to its own tokens
        else:
            y = reduce_from(y, self.group)
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} of {self.in_features} -> {self.out_features}, bias={self.bias is not None}"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])  # [b, s, h] to [b·s, h]


def _compare_linears(layer: GroupModule, full: Sequence[nn.Linear], **settings: object) -> None:
    """The ranks' full layers are the same, and trained or frozen alike."""
    tensors = {f"{number}.{name}": p for number, linear in enumerate(full) for name, p in linear.named_parameters()}
    compare_layers(type(layer).__name__, tensors, layer.group, **settings)


def _autocast(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """Inside ``torch.autocast`` what ``nn.Linear`` does by itself: operands in the lower precision, but for fp64."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *others
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, *others))
