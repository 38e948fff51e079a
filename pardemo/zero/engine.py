"""What the stages share: the common start, the optimizer's step on shards, clipping by the global norm."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from pardemo.collectives import ring_all_reduce
from pardemo.courier import Courier
from pardemo.zero.unit import Unit

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Engine(nn.Module):
    """A module whose model states are shared by the ranks of a group; the base of the three stages."""

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
        self.module = module
        self.group = group if group is not None else dist.group.WORLD
        self.size = dist.get_world_size(self.group)
        self.max_norm = max_norm
        if max_norm is not None and max_norm <= 0:
            raise ValueError(f"max_norm must be above 0, not {max_norm}")
        if not any(p.requires_grad for p in module.parameters()):
            raise ValueError("the module has no parameter that requires a gradient: nothing to train")
        self._courier = Courier("zero-courier")
        self._backward = -1
        with torch.no_grad():
            if self.size > 1:
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor.data, dist.get_global_rank(self.group, 0), group=self.group)
            self.units = self._make_units()
        self.trained = [unit for unit in self.units if unit.trained]
        self.optimizer = optimizer([unit.master for unit in self.trained])

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def step(self) -> float | None:
        """One step of the optimizer on the mean of the ranks' gradients; returns their norm where it is clipped."""
        self._finish_gradients()
        norm = self._global_norm() if self.max_norm is not None else None
        scale = 1 / self.size if norm is None else min(1.0, self.max_norm / (norm + 1e-6)) / self.size
        sending = []
        for unit in self.trained:  # one after the other, so that only one has its gradient in fp32 at a time
            if unit.gradient is None:
                continue
            unit.master.grad = unit.gradient.float().mul_(scale)
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

    def state_bytes(self) -> dict[str, int]:
        """Bytes of model states that this rank keeps between two steps, by kind, padding included."""
        return {
            "parameters": _bytes(*(p for p in self.module.parameters()), *(u.shard for u in self.units)),
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

    def _begins(self) -> bool:
        """Whether this is the first call in a backward pass; then ``_end_of_backward`` will run when it has ended."""
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return False
        self._backward = backward
        Variable._execution_engine.queue_callback(self._end_of_backward)
        return True

    def _end_of_backward(self) -> None: ...


class ReducesInBackward(Engine):
    """Stages 2 and 3: a unit's gradients are packed, freed, and reduced while the backward pass goes on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._sending: list[Future] = []
        for unit in self.trained:
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, unit=unit: self._gradient_is_ready(unit))

    def _gradient_is_ready(self, unit: Unit) -> None:
        self._begins()
        unit.ready += 1
        if unit.ready == len(unit.parameters):
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        unit.ready, unit.reduced = 0, True
        self._sending.append(self._courier.submit(unit.reduce, unit.pack_gradients()))

    def _end_of_backward(self) -> None:
        for unit in self.trained:  # what parameters without a gradient left incomplete; the same on all ranks
            if not unit.reduced:
                self._reduce(unit)
        sending, self._sending = self._sending, []
        for future in sending:
            future.result()
        for unit in self.trained:
            unit.reduced = False


def _bytes(*tensors: torch.Tensor | None) -> int:
    """Of the tensors' storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
