"""ZeRO-3: parameters exist in full only around their use. torch's FSDP2, whose messages go over pardemo's ring.

A step of three layers on one rank. G: a layer's parameters are gathered, [chunk] to [N · chunk]; R: its gradients are
reduced, [N · chunk] to [chunk]. Gathers run ahead by a layer, so that at most two layers are whole::

    computes        |   1   |   2   |   3   |    |   3   |   2   |    |   1   |
    sends        G1 | G2    | G3    |       | G3 | G2    | G1    | R3 |       | R2 R1
    whole           | 1 2   | 2 3   | 3     |    | 3 2   | 2 1   |    | 1     |
                        forward                      backward

FSDP2 (``torch.distributed.fsdp.fully_shard``) cuts each parameter by rows, as a DTensor, gathers a layer in hooks of
its forward and backward, and takes its collectives from whoever gives some: here :class:`RingAllGather` and
:class:`RingReduceScatter`. On CUDA its own, over nccl, stay.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.collectives.decorators import not_compiled
from pardemo.groups import cut_of, mark_cut
from pardemo.zero.engine import Engine, SavedShard, broadcast
from pardemo.zero.gradients import own_shard_gradient
from pardemo.zero.param_groups import MakeOptimizer, ParamGroups


class Zero3(Engine):
    """P_os+g+p: parameters in shards, too. Bytes per rank (4+K)Ψ/N, and two layers at a time; sends 3Ψ(N−1)/N per
    micro-batch: a layer is gathered before its forward, freed, gathered before its backward, and its gradients reduced.

    The module becomes FSDP2's, in place and for good: between two uses its parameters are DTensors, fp32 shards that
    the optimizer updates, and ``.grad`` is the ranks' mean. So torch's own tools work as with ``fully_shard``:
    ``clip_grad_norm_``, ``register_fsdp_forward_method``, ``torch.distributed.checkpoint.state_dict``. Parameters that
    were bf16 are gathered, and their gradients reduced, in bf16.

    Args:
        layers: the modules that are gathered one at a time, in the order of their use; by default the elements of the
            module's ``nn.ModuleList`` and ``nn.Sequential`` children, of the first level where there are any. What is
            in none of them, and a layer that shares a parameter with others (tied), is gathered around the whole
            module.
        options: as for :class:`Zero1`, but the optimizer need not work element by element: it gets DTensors.

    Two engines on one group: all ranks use them in one order, because a forward waits for the other ranks' shards (a
    time-out names who waits for which).

    Raises:
        ValueError: as :class:`Zero1`; parameters of two dtypes in a layer, or with hooks, which FSDP2 would not take
            along; layers that are no part of the module.
    """

    stage = 3

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        layers: Sequence[nn.Module] | None = None,
        **options,
    ):
        layers = default_layers(module) if layers is None else layers
        for number, layer in enumerate(layers):
            if layer is module or layer not in set(module.modules()):
                raise ValueError(f"layers[{number}] is {'the whole' if layer is module else 'no part of the'} module")
        self._layers: list[Any] = _unshared(module, layers)
        self._whole = False
        super().__init__(module, optimizer, group, **options)
        for parameter in self._trained() if self.norm.is_of_a_part else ():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p.grad, "__class__", own_shard_gradient()))

    def forward(self, *args, **kwargs):
        try:
            return super().forward(*args, **kwargs)
        except Exception:
            if not compat.in_backward():  # where a checkpoint ends its recomputation by an exception
                with contextlib.suppress(Exception):  # what an exchange that failed has to say was said
                    self._free()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._free()
        for parameter in (*(p for p, _, _ in self._masters.values()), *compat.fsdp_gathered(self.module)):
            parameter.grad = None

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Gathers all parameters for :meth:`Engine.full_parameters`: all ranks have to take part.

        ``state_dict()`` is there in full, too; to load one use ``torch.distributed.checkpoint.state_dict``.
        """
        if self._whole:
            yield self.module
            return
        self._free()
        sharded: list[Any] = list(self._masters.values())
        gathered: dict[nn.Parameter, nn.Parameter] = {
            p: nn.Parameter(p.detach().full_tensor().to(dtype), p.requires_grad) for p, _, dtype in sharded
        }
        self._replace(gathered)
        self._whole = True
        try:
            yield self.module
        finally:
            self._whole = False
            self._replace({plain: shard for shard, plain in gathered.items()})
            with torch.no_grad():
                for shard, plain in gathered.items():
                    local = compat.local_tensor(shard)
                    rows = plain.detach()[_first_row(shard) :][: len(local)]
                    written = rows != local.to(rows.dtype)  # what was not keeps its fp32 digits
                    local[written] = rows[written].to(local.dtype)

    def shards(self) -> dict[str, SavedShard]:
        self._free()
        return {
            name: SavedShard(p, lambda tensor: tensor, [[name], group, str(dtype), p.numel()])
            for name, (p, group, dtype) in self._masters.items()
        }

    def check_usable(self) -> None:
        if self._whole:
            raise RuntimeError("within full_parameters() parameters are read or changed, and no pass or step is made")
        if compat.fsdp_backward_failed(self.module):
            raise RuntimeError("the last backward pass failed: call zero_grad() to discard what it left")
        if any(p.grad is not None for p in compat.fsdp_gathered(self.module)):
            raise RuntimeError(
                "gradients were left that FSDP2 has not reduced: it wants checkpoint(…, use_reentrant=False), and this "
                "engine no set_requires_gradient_sync(False); zero_grad() discards them"
            )
        super().check_usable()

    @not_compiled
    def _begin_pass(self) -> None:
        super()._begin_pass()
        self._passes += not compat.in_backward()

    def _make_shards(self, optimizer: MakeOptimizer, groups: ParamGroups) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        names = {p: name for name, p in self.module.named_parameters()}
        labels = {part: name or "the module" for name, part in self.module.named_modules()}
        self._parts: list[Any] = [*self._layers, self.module]
        held: dict[nn.Module, list[nn.Parameter]] = {}
        for part in self._parts:
            held[part] = [p for p in part.parameters() if not any(p in others for others in map(set, held.values()))]
            _check_part(held[part], names)
        broadcast([*names, *self.module.buffers()], self.group)
        super().zero_grad()
        kinds = {p: (name, groups.number(p), p.dtype) for p, name in names.items()}
        cuts = {name: cut for p, name in names.items() if (cut := cut_of(p))}
        for part, parameters in held.items():
            gathered_in = None
            for parameter in parameters:
                if parameter.requires_grad and parameter.dtype == torch.bfloat16:
                    parameter.data, gathered_in = parameter.data.float(), torch.bfloat16
            # torch 2.15 would reduce in the shards' fp32 where it is not told; releases before it, as parameters are
            policy = MixedPrecisionPolicy(gathered_in, reduce_dtype=gathered_in, cast_forward_inputs=False)
            shard: Any = fully_shard(part, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy)
            if self.device.type == "cpu":
                shard.set_custom_all_gather(RingAllGather(self, labels[part]))
                shard.set_custom_reduce_scatter(RingReduceScatter(self, labels[part]))
        self.module.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        for part, following in pairwise([self.module, *self._layers]):
            part.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        sharded = dict(self.module.named_parameters())
        for name, cut in cuts.items():
            mark_cut(sharded[name], cut.group, cut.dim, cut.counted)
        self._masters = {name: (sharded[name], group, dtype) for name, group, dtype in kinds.values()}
        trained = [(group, master) for master, group, _ in self._masters.values() if master.requires_grad]
        self._make_optimizer(optimizer, groups, trained)

    def _free(self) -> None:
        """Frees what is gathered, or on its way, whatever the last pass was doing."""
        if self._passes:
            gradients = [(master, master.grad) for master, _, _ in self._masters.values()]
            self.module.reset_iter_state()  # type: ignore[operator]
            for master, gradient in gradients:  # of passes before, which torch 2.15 would discard
                master.grad = gradient
        for part in self._parts:
            part.reshard()

    def _replace(self, parameters: dict[nn.Parameter, nn.Parameter]) -> None:
        for part in self.module.modules():
            for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                part.register_parameter(name, parameters[parameter])

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def _finish_gradients(self) -> None:
        from torch.distributed.tensor import DTensor

        for parameter in self._trained():
            if parameter.grad is not None:
                parameter.grad.__class__ = DTensor

    def _gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, int]]:
        for parameter in self._trained():
            if parameter.grad is not None:
                row = parameter.numel() // parameter.shape[0]
                yield parameter, compat.local_tensor(parameter.grad), row * _first_row(parameter)

    def _update(self, factor: float) -> None:
        if any(parameter.grad is not None for parameter in self._trained()):
            for parameter in self._trained():
                if parameter.grad is None:  # of a layer that has never run
                    parameter.grad = torch.zeros_like(parameter)
                elif factor != 1:
                    compat.local_tensor(parameter.grad).mul_(factor)
        self._step_optimizer()
        super().zero_grad()
        self._free()
        # a backward pass through a forward pass of before is refused by torch itself
        torch.autograd.graph.increment_version(compat.fsdp_gathered(self.module))


