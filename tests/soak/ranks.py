"""Faults of one rank within a training step, under each engine: it fails, or does not make the steps of the others.

What a rank gives that the others do not take (another tensor, model, setting or schedule) is refused the same each
time, and has tests of its own.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import RankDied, RankFailed, RankTimeout, World
from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel
from pardemo.pipeline_parallel import Pipeline, Schedule, cut_by_layers, one_f_one_b
from pardemo.tensor_parallel import ParallelMLP
from pardemo.zero import Zero1, Zero2, Zero3
from soak import world
from soak.case import Case, Wrong, fault
from soak.common import LONG_S, first_line, working

LIMIT_S = 4.0  # for a fault that only a time limit can end
WIDTH = 8
SGD = partial(torch.optim.SGD, lr=0.01)
#: What happens at a moment of a step: ``before`` it, ``between`` forward and backward, ``after`` it.
At = Mapping[str, Callable[[], object]]


def _small_net() -> nn.Sequential:
    """Three layers with something between them; the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first, second, third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)


def _batch(step: int, part: int = 0) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + part))


def _happen(at: At, moment: str) -> None:
    if moment in at:
        at[moment]()


class Replicated:
    """The small net under data parallelism or ZeRO: every rank sees its own part of the batch."""

    def __init__(self, make: Callable[[nn.Module], Any]):
        net = _small_net()
        self.engine = make(net)
        self._optimizer = None if hasattr(self.engine, "optimizer") else SGD(net.parameters())

    def step(self, step: int, at: At, backwards: int = 1, synchronised: bool = True) -> None:
        _happen(at, "before")
        for _ in range(max(1, backwards)):
            with contextlib.nullcontext() if synchronised else self.engine.no_sync():
                loss = self.engine(_batch(step, dist.get_rank())).square().mean()
                _happen(at, "between")
                if backwards:
                    loss.backward()
        (self._optimizer or self.engine).step()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        _happen(at, "after")


class TensorParallel:
    """An MLP of which every rank has a part."""

    def __init__(self) -> None:
        net = _small_net()
        self.module = ParallelMLP(net[0], net[2])

    def step(self, step: int, at: At) -> None:
        _happen(at, "before")
        loss = self.module(_batch(step).requires_grad_()).square().mean()
        _happen(at, "between")
        loss.backward()
        _happen(at, "after")


class Moment(nn.Module):
    """Something happens in the forward pass of a stage: its sends and receives have begun by then."""

    at: At = {}  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _happen(self.at, "between")
        return x


class Pipelined:
    """A stage of eight layers for each rank."""

    def __init__(self) -> None:
        ranks = dist.get_world_size()
        stage = cut_by_layers([*_small_net(), *list(_small_net())[:3]], ranks)[dist.get_rank()]
        self._moment = Moment()
        stage = nn.Sequential(stage, self._moment)
        self._pipeline = Pipeline([stage], Schedule(one_f_one_b, ranks, 4), F.mse_loss)

    def step(self, step: int, at: At) -> None:
        _happen(at, "before")
        self._moment.at = at
        self._pipeline.step(_batch(step), _batch(step))
        _happen(at, "after")


TRAINERS: dict[str, Callable[..., Any]] = {
    "naive": partial(Replicated, NaiveDataParallel),
    "bucketed": partial(Replicated, BucketedDataParallel),
    "zero1": partial(Replicated, lambda net: Zero1(net, SGD)),
    "zero2": partial(Replicated, lambda net: Zero2(net, SGD)),
    "zero3": partial(Replicated, lambda net: Zero3(net, SGD)),
    "tp": TensorParallel,
    "pp": Pipelined,
}


class Drawn(NamedTuple):
    """What is drawn of a case: one of the fault's ways and a trainer, the rank to blame, the step."""

    how: str
    trainer: str
    who: int
    when: int

    @property
    def mine(self) -> bool:
        return dist.get_rank() == self.who


def _ways(how: Iterable[str], trainers: Iterable[str] = TRAINERS) -> list[str]:
    return [f"{one}, {trainer}" for one in how for trainer in trainers]


