"""A world of fake ranks and fake tensors, in which the real engines run: sizes are right, values are not there.

``torch``'s fake process group answers every collective at once; FakeTensorMode (torch's own) keeps shapes, types and
storages. What needs a value gets one here: a norm is 1, no gradient overflows, and so many positions have a label.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pardemo.planner.job import Job

#: Where DTensor finds the shape of a result.
_META = "_propagate_tensor_meta_non_cached"
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
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _attention_on_gpu))
            stack.enter_context(mock.patch.object(F, "dropout", _dropout_on_gpu))
        if job.stage is not None:
            from deepspeed.runtime.zero import parameter_offload
            from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

            # other ranks' answers, which the fake process group does not give
            stack.enter_context(mock.patch.object(coordinator, "assert_ints_same_as_other_ranks", return_value=None))
            for module in (coordinator, parameter_offload):
                stack.enter_context(mock.patch.object(module, "set", _InOrder, create=True))
        if job.engine == "fsdp2":
            stack.enter_context(mock.patch.object(ShardingPropagator, _META, _without_memory(_META)))
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


class _InOrder(dict):
    """A set in the order of insertion: DeepSpeed gathers and lets go in the order of real ones, which is by chance."""

    def __init__(self, members: Iterable = ()):
        super().__init__(dict.fromkeys(members))

    def add(self, member: object) -> None:
        self[member] = None

    def discard(self, member: object) -> None:
        self.pop(member, None)

    def update(self, members: Iterable) -> None:
        super().update(dict.fromkeys(members))


def _without_memory(name: str) -> Callable:
    """DTensor asks an operation for its result's shape, on fake whole tensors of its own: those are no memory."""
    own = getattr(ShardingPropagator, name)

    def propagate(*args: object) -> object:
        with _disable_current_modes():
            return own(*args)

    return propagate


def _attend_on_gpu(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flex: bool = False) -> torch.Tensor:
    """FlexAttention, which a GPU runs, keeps what causal attention without a mask keeps: q, k, v, out, log-sum-exp."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=self.queries > 1)


_ATTENTION = F.scaled_dot_product_attention
_DROPOUT = F.dropout


def _attention_on_gpu(query, key, value, *args, dropout_p: float = 0.0, **kwargs) -> torch.Tensor:
    """A GPU's kernels draw dropout's mask anew in the backward pass; the CPU's know no dropout and keep all scores."""
    return _ATTENTION(query, key, value, *args, **kwargs)


def _dropout_on_gpu(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """A GPU's kernel keeps a byte an element, whether it stays; the CPU multiplies by a mask of the input's type."""
    if not training or inplace or not 0 < p < 1:
        return _DROPOUT(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]
