"""Provides fake ranks and fake tensors in which the real engines run: sizes are right, values are not there.

``torch``'s fake process group answers every collective at once; FakeTensorMode (torch's own) keeps shapes, types and
storages. What needs a value gets one here: a norm is 1, no gradient overflows, and so many positions have a label.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import compat, project
from pardemo.compat import FakeTensor, FakeTensorMode, ShardingPropagator
from pardemo.planner.job import RankJob

#: Where DTensor finds the shape of a result.
_META = "_propagate_tensor_meta_non_cached"
#: Which argument is the whole tensor, of which gloo makes a copy of its own.
_GLOO_COPIES = {compat.gather_base.default: 0, compat.scatter_base.default: 1}
NONE = object()


class Answers:
    """Values for code that asks a fake tensor for them; the recorder calls it, and records what an answer allocates.

    On CPU ranks an all-gather and a reduce-scatter take another copy of the whole while they last: gloo's own.
    """

    def __init__(self, job: RankJob):
        self.labelled = job.labelled
        self.gloo = not job.on_gpu

    def __call__(self, run_recorded: Callable, func: Any, args: tuple) -> Any:
        """Returns the result, or NONE where it is to run; ``run_recorded`` runs an operation and records it."""
        if self.gloo and (place := _GLOO_COPIES.get(func)) is not None:
            run_recorded(torch.ops.aten.empty_like.default, (args[place],))  # for as long as the call takes
        if func is compat.local_scalar.default and isinstance(args[0], FakeTensor):
            kind = args[0].dtype
            if kind in (torch.bool, torch.uint8):
                return False  # no gradient overflows
            return 1.0 if kind.is_floating_point else 1
        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            size = [self.labelled, args[0].dim()]
            return run_recorded(
                torch.ops.aten.empty.memory_format, (size,), dtype=torch.int64, device=args[0].fake_device
            )
        return NONE


@contextlib.contextmanager
def world(job: RankJob) -> Iterator[None]:
    """Within the block this process is rank 0 of ``job.ranks``, and tensors are fake.

    Raises:
        RuntimeError: this process already belongs to a process group.
    """
    from transformers import masking_utils

    from pardemo.baichuan2 import attention

    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process of its own, not one of a process group's")
    with contextlib.ExitStack() as stack:
        if job.engine != "plain":
            stack.enter_context(_ranks(job.ranks))
        stack.enter_context(compat.replaced(masking_utils, "find_packed_sequence_indices", _nothing))
        if job.on_gpu:
            stack.enter_context(compat.replaced(attention.Pattern, "attend", _attend_on_gpu))
            stack.enter_context(compat.replaced(F, "scaled_dot_product_attention", _attention_on_gpu))
            stack.enter_context(compat.replaced(F, "dropout", _dropout_on_gpu))
        if job.stage is not None:
            from deepspeed.runtime.engine import DeepSpeedEngine
            from deepspeed.runtime.zero import parameter_offload, stage3
            from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

            # it sends each parameter while it is built, in place: nothing that is counted
            stack.enter_context(compat.replaced(DeepSpeedEngine, "_broadcast_model", _nothing))
            # other ranks' answers, which the fake process group does not give
            stack.enter_context(compat.replaced(coordinator, "assert_ints_same_as_other_ranks", _nothing))
            for module in (coordinator, parameter_offload):
                stack.enter_context(compat.replaced(module, "set", _InOrder))
            stack.enter_context(compat.replaced(stage3, "reduce_scatter_coalesced", _by_rank(stage3)))
        if job.engine == "fsdp2":
            stack.enter_context(compat.replaced(ShardingPropagator, _META, _without_memory(_META)))
        stack.enter_context(_Fake(allow_non_fake_inputs=True))
        yield


def _nothing(*args: object, **kwargs: object) -> None:
    """Takes the place of functions that a dry run does not need."""


class _Fake(FakeTensorMode):
    """Torch's own in two thirds of its time: without its guard against being compiled, and with a shorter cache key."""

    __torch_dispatch__ = FakeTensorMode.dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def _prep_args_for_hash(self, result: list, args: Any, *rest: Any) -> None:
        """Adds to a key what results depend on, in one tuple for a tensor where torch walks through 17 fields."""
        if type(args) is dict:
            result.extend(args)
            args = args.values()
        else:  # where a list within the arguments ends
            result.append((type(args), len(args)))
        for arg in args:
            kind = type(arg)
            if kind in _PLAIN:
                result.append((kind, arg))
            elif kind is FakeTensor and arg.fake_mode is self and arg.constant is None and arg.layout is torch.strided:
                result.append((
                    arg.dtype, arg.shape, arg.stride(), arg.fake_device, arg.storage_offset(), arg.requires_grad,
                    arg.untyped_storage().nbytes(), arg.is_conj(), arg.is_neg(), arg.is_inference(),
                ))  # fmt: skip
            else:
                super()._prep_args_for_hash(result, (arg,), *rest)


_PLAIN = {int, float, bool, type(None), torch.dtype}


@contextlib.contextmanager
def _ranks(size: int) -> Iterator[None]:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)}
    with project.environment(variables):
        dist.init_process_group("fake", store=compat.FakeStore(), rank=0, world_size=size)
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
    return compat.replaced(nn.Module, "_apply", lambda self, fn, recurse=True: self)


def _by_rank(stage3: Any) -> Callable:
    """DeepSpeed's stage 3 lays gradients rank by rank, a view for each piece; here in one piece, of the same bytes."""
    original = stage3.reduce_scatter_coalesced

    def reduce_scatter(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
        ranks = dist.get_world_size(group)
        if len(tensors) == 1 or any(tensor.numel() % ranks for tensor in tensors):  # padding is memory too
            return original(tensors, group)
        joined, sizes = torch.cat([tensor.view(-1) for tensor in tensors]), [t.numel() // ranks for t in tensors]
        return [piece.view(-1) for piece in original([joined], group)[0].split(sizes)]

    return reduce_scatter


class _InOrder(dict):
    """A set in the order of insertion: DeepSpeed gathers and lets go in the order of real ones, which is by chance."""

    def __init__(self, members: Iterable = ()):
        super().__init__(dict.fromkeys(members))

    def add(self, member: object) -> None:
        self[member] = None

    def discard(self, member: object) -> None:
        self.pop(member, None)

    def update(self, members: Iterable) -> None:  # type: ignore[override]
        super().update(dict.fromkeys(members))


def _without_memory(name: str) -> Callable:
    """DTensor asks an operation for its result's shape, on fake whole tensors of its own: those are no memory."""
    original = getattr(ShardingPropagator, name)

    def propagate(*args: object) -> object:
        with compat.without_modes():
            return original(*args)

    return propagate


def _attend_on_gpu(
    self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flex: bool = False, blocks: bool = False
) -> torch.Tensor:
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
