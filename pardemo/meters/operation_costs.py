"""Counts the floating-point operations of an operation, and the bytes that it reads and writes."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pardemo import compat
from pardemo.meters.tensors import tensors_in


def _attention_flops(q, k, v, *args, **kwargs) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _attention_backward_flops(grad, q, k, v, *args, **kwargs) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *args, out_val: torch.Tensor, **kwargs) -> int:
    """Experts' products: each row of a [S, K] meets one of b [E, K, N]; a weight's gradient is [K, S] by [S, N]."""
    rows, inner = a.shape[-2:]
    return 2 * rows * inner * b.shape[-1]


def traffic(func: Any, args: Any, out: Any) -> list[int]:
    """Lists the bytes that an elementwise operation reads and writes: none for a view, a look-up's rows twice."""
    name = compat.op_schema(func).name
    if name in _IDLE:
        return []
    read, written = tensors_in(args), tensors_in(out)
    if compat.op_schema(func).is_mutable:
        written = written or _changed_in_place(func, args)  # a fused optimizer returns nothing
    else:
        read_from = {id(tensor.untyped_storage()) for tensor in read}
        written = [tensor for tensor in written if id(tensor.untyped_storage()) not in read_from]
        if not written:
            return []
    if name in _LOOK_UPS:
        return 2 * [*map(memory_bytes, written)]
    return [*map(memory_bytes, read), *map(memory_bytes, written)]


def _changed_in_place(func: Any, args: Any) -> list[torch.Tensor]:
    changed = [arg for arg, declared in zip(args, compat.op_schema(func).arguments, strict=False) if declared.is_write]
    return tensors_in(changed)


def memory_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor in memory: of an expanded one fewer than its elements would have."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


_IDLE = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::detach"}
_LOOK_UPS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::select"}

#: What torch's FlopCounterMode counts, and what it leaves out: attention on the CPU, experts.
FLOPS = {
    **flop_registry,
    compat.grouped_mm: _grouped_flops,
    compat.attention_cpu: _attention_flops,
    compat.attention_cpu_backward: _attention_backward_flops,
}

_ATEN = torch.ops.aten
#: The operators that a linear layer and fused attention end in, on CPUs and GPUs.
LINEAR = (_ATEN.mm.default, _ATEN.addmm.default)
ATTENTION = (
    compat.attention_cpu.default,
    compat.attention_flash.default,
    compat.attention_efficient.default,
    compat.attention_cudnn.default,
)


class MatmulCounter(FlopCounterMode):
    """Counts the operations of the matrix multiplications in its block: ``flops``. All scores count, hidden or not."""

    def __init__(self):
        known = {
            compat.attention_cpu: lambda *shapes, **kwargs: sdpa_flop_count(*shapes[:3]),  # query, key, value
            # gradient, query, key, value
            compat.attention_cpu_backward: lambda *shapes, **kwargs: sdpa_backward_flop_count(*shapes[:4]),
        }
        super().__init__(display=False, custom_mapping=known)

    @property
    def flops(self) -> int:
        return self.get_total_flops()
