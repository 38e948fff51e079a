"""torch's own ring attention, ``context_parallel``, with our shapes."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

from pardemo.world.rank import device


def own_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """This rank's of the whole sequences' tokens [b, S]: [b, S/N], as it cuts what it is given."""
    with _cut([mine := tokens.clone()], dim=1):
        return mine.clone()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of whole sequences [b, h, S, d], which it cuts itself: this rank's tokens [b, h, S/N, d].

    Raises:
        NotImplementedError: on CPU ranks; it cuts the fused kernels of GPUs alone.
    """
    q, k, v = q.detach().clone(), k.detach().clone(), v.detach().clone()
    with _cut((q, k, v), dim=2):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@contextlib.contextmanager
def _cut(tensors: Sequence[torch.Tensor], dim: int) -> Iterator[None]:
    """The block in which its ranks share sequences: it cuts the tensors in place, and makes them whole again."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is experimental, and says so
        with context_parallel(mesh, buffers=list(tensors), buffer_seq_dims=[dim] * len(tensors)):
            yield
