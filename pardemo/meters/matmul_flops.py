"""Operations of matrix multiplications. torch's own counter does not know the fused attention of CPUs: here it does."""

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from pardemo import compat

_ATEN = torch.ops.aten
_CPU, _CPU_BACK = compat.attention_cpu, compat.attention_cpu_backward
#: The operators that a linear layer and fused attention end in, on CPUs and GPUs.
LINEAR = (_ATEN.mm.default, _ATEN.addmm.default)
ATTENTION = (
    _CPU.default,
    compat.attention_flash.default,
    compat.attention_efficient.default,
    compat.attention_cudnn.default,
)


class MatmulCounter(FlopCounterMode):
    """Counts the operations of the matrix multiplications in its block: ``flops``. All scores count, hidden or not."""

    def __init__(self):
        known = {
            _CPU: lambda *shapes, **kwargs: sdpa_flop_count(*shapes[:3]),  # query, key, value
            _CPU_BACK: lambda *shapes, **kwargs: sdpa_backward_flop_count(*shapes[:4]),  # gradient, query, key, value
        }
        super().__init__(display=False, custom_mapping=known)

    @property
    def flops(self) -> int:
        return self.get_total_flops()
