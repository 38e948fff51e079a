"""A small net under each engine, with moments in a step at which a fault can happen."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel
from pardemo.data_parallel import BucketedDataParallel as Wrapper
from pardemo.pipeline_parallel import Pipeline, Schedule, cut_by_layers, one_f_one_b
from pardemo.pipeline_parallel.executor import Tensors
from pardemo.tensor_parallel import ParallelMLP
from pardemo.zero import Zero1, Zero2, Zero3
from pardemo.zero.engine import Engine

WIDTH = 8
SGD = partial(torch.optim.SGD, lr=0.01)
#: What happens at a moment of a step: before it, between forward and backward, after it.
At = dict[str, Callable[[], object]]


def small_net() -> nn.Sequential:
    """Three layers with something between them; the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first, second, third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)


def _happen(at: At | None, moment: str) -> None:
    if at and moment in at:
        at[moment]()


class Trainer:
    """A module and a way to step it. :meth:`step` is the whole of what a training script does."""

    module: nn.Module

    def batch(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.part())
        return torch.randn(8, WIDTH, generator=generator)

    def part(self) -> int:
        """Which part of the data this rank sees."""
        return 0

    def step(self, step: int, at: At | None = None) -> None:
        raise NotImplementedError


class Replicated(Trainer):
    """Data parallelism, and ZeRO: every rank sees its own part of the batch."""

    module: nn.Sequential

    def __init__(self, make: Callable[..., Wrapper | Engine], net: nn.Sequential | None = None, **options: Any):
        self.module = small_net() if net is None else net
        self.engine = make(self.module, **options)
        self.order: tuple[int, ...] | None = None
        self._optimizer = SGD(self.module.parameters()) if isinstance(self.engine, Wrapper) else None
        layers = list(self.module)
        # the net's own forward, but in the order that a fault has set
        vars(self.module)["forward"] = lambda x: _run([layers[i] for i in self.order] if self.order else layers, x)

    def part(self) -> int:
        return dist.get_rank()

    def step(self, step: int, at: At | None = None, backwards: int = 1, synchronised: bool = True) -> None:
        _happen(at, "before")
        for _ in range(max(1, backwards)):
            loss = self.engine(self.batch(step)).square().mean()
            _happen(at, "between")
            if not synchronised:
                assert isinstance(self.engine, Wrapper), "a ZeRO engine has no no_sync()"
                with self.engine.no_sync():
                    loss.backward()
            elif backwards:
                loss.backward()
        self.update()
        _happen(at, "after")

    def update(self) -> None:
        if isinstance(self.engine, Engine):
            self.engine.step()
        elif self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()


def _run(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


class TensorParallel(Trainer):
    """An MLP of which every rank has a part."""

    def __init__(self) -> None:
        first, second, _ = (layer for layer in small_net() if isinstance(layer, nn.Linear))
        self.module = ParallelMLP(first, second)

    def step(self, step: int, at: At | None = None) -> None:
        _happen(at, "before")
        loss = self.module(self.batch(step).requires_grad_()).square().mean()
        _happen(at, "between")
        loss.backward()
        _happen(at, "after")


class _Moment(nn.Module):
    """Something happens in the forward pass of a stage: its sends and receives have begun by then."""

    def __init__(self):
        super().__init__()
        self.at: At | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _happen(self.at, "between")
        return x


class Pipelined(Trainer):
    """A stage for each rank."""

    module: nn.Sequential

    def __init__(self, schedule: Schedule | None = None, ends_with: type[nn.Module] | None = None):
        ranks = dist.get_world_size()
        stage = cut_by_layers(_eight_layers(), ranks)[dist.get_rank()]
        self._moment = _Moment()
        self.module = nn.Sequential(stage, self._moment, *([ends_with()] if ends_with else []))
        self.schedule = schedule or Schedule(one_f_one_b, ranks, 4)
        self.pipeline = Pipeline([self.module], self.schedule, _square_error)

    def step(self, step: int, at: At | None = None) -> None:
        _happen(at, "before")
        self._moment.at = at
        self.pipeline.step(self.batch(step), self.batch(step))
        _happen(at, "after")

    def is_right(self) -> bool:
        """Whether this stage's gradients of the first two steps are those of one process."""
        layers = _eight_layers()
        for step in range(2):
            F.mse_loss(_run(layers, self.batch(step)), self.batch(step)).backward()
        expected = cut_by_layers(layers, dist.get_world_size())[dist.get_rank()]
        return all(
            ours.grad is not None and theirs.grad is not None and torch.allclose(ours.grad, theirs.grad, atol=1e-5)
            for ours, theirs in zip(self.module.parameters(), expected.parameters(), strict=True)
        )


def _eight_layers() -> list[nn.Module]:
    """Enough for a stage on each of four ranks, with parameters in each."""
    return [*small_net(), *list(small_net())[:3]]


def _square_error(outputs: Tensors, targets: Tensors) -> torch.Tensor:
    assert isinstance(outputs, torch.Tensor), "a stage gives one tensor"
    assert isinstance(targets, torch.Tensor), "a batch has one tensor"
    return F.mse_loss(outputs, targets)


ENGINES: dict[str, Callable[..., Replicated]] = {
    "naive": partial(Replicated, NaiveDataParallel),
    "bucketed": partial(Replicated, BucketedDataParallel),
    "zero1": partial(Replicated, lambda net, **options: Zero1(net, SGD, **options)),
    "zero2": partial(Replicated, lambda net, **options: Zero2(net, SGD, **options)),
    "zero3": partial(Replicated, lambda net, **options: Zero3(net, SGD, **options)),
}
TRAINERS: dict[str, Callable[..., Trainer]] = {**ENGINES, "tp": TensorParallel, "pp": Pipelined}
REPLICATED = tuple(ENGINES)
ZERO = ("zero1", "zero2", "zero3")
