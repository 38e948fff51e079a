"""What the stages share: the common start, the optimizer's step on shards, clipping by the global norm."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from pardemo.collectives import ring_all_reduce
from pardemo.courier import courier_of
from pardemo.zero.unit import Unit

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
DTYPES = (torch.bfloat16, torch.float32)
_engines: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]]" = weakref.WeakKeyDictionary()


class Engine(nn.Module):
    """A module whose model states are shared by the ranks of a group; the base of the three stages.

    All ranks call the same layers in the same order. A parameter that took no part has gradient zero (weight decay and
    momentum still act on it). Parameters are changed by hand within :meth:`whole` only: anything else the next step
    overwrites. Buffers (batch norm's statistics) are alike at the start, and each rank's own from then on.
    A module has one engine at a time: :meth:`close` gives it back.
    """

    stage = 0

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        max_norm: float | None = None,
    ):
        super().__init__()
        _check(module, max_norm)
        self.module = module
        self.group = group if group is not None else dist.group.WORLD
        self.size = dist.get_world_size(self.group)
        self.max_norm = max_norm
        self._courier = courier_of(self.group)
        self._backward = -1
        self._open = False  # a backward pass has begun and not ended: it failed, if the next one begins
        self._hooks: list = []
        with torch.no_grad():
            if self.size > 1:
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor.data, dist.get_global_rank(self.group, 0), group=self.group)
            self.units = self._make_units()
        self.trained = [unit for unit in self.units if unit.trained]
        self.optimizer = optimizer([unit.master for unit in self.trained])
        _engines[module] = weakref.ref(self)
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def forward(self, *args, **kwargs):
        if self._open and torch._C._current_graph_task_id() == -1:
            raise RuntimeError("the last backward pass failed: call zero_grad() to discard what it left")
        return self.module(*args, **kwargs)

    def step(self) -> float | None:
        """One step of the optimizer on the mean of the ranks' gradients; returns their norm where it is clipped.

        The optimizer's own ``step`` is called once for each unit, so that one gradient at a time is in fp32.
        """
        self._finish_gradients()
        norm = self._global_norm() if self.max_norm is not None else None
        clip = 1.0 if norm is None else self.max_norm / (norm + 1e-6)
        clip = 1.0 if clip >= 1 else clip  # not min(): a norm that is no number spoils all gradients, as in torch
        sending = []
        for unit in self.trained:
            if unit.gradient is None:
                continue
            unit.master.grad = unit.gradient.float().mul_(clip / self.size)
            unit.gradient = None
            self.optimizer.step()
            unit.master.grad = None
            with torch.no_grad():
                unit.shard.copy_(unit.master)  # back to the parameters' precision
            if self.stage < 3:
                sending.append(self._courier.submit(unit.gather))
        for future in sending:
            future.result()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards all gradients, those in shards too, and what a failed backward pass has left."""
        self._open = False
        for unit in self.trained:
            unit.gradient, unit.ready, unit.full = None, 0, False
            for parameter in unit.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Gives the module back as it was: whole parameters of its own, no hooks."""
        _remove(self._hooks)
        _engines.pop(self.module, None)
        for unit in self.units:
            for parameter, view in zip(unit.parameters, unit.views(unit.flat), strict=True):
                parameter.data, parameter.grad = view.clone(), None
        self.units, self.trained = [], []

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Within the block every parameter is there in full, to look at, to save, or to change alike on all ranks."""
        try:
            yield self.module
        finally:
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

    def _global_norm(self) -> float:
        total = sum(unit.gradient.float().square().sum() for unit in self.trained if unit.gradient is not None)
        return ring_all_reduce(torch.as_tensor(total).reshape(1), self.group).sqrt().item() / self.size

    def _make_units(self) -> list[Unit]:
        raise NotImplementedError

    def _finish_gradients(self) -> None: ...


class ReducesInBackward(Engine):
    """Stages 2 and 3: a unit's gradients are packed, freed, and reduced while the backward pass goes on.

    Units are sent strictly in one order, whichever is complete first, so that all ranks agree without a word; at most
    two are on their way at a time, so that gradients do not pile up before a slow link.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._sending: list[Future] = []
        self._order_of_sending = self._backward_order()
        self._next = 0
        myself = weakref.ref(self)  # autograd holds the hooks where the collector does not see them
        for number, unit in enumerate(self.trained):
            for parameter in unit.parameters:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: (engine := myself()) and engine._gradient_is_ready(engine.trained[number])
                )
                self._hooks.append(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for future in self._sending:
            future.exception()
        self._sending, self._next = [], 0
        super().zero_grad()

    def _backward_order(self) -> list[Unit]:
        return self.trained

    def _begins(self) -> None:
        """Notes the first call in a backward pass, so that ``_end_of_backward`` runs when it has ended."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._open = backward, True
            Variable._execution_engine.queue_callback(self._end_of_backward)

    def _gradient_is_ready(self, unit: Unit) -> None:
        self._begins()
        unit.ready += 1
        unit.full = unit.ready == len(unit.parameters)
        order = self._order_of_sending
        while self._next < len(order) and order[self._next].full:
            self._send_next()

    def _send_next(self) -> None:
        unit = self._order_of_sending[self._next]
        self._next += 1
        if len(self._sending) >= 2:
            self._sending[-2].result()
        self._sending.append(self._courier.submit(unit.reduce, unit.pack_gradients()))

    def _end_of_backward(self) -> None:
        while self._next < len(self._order_of_sending):  # what parameters without a gradient left incomplete
            self._send_next()
        sending, self._sending, self._next = self._sending, [], 0
        for future in sending:
            future.result()
        for unit in self.trained:
            unit.ready, unit.full = 0, False
        self._open = False


def _check(module: nn.Module, max_norm: float | None) -> None:
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, not {max_norm}")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the module has no parameter that requires a gradient: nothing to train")
    if (other := _engines.get(module)) is not None and other() is not None:
        raise ValueError("the module has a ZeRO engine already: close() that one first")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:  # fp16 needs loss scaling, which is not here
            raise ValueError(f"{name} is {parameter.dtype}; trained parameters are bfloat16 or float32")
        if not parameter.numel():
            raise ValueError(f"{name} is empty: are its values in the shards of an engine that was not closed?")


def _remove(hooks: list) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _bytes(*tensors: torch.Tensor | None) -> int:
    """Of the tensors' storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
