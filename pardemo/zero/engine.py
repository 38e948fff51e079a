"""The base of the three stages: the common start, the step, clipping by the norm of the whole model."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.argument_checks import above_zero
from pardemo.collectives.channel import Channel
from pardemo.collectives.decorators import not_compiled
from pardemo.groups import Tied, group_of
from pardemo.meters.tensors import storage_bytes
from pardemo.zero import checks
from pardemo.zero.checks import same_outcome
from pardemo.zero.gradient_norm import NormOfModel, clip_factor
from pardemo.zero.param_groups import MakeOptimizer, ParamGroups

_engines: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]]" = weakref.WeakKeyDictionary()


class SavedShard(NamedTuple):
    """One tensor of a checkpoint: what the optimizer updates on this rank, and the parameters in it."""

    master: nn.Parameter
    #: a tensor that is cut as the master is, as the DTensor of all ranks' parts, in the same memory
    as_dtensor: Callable[[torch.Tensor], torch.Tensor]
    contents: list[Any]  # the parameters, their group's number, dtype and elements


class Engine(nn.Module):
    """A module whose model states are shared by the ranks of a group; the base of the three stages.

    Supported: any module, called with ``engine(…)``; tied and frozen parameters; several backward passes before a
    step; activation checkpointing; ``torch.compile``; tensor-parallel layers and a pipeline's stages, each engine on
    its data-parallel group; several engines on one group. A parameter that took no part has gradient zero (weight
    decay and momentum still act on it). Buffers (batch norm's statistics) are alike at the start, and each rank's own
    from then on.

    Refused in one line: ranks with different models, or at different passes or layers; a step between a forward pass
    and its backward; parameters moved, replaced or (un)frozen under the engine; others' hooks on accumulated
    gradients; a closed engine. A module has one engine at a time.

    Attributes: ``optimizer`` (a schedule of the learning rate works), ``module``, ``group``.
    """

    stage = 0
    _extra_label = ""  # settings that have to be equal on all ranks

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        max_norm: float | None = None,
        pipeline_group: dist.ProcessGroup | None = None,
        tied: Sequence[Tied] = (),
        param_groups: Sequence[dict[str, Any]] | None = None,
    ):
        super().__init__()
        if max_norm is not None:
            above_zero(max_norm, "max_norm")
        if tied and self.stage > 1:
            raise ValueError(
                "tied copies are summed after backward(), when stages 2 and 3 have sent their gradients: use stage 1"
            )
        if (other := _engines.get(module)) is not None and other() is not None:
            raise ValueError("the module has a ZeRO engine already: close() that one first")
        self.module, self.group, self.max_norm = module, group_of(group), max_norm
        self.size = self.group.size()
        groups = ParamGroups(module, param_groups)
        label = f"ZeRO-{self.stage}, max_norm {max_norm}{self._extra_label}"
        checks.compare_models(module, self.group, label, groups)
        self.device = next(module.parameters()).device
        self.channel = Channel(self.group, f"ZeRO-{self.stage}", links=self.device.type == "cpu")
        self._passes = self._steps = 0  # in every exchange's label, so that ranks at different ones are told
        self._closed = self._updating = False
        self._make_shards(optimizer, groups)
        self.norm = NormOfModel(module, pipeline_group, tied)
        self._known = {p: (p.requires_grad, p.dtype, p.device) for p in module.parameters()}
        _engines[module] = weakref.ref(self)

    def forward(self, *args, **kwargs):
        self._begin_pass()
        output = self.module(*args, **kwargs)
        self._watch(output)
        return output

    def step(self) -> float | None:
        """One step of the optimizer on the mean of the ranks' gradients; returns their norm where it is clipped.

        Raises:
            RuntimeError: the last backward pass failed, or parameters are no longer the engine's.
        """
        self.check_usable()
        self._finish_gradients()
        self._steps += 1
        norm = self._global_norm() if self.max_norm is not None else None
        self._update(1.0 if norm is None or self.max_norm is None else clip_factor(norm, self.max_norm))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards all gradients, those in shards too, and what a failed backward pass has left."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def close(self) -> None:
        """Ends the engine: its links, its thread, its hooks. It cannot be used after it."""
        if not self._closed:
            self._closed = True
            _engines.pop(self.module, None)
            self.channel.close()

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Within the block every parameter is there in full, to look at, or to change alike on all ranks."""
        yield self.module

    def state_bytes(self) -> dict[str, int]:
        """Bytes of model states that this rank keeps between two steps, by kind, padding included."""
        states = [t for s in self.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()]
        kinds: dict[str, Iterable[torch.Tensor]] = {
            "parameters": list(self.module.parameters()),
            "gradients": [p.grad for p in self.module.parameters() if p.grad is not None],
            "optimizer states": states,
        }
        return {kind: storage_bytes(tensors) for kind, tensors in kinds.items()}

    def check_usable(self) -> None:
        """Raises RuntimeError where the engine is closed, or parameters were changed behind its back."""
        if self._closed:
            raise RuntimeError("this engine is closed: make another one for the module")
        for name, parameter in self.module.named_parameters():
            if self._known.get(parameter) != (parameter.requires_grad, parameter.dtype, parameter.device):
                raise RuntimeError(
                    f"{name} was replaced, cast, moved, frozen or unfrozen after the engine was made, which would go "
                    "on with what it had: do that before"
                )
        checks.check_hooks(self.module.named_parameters())

    def shards(self) -> dict[str, SavedShard]:
        """Returns what a checkpoint keeps of the trained parameters, by name."""
        raise NotImplementedError

    def replicated(self) -> dict[str, torch.Tensor]:
        """Returns what a checkpoint keeps beside the shards, by name: untrained tensors, whole on every rank."""
        return dict(self.module.named_buffers())

    def after_load(self) -> None:
        """Updates the parameters from masters that were loaded."""

    def __deepcopy__(self, memo: dict) -> nn.Module:
        """A plain copy of the module, as for a moving average of the weights."""
        return copy.deepcopy(self.module, memo)

    @cached_property
    def mesh(self) -> Any:
        """The group as DTensors know it; its name is nobody else's, since torch takes meshes of one name for one."""
        from torch.distributed.device_mesh import DeviceMesh

        name = f"{self.channel.name} of {self.group.group_name}"
        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=(name,))

    @property
    def now(self) -> str:
        """Names the point of training that this rank has reached, for the ranks to compare."""
        return f"pass {self._passes} after step {self._steps}"

    @not_compiled  # torch.compile(engine) traces the module, and nothing of what the engine does around it
    def _begin_pass(self) -> None:
        if not compat.in_backward():  # a checkpoint around the engine computes it again there
            self.check_usable()

    @not_compiled
    def _watch(self, output: Any) -> None:
        """Notes when the backward pass comes back to what the module has returned."""

    def _global_norm(self) -> float:
        """Returns the norm of the model's mean gradient: over this group, the tensor-parallel and the pipeline's."""
        squares = self.norm.squares(part for piece in self._gradients() for part in self.norm.counted(*piece))
        self.channel.all_reduce(squares, f"squares of the gradients, {self.now}")
        return self.norm.norm(squares)

    def _make_optimizer(
        self, make: MakeOptimizer, groups: ParamGroups, numbered: Sequence[tuple[int, nn.Parameter]]
    ) -> None:
        """The optimizer over this rank's shards, each with its parameter group's number."""
        with same_outcome(self.group):
            self.optimizer = make(groups.shards(numbered))
            has = {id(p): number for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
            if has != {id(shard): number for number, shard in numbered}:
                raise ValueError("the optimizer has other parameters or groups than it was given: make it from those")
            myself = weakref.ref(self)

            def before_step(*_: Any) -> None:
                if (engine := myself()) is not None and not engine._updating and not engine._closed:
                    raise RuntimeError("engine.optimizer's own step passes by the engine: call engine.step()")

            self.optimizer.register_step_pre_hook(before_step)

    def _step_optimizer(self) -> None:
        self._updating = True
        try:
            self.optimizer.step()
        finally:
            self._updating = False

    def _make_shards(self, optimizer: MakeOptimizer, groups: ParamGroups) -> None:
        """Gives all ranks the first rank's values, and this one its shards and their optimizer."""
        raise NotImplementedError

    def _finish_gradients(self) -> None:
        """Before a step: what is not reduced yet."""

    def _gradients(self) -> Iterable[tuple[nn.Parameter, torch.Tensor, int]]:
        """This rank's shards of the mean gradient: the parameter, a piece, the number of its first element."""
        raise NotImplementedError

    def _update(self, factor: float) -> None:
        """The optimizer's step on the mean gradients times ``factor``, which are gone afterwards."""
        raise NotImplementedError


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sends the first rank's tensors to all, as bytes: gloo does not know every dtype that a buffer may have."""
    for tensor in tensors if group.size() > 1 else ():
        contiguous = tensor.detach().contiguous()
        dist.broadcast(contiguous.reshape(-1).view(torch.uint8), dist.get_global_rank(group, 0), group=group)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(contiguous)