class _ShardExchange(dist.Work):
    """An exchange in the channel's thread, as FSDP2 waits for one."""

    def __init__(self, future: Future):
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.result()
        return True


class _Ring:
    """What FSDP2's two collectives have in common here: its ``Comm``, over the engine's channel."""

    def __init__(self, engine: Zero3, name: str):
        self._engine, self._name = engine, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _submit(self, exchange: str, *tensors: torch.Tensor) -> Future:
        channel = self._engine.channel
        return channel.submit(getattr(channel, exchange), *tensors, f"{self._name}, {self._engine.now}")


class RingAllGather(_Ring):
    """FSDP2's ``AllGather`` over the ring, in the channel's thread: the next layer's runs ahead."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        return _ShardExchange(self._submit("all_gather", input_tensor, output_tensor))


class RingReduceScatter(_Ring):
    """FSDP2's ``ReduceScatter`` over the ring; it waits, since FSDP2 reads the result at once."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(self._submit("reduce_scatter", input_tensor).result())
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())


def default_layers(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ``ModuleList`` and ``Sequential`` in ``module`` that have parameters."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [layer for layer in module if next(layer.parameters(), None) is not None]
    return [layer for child in module.children() for layer in default_layers(child)]


def _unshared(module: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers that have parameters, and share none with another layer or with the rest of the module."""
    within = {part for layer in layers for part in layer.modules()}
    rest = {p for part in module.modules() if part not in within for p in part.parameters(recurse=False)}
    owners = Counter(p for owner in [rest, *(set(layer.parameters()) for layer in layers)] for p in owner)
    return [layer for layer in layers if {owners[p] for p in layer.parameters()} == {1}]


def _check_part(parameters: Sequence[nn.Parameter], names: dict[nn.Parameter, str]) -> None:
    """ValueError for what FSDP2 would cast, or not take along."""
    trained = [p.dtype for p in parameters if p.requires_grad]
    for parameter in parameters:
        name, dtype = names[parameter], parameter.dtype
        if compat.backward_hooks(parameter):
            raise ValueError(f"{name} has a hook of register_hook(), which stage 3 would not take along: hook outputs")
        cast = dtype.is_floating_point and (parameter.requires_grad or torch.bfloat16 in trained)
        if cast and dtype != trained[0]:
            raise ValueError(f"{name} is {dtype} in a layer of {trained[0]}: stage 3 gathers a layer in one dtype")


def _first_row(parameter: Any) -> int:
    """The number of the first row that this rank has of a DTensor."""
    return compat.local_offset(parameter.shape, parameter.device_mesh, parameter.placements)[0]
