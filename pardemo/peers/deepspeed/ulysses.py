"""DeepSpeed's own sequence parallelism, ``DistributedAttention``, with our shapes."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.groups import group_of
from pardemo.peers.deepspeed.engine import (
    deepspeed,  # before anything else of DeepSpeed's: it says that there is no GPU
    prepare,
)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup | None = None, *, causal: bool = True
) -> torch.Tensor:
    """:func:`pardemo.context_parallel.ulysses_attention` by DeepSpeed: [b, h, S/N, d], tokens in the plain order."""
    prepare()
    deepspeed.init_distributed(dist_init_required=False, verbose=False)  # its own handle of the group that is there
    from deepspeed.sequence.layer import DistributedAttention

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # [b, S, h/N, d]
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    distributed = DistributedAttention(local, group_of(group), scatter_idx=2, gather_idx=1)
    return distributed(*(each.transpose(1, 2).contiguous() for each in (q, k, v)), 0).transpose(1, 2)
