"""A world of fake ranks and fake tensors, in which the real engines run: sizes are right, values are not there.

``torch``'s fake process group answers every collective at once; FakeTensorMode (torch's own) keeps shapes, types and
storages. What needs a value gets one here: a norm is 1, no gradient overflows, and so many positions have a label.
"""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pardemo.planner.job import Job

#: Which argument is the whole tensor, of which gloo makes a copy of its own.
_GLOO_COPIES = {torch.ops.c10d._allgather_base_.default: 0, torch.ops.c10d._reduce_scatter_base_.default: 1}


class Values(TorchDispatchMode):
    """Stands in where code asks a fake tensor for its values; entered last, so that what it makes is recorded.

    On CPU ranks an all-gather and a reduce-scatter take another copy of the whole while they last: gloo's own.
    """

    def __init__(self, job: Job):
        super().__init__()
        self.labelled = max(1, round(job.labels * job.batch * (job.sequence - 1)))
        self.gloo = not job.on_gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "prim" and any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self.gloo and (whole := _GLOO_COPIES.get(func)) is not None:
            torch.empty_like(args[whole])  # for as long as the call takes
        if not (args and isinstance(args[0], FakeTensor)):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            if kind in (torch.bool, torch.uint8):
                return False  # no gradient overflows
            return 1.0 if kind.is_floating_point else 1
        if func is torch.ops.aten.nonzero.default:
            return torch.empty(self.labelled, args[0].dim(), dtype=torch.int64, device=args[0].device)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def world(job: Job) -> Iterator[FakeTensorMode]:
    """Within the block this process is rank 0 of ``job.ranks``, and tensors are fake.

    Raises:
        RuntimeError: this process already belongs to a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process of its own, not one of a process group's")
    with contextlib.ExitStack() as stack:
        if job.engine != "plain":
            stack.enter_context(_ranks(job.ranks))
        stack.enter_context(mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None))
        if job.on_gpu:
            stack.enter_context(mock.patch("pardemo.baichuan2.attention.Pattern.attend", _attend_on_gpu))
        if job.stage is not None:
            from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

            # other ranks' answers, which the fake process group does not give
            stack.enter_context(mock.patch.object(coordinator, "assert_ints_same_as_other_ranks", return_value=None))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


@contextlib.contextmanager
def _ranks(size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)}
    with mock.patch.dict(os.environ, told):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()
            _forget_deepspeed()


def _forget_deepspeed() -> None:
    """DeepSpeed keeps groups of a process group that is gone."""
    import sys

    if "deepspeed" in sys.modules:
        from deepspeed import comm
        from deepspeed.utils import groups

        comm.comm.cdb = None
        for name, value in vars(groups).items():
            if name.startswith("_") and name.isupper() and not isinstance(value, str):
                setattr(groups, name, {} if isinstance(value, dict) else None)


def no_moves() -> contextlib.AbstractContextManager:
    """Parameters are where they belong and of the right type: an engine's ``.to(device)`` would swap fake tensors."""
    return mock.patch.object(nn.Module, "_apply", lambda self, fn, recurse=True: self)


def _attend_on_gpu(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flex: bool = False) -> torch.Tensor:
    """FlexAttention, which a GPU runs, keeps what causal attention without a mask keeps: q, k, v, out, log-sum-exp."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=self.queries > 1)