def _told(case: Case, run: Callable[[Drawn], object], says: str, at_limit: str | None = None) -> str:
    """The error of a World whose ranks each call ``run``; its first line has to match ``says``.

    Where no rank can know more than that another one does not come, the run may end at its limit instead, with a first
    line, or a stack of the rank to blame, that matches ``at_limit``. In both {who} is that rank.
    """
    how, trainer = case.way.split(", ")
    ranks = case.rng.choice((2, 4) if trainer == "tp" else (2, 2, 3, 4))
    drawn = Drawn(how, trainer, case.rng.randrange(ranks), case.rng.randrange(3))
    with working(World(ranks)) as ours:
        try:
            result = ours.run(run, drawn, timeout_s=LONG_S if at_limit is None else LIMIT_S)
        except RankTimeout as error:
            told, text = first_line(error), f"{first_line(error)}\n{error.stacks.get(drawn.who, '')}"
            right = at_limit is not None and re.search(at_limit.format(who=drawn.who), text)
        except (RankFailed, RankDied) as error:
            told = first_line(error)
            right = re.search(says.format(who=drawn.who), told)
        else:
            raise Wrong(f"no error, but a result: {result} [{drawn} of {ranks}]")
        case.expect(right, f"{told} [{drawn} of {ranks}]")
    return told


def _train(do: Callable[[], object], drawn: Drawn) -> None:
    """Trains; at a moment of step ``drawn.when`` the rank to blame calls ``do``."""
    trainer = TRAINERS[drawn.trainer]()
    for step in range(4):
        trainer.step(step, {drawn.how: do} if drawn.mine and step == drawn.when else {})


MOMENTS = ("before", "between", "after")


@fault("ranks/raises", _ways(MOMENTS))
def _raises(case: Case) -> str:
    return _told(case, partial(_train, world.throw), "^rank {who}: RuntimeError: on purpose")


@fault("ranks/killed", _ways(MOMENTS))
def _killed(case: Case) -> str:
    return _told(case, partial(_train, world.kill), "^rank {who} died: killed by SIGKILL")


@fault("ranks/sleeps", _ways(MOMENTS))
def _sleeps(case: Case) -> str:
    return _told(case, partial(_train, world.sleep), "did not finish", at_limit=r", line \d+ in sleep")


# To ZeRO-1 a backward pass more or less is a micro-batch of that rank.
@fault("ranks/backward", _ways(("skipped", "twice"), ("naive", "bucketed", "zero2", "zero3")))
def _backward(case: Case) -> str:
    """A rank leaves a backward pass out, or makes one more."""
    return _told(case, _other_backwards, "backward|forward pass|differ", at_limit="")


def _other_backwards(drawn: Drawn) -> None:
    trainer = TRAINERS[drawn.trainer]()
    for step in range(4):
        odd = drawn.mine and step == drawn.when
        trainer.step(step, {}, backwards={"skipped": 0, "twice": 2}[drawn.how] if odd else 1)


@fault("ranks/fewer batches", _ways(("",)))
def _fewer_batches(case: Case) -> str:
    """A rank has fewer batches than the others."""
    return _told(case, _fewer, "batch|step|closed|join|did not finish", at_limit=r"\(rank {who} did\)")


def _fewer(drawn: Drawn) -> None:
    trainer = TRAINERS[drawn.trainer]()
    for step in range(drawn.when if drawn.mine else 4):
        trainer.step(step, {})


@fault("ranks/no_sync", _ways(("",), ("naive", "bucketed")))
def _no_sync(case: Case) -> str:
    """A rank leaves the exchange of one step out, and so is ahead of the others."""
    # it ends first: its neighbours see that in what they await, or in what they send
    lost = r"(closed the connection|cannot send to rank \d of the group: .*), in .* of forward pass \d"
    return _told(case, _one_without_sync, f"no_sync|differ|{lost}", at_limit="")


def _one_without_sync(drawn: Drawn) -> None:
    trainer = TRAINERS[drawn.trainer]()
    for step in range(4):
        trainer.step(step, {}, synchronised=not (drawn.mine and step == drawn.when))
