"""What the stages share: the common start, the optimizer's step on shards, clipping by the global norm."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.collectives.channel import Channel
from pardemo.collectives.decorators import not_compiled
from pardemo.collectives.outcome import same_outcome
from pardemo.data_parallel.replicas import compare_models
from pardemo.groups import group_of
from pardemo.zero import checks
from pardemo.zero.elementwise import check_elementwise
from pardemo.zero.gradient_norm import NormOfModel, Tied, check_max_norm, clip_factor
from pardemo.zero.gradients import MastersGradient
from pardemo.zero.output_tensors import before_backward
from pardemo.zero.param_groups import MakeOptimizer, ParamGroups
from pardemo.zero.unit import Unit

_engines: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]]" = weakref.WeakKeyDictionary()


class Engine(nn.Module):
    """A module whose model states are shared by the ranks of a group; the base of the three stages.

    Supported: any module, called with ``engine(…)``; tied and frozen parameters; several backward passes before a
    step; tensor-parallel layers and a pipeline's stages, each engine on its data-parallel group; several engines on one
    group, also in one backward pass. A parameter that took no part has gradient zero (weight decay and momentum still
    act on it). Parameters may be changed by hand between two steps, alike on all ranks (stage 3: within :meth:`whole`).
    Between ``backward()`` and ``step()`` ``.grad`` is the mean's for torch's ``clip_grad_norm_``, ``clip_grad_value_``,
    ``p.grad.mul_()``, ``module.zero_grad()`` and ``GradScaler`` (``scaler.unscale_(engine)``, ``scaler.step(engine)``),
    on all ranks alike. Buffers (batch norm's statistics) are alike at the start, and each rank's own from then on.

    Refused in one line: an optimizer that is not element by element; a step of the optimizer that is not the engine's;
    ranks at different passes or layers; parameters moved, replaced or (un)frozen under the engine; others' hooks on
    accumulated gradients; a closed engine. A module has one engine at a time: :meth:`close` gives it back.
    """

    stage = 0
    cut = ""  # what decides the units' sizes beside the model: gloo ends a process whose peer sends more

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        max_norm: float | None = None,
        norm_over: dist.ProcessGroup | None = None,
        tied: Sequence[Tied] = (),
        param_groups: Sequence[dict[str, Any]] | None = None,
    ):
        super().__init__()
        if max_norm is not None:
            check_max_norm(max_norm)
        if (other := _engines.get(module)) is not None and other() is not None:
            raise ValueError("the module has a ZeRO engine already: close() that one first")
        self.module, self.group = module, group_of(group)
        refused, self.param_groups = checks.refused(module, self.group), ParamGroups(module, param_groups)
        engine, of = f"ZeRO-{self.stage}, max_norm {max_norm}{self.cut}", self.param_groups
        try:
            compare_models(module, self.group, engine, refused and str(refused), lambda p: f"group {of.number(p)}")
        except ValueError as error:
            raise refused or error from None
        device = next(module.parameters()).device
        with same_outcome(self.group):
            check_elementwise(optimizer, self.param_groups, device)
        self.size, self.max_norm = dist.get_world_size(self.group), max_norm
        self.norm = NormOfModel(module, norm_over, tied)
        self._channel = Channel(self.group, f"ZeRO-{self.stage}", links=device.type == "cpu")
        self._passes = self._steps = 0  # so many have begun: exchanges of different ones are not taken for one
        self._open = False  # a backward pass has begun and not ended: it failed, if the next one begins
        self._updating = self._closed = False
        self._hooks: list = []
        with torch.no_grad():
            self.units = self._make_units()
        self.trained = [unit for unit in self.units if unit.trained]
        with same_outcome(self.group):
            shards = self.param_groups.shards([(unit.settings, unit.master) for unit in self.trained])
            self.optimizer = optimizer(shards)
            checks.check_optimizer(self.optimizer, self.trained)
            self._watch_optimizer()
            self._show_masters()
        self._take_charge()  # nothing is refused from here on: up to now the module is as it was
        _engines[module] = weakref.ref(self)
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def forward(self, *args, **kwargs):
        self._check_pass()
        output, steps = self.module(*args, **kwargs), self._steps
        before_backward(output, partial(self._backward_comes, steps))
        return output

    @not_compiled  # torch.compile(engine) traces the module, and nothing of what the engine does around it
    def _check_pass(self) -> None:
        self.check_usable(in_backward=compat.in_backward())
        if torch.is_grad_enabled():
            checks.check_hooks(self.module, (p for unit in self.trained for p in unit.parameters))

    def __deepcopy__(self, memo: dict) -> nn.Module:
        """A plain copy of the module, as for a moving average of the weights; at stage 3 within :meth:`whole`."""
        return copy.deepcopy(self.module, memo)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the optimizer on the mean of the ranks' gradients; returns their norm where it is clipped.

        The optimizer's own ``step`` is called once for each unit, so that one gradient at a time is in fp32. Like
        torch's, it calls a ``closure`` first, which makes the gradients, and returns what that returns.

        Raises:
            RuntimeError: the last backward pass failed, or parameters are no longer the engine's.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.step()
            return loss
        self.check_usable()
        checks.check_in_place(self)
        self._steps += 1
        self._take_over_what_was_written()
        self._finish_gradients()
        norm = self._global_norm() if self.max_norm is not None else None
        clip = 1.0 if norm is None else clip_factor(norm, self.max_norm)
        sending = []
        with self._updates():
            for unit in self.trained:
                if unit.gradient is None:
                    continue
                mean, unit.gradient = unit.gradient.float().mul_(clip / self.size), None
                self.update(unit, mean)
                del mean
                with torch.no_grad():
                    unit.shard.copy_(unit.master)  # back to the parameters' precision
                if self.stage < 3:
                    sending.append(self._channel.submit(unit.gather, self._now))
        for future in sending:
            future.result()
        return norm

    def update(self, unit: Unit, gradient: torch.Tensor) -> None:
        """The optimizer's step on one unit's master, with this gradient in fp32."""
        with self._updates():
            unit.master.grad = gradient
            try:
                self.optimizer.step()
            finally:
                unit.master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards all gradients, those in shards too, and what a failed backward pass has left."""
        self._open = False
        for unit in self.trained:
            unit.gradient = None
            unit.expect_gradients()
            for parameter in unit.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Gives the module back as it was: whole parameters of its own, no hooks. The engine is of no use then."""
        if self._closed:
            return
        _remove(self._hooks)
        _engines.pop(self.module, None)
        for unit in self.units:
            for parameter, view in zip(unit.parameters, unit.views(unit.flat), strict=True):
                parameter.data, parameter.grad = view.clone(), None
        self.units, self.trained, self._closed = [], [], True
        self._channel.close()

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Within the block every parameter is there in full, to look at, to save, or to change alike on all ranks."""
        try:
            yield self.module
        finally:
            self.take_over()

    def take_over(self) -> None:
        """What was written into whole parameters is what training goes on from. Sends nothing."""
        with torch.no_grad():
            for unit in self.units:
                unit.take_over()

    def state_bytes(self) -> dict[str, int]:
        """Bytes of model states that this rank keeps between two steps, by kind, padding included."""
        return {
            "parameters": _bytes(
                *(p for p in self.module.parameters()), *(u.flat for u in self.units), *(u.shard for u in self.units)
            ),
            "gradients": _bytes(*(p.grad for p in self.module.parameters()), *(u.gradient for u in self.units)),
            "optimizer states": _bytes(
                *(u.master for u in self.trained if u.master.data_ptr() != u.shard.data_ptr()),
                *(t for s in self.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()),
            ),
        }

    @contextlib.contextmanager
    def _updates(self) -> Iterator[None]:
        """Within it masters have no gradients but those that they are given; outside, what says where those are."""
        if self._updating:
            yield
            return
        self._updating = True
        for unit in self.trained:
            unit.master.grad = None
        try:
            yield
        finally:
            self._updating = False
            self._show_masters()

    def _show_masters(self) -> None:
        for unit in self.trained:
            unit.master.grad = MastersGradient.of(unit.master)

    def exchange(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Sums a tensor over the ranks, in place, between two passes."""
        return self._channel.submit(self._channel.all_reduce, tensor, f"{what}, {self._now}").result()

    @property
    def _now(self) -> str:
        """Where this rank is, for the ranks to compare."""
        return f"step {self._steps}"

    def _global_norm(self) -> float:
        """Of the mean gradient of the whole model: over this group, the tensor-parallel one and the pipeline's."""
        squares = self.norm.squares(
            part
            for unit in self.trained
            if unit.gradient is not None
            for piece in unit.pieces(unit.gradient)
            for part in self.norm.counted(*piece)
        )
        self._channel.all_reduce(squares, f"squares of the gradients, {self._now}")
        return self.norm.norm(squares) / self.size

    def _watch_optimizer(self) -> None:
        """A step that is not the engine's is refused; ``optimizer.zero_grad()`` is the engine's."""
        myself = weakref.ref(self)

        def before_step(*_):
            engine = myself()
            if engine is not None and not engine._closed and not engine._updating:
                raise RuntimeError("engine.optimizer has no gradients of its own: call engine.step()")

        def zero_grad(set_to_none: bool = True):
            if (engine := myself()) is not None:
                engine.zero_grad()

        def note_rank(optimizer, state_dict):
            if (engine := myself()) is not None:
                state_dict["zero"] = engine._whose_states()

        def before_load_states(optimizer, state_dict):
            if (engine := myself()) is not None and state_dict.get("zero") != (ours := engine._whose_states()):
                raise ValueError(
                    f"states of an optimizer's shards, {state_dict.get('zero')}, do not fit these, {ours}: each rank "
                    "loads its own, or pardemo.zero.save and load keep and read them all"
                )

        self.optimizer.register_step_pre_hook(before_step)
        self.optimizer.register_state_dict_post_hook(note_rank)
        self.optimizer.register_load_state_dict_pre_hook(before_load_states)
        self.optimizer.zero_grad = zero_grad

    def _take_charge(self) -> None:
        """The module becomes the engine's: rank 0's values, no gradients, parameters in the units' flat tensors."""
        myself = weakref.ref(self)

        def before_load(module, state_dict, prefix, local_metadata, *_):
            if (engine := myself()) is not None and any(module is part for part in engine.module.modules()):
                engine._check_load(local_metadata.get("assign_to_params_buffers", False))

        in_units = {parameter for unit in self.units for parameter in unit.parameters}
        others = [p.data for p in self.module.parameters() if p not in in_units]
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.grad = None
            for tensor in (*others, *self.module.buffers()) if self.size > 1 else ():
                _broadcast(tensor.data, self.group)
        self._show_units()
        self._hooks += [part.register_load_state_dict_pre_hook(before_load) for part in self.module.modules()]

    def _backward_comes(self, steps: int) -> None:
        """RuntimeError where a backward pass begins whose forward used weights of an earlier step."""
        if steps != self._steps:
            raise RuntimeError(
                "step() was called between a forward pass and its backward, whose weights are no longer there: call "
                "backward() first"
            )

    def _whose_states(self) -> dict[str, Any]:
        return {"stage": self.stage, "rank": dist.get_rank(self.group), "ranks": self.size,
                "elements": [unit.numel for unit in self.trained]}  # fmt: skip

    def check_usable(self, in_backward: bool = False) -> None:
        """RuntimeError where the engine is closed, or a backward pass has failed."""
        if self._closed:
            raise RuntimeError("this engine is closed: make another one for the module")
        if self._open and not in_backward:
            raise RuntimeError("the last backward pass failed: call zero_grad() to discard what it left")

    def _check_load(self, assign: bool) -> None:
        if assign:
            raise RuntimeError("load_state_dict(assign=True) would replace the engine's parameters: load without it")

    def _take_over_what_was_written(self) -> None:
        """Between two steps, into whole parameters: the masters of lower precision do not know it yet."""
        self.take_over()

    def _make_units(self) -> list[Unit]:
        raise NotImplementedError

    def _show_units(self) -> None:
        """Puts the parameters where the units have their values."""
        for unit in self.units:
            unit.arrive()

    def _finish_gradients(self) -> None: ...


def _remove(hooks: list) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The first rank's tensor to all, as bytes: gloo does not know every dtype that a buffer may have."""
    whole = tensor.contiguous()
    dist.broadcast(whole.reshape(-1).view(torch.uint8), dist.get_global_rank(group, 0), group=group)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


def _bytes(*tensors: torch.Tensor | None) -> int:
    """Of the tensors' storages, each once."""
    storages = {
        compat.storage_address(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors if t is not None
    }
    return sum(storages.values())
