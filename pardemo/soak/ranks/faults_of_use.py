"""Scripts that ask for what no engine can give, on one rank or on all; and collectives that do not belong together."""

import copy
import pickle
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives import (
    parameter_server_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from pardemo.data_parallel import NaiveDataParallel
from pardemo.soak.ranks.fault import FaultCase, fault
from pardemo.soak.ranks.trainers import ENGINES, TRAINERS, Pipelined, small_net

AVERAGED = ("naive", "bucketed")


def _of_a_script(hook: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    """The hook as a script's: the checks pass over those that the package itself registers."""
    hook.__module__ = "__main__"
    return hook


HOOKS = {
    "an optimizer in backward": _of_a_script(lambda p: torch.optim.SGD([p], 0.1).step()),
    "a doubled gradient": _of_a_script(lambda p: p.grad.mul_(2) if p.grad is not None else None),
    "a gradient taken away": _of_a_script(lambda p: setattr(p, "grad", None)),
}


@fault("hook", "has a hook by register_post_accumulate_grad_hook", HOOKS, (*AVERAGED, "pp"))
def _hook(case: FaultCase) -> None:
    """From the step on, on all ranks: in a pipeline's stages, too, which see a micro-batch at a time."""
    trainer = TRAINERS[case.trainer]()
    for step in range(3):
        if step == case.when:
            parameter = next(p for p in trainer.module.parameters() if p.requires_grad)
            parameter.register_post_accumulate_grad_hook(HOOKS[case.how])
        trainer.step(step)


@fault("hook before wrapping", "rank {who}: .*has a hook by register_post", HOOKS, AVERAGED)
def _hook_before_wrapping(case: FaultCase) -> None:
    net = small_net()
    if case.mine:
        net.get_parameter("2.weight").register_post_accumulate_grad_hook(HOOKS[case.how])
    ENGINES[case.trainer](net=net)


@fault("frozen later", r"rank {who}: .*frozen since wrapping", ("a weight", "a layer"), AVERAGED)
def _frozen_later(case: FaultCase) -> None:
    trainer = ENGINES[case.trainer]()
    for step in range(3):
        if case.mine and step == case.when:
            (trainer.module[2].weight if case.how == "a weight" else trainer.module[2]).requires_grad_(False)
        trainer.step(step)


@fault("graph of gradients", r"backward\(create_graph=True\) on a data-parallel module", trainers=AVERAGED)
def _graph_of_gradients(case: FaultCase) -> None:
    trainer = ENGINES[case.trainer]()
    for step in range(case.when):
        trainer.step(step)
    trainer.engine(trainer.batch(9)).square().mean().backward(create_graph=True)


@fault("autograd.grad", "gives this rank's gradients", trainers=AVERAGED)
def _autograd_grad(case: FaultCase) -> None:
    """Told by a warning, which is an error here."""
    import warnings

    trainer = ENGINES[case.trainer]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.autograd.grad(trainer.engine(trainer.batch(9)).sum(), list(trainer.module.parameters()))


@fault(
    "copy", "", ("trained", "pickled"), AVERAGED, by_way={"trained": "averages no grad", "pickled": "holds connections"}
)
def _a_copy(case: FaultCase) -> None:
    trainer = ENGINES[case.trainer]()
    trainer.step(0)
    if case.how == "pickled":
        pickle.dumps(trainer.engine)
    copy.deepcopy(trainer.engine)(trainer.batch(1)).sum().backward()


SUMS: dict[str, Callable[[torch.Tensor], object]] = {
    "ring": ring_all_reduce,
    "reduce-scatter": ring_reduce_scatter,
    "all-gather": ring_all_gather,
    "broadcast": ring_broadcast,
}


@fault("server beside a ring", r"at different exchanges \(.*rank {who}: .*by rank 0", SUMS)
def _server_beside_a_ring(case: FaultCase) -> None:
    for step in range(3):
        served = case.mine and step == case.when
        (parameter_server_all_reduce if served else SUMS[case.how])(torch.ones(6))


@fault("ways of averaging", "rank {who} has NaiveDataParallel|rank 0 has NaiveDataParallel by", ("server", "own"))
def _ways_of_averaging(case: FaultCase) -> None:
    own = {"server": parameter_server_all_reduce, "own": lambda tensor, group: dist.all_reduce(tensor, group=group)}
    NaiveDataParallel(small_net(), all_reduce=own[case.how] if case.mine else ring_all_reduce)


SHAPES = {"shape": (3, 1, 1, 1, 2, 1, 1, 1, 1), "one more": (2, 1, 1, 1, 3, 1, 1, 1, 1, 1), "flat": (6,)}


@fault("nine dimensions", r"the ranks' tensors differ \(.*rank {who}: ", [f"{c}, {s}" for c in SUMS for s in SHAPES])
def _nine_dimensions(case: FaultCase) -> None:
    collective, shape = case.how.split(", ")
    SUMS[collective](torch.ones(SHAPES[shape] if case.mine else (2, 1, 1, 1, 3, 1, 1, 1, 1)))


SHARING = {"expanded": lambda t: t[:, :1].expand(4, 4), "windows": lambda t: t[0].unfold(0, 2, 1)}


@fault("shared memory", "share memory", [f"{c}, {v}" for c in ("ring", "broadcast", "server") for v in SHARING])
def _shared_memory(case: FaultCase) -> None:
    collective, view = case.how.split(", ")
    {**SUMS, "server": parameter_server_all_reduce}[collective](SHARING[view](torch.ones(4, 4)))


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


@fault("stage in place", "changes its input in place, and checkpointing", trainers=("pp",))
def _stage_in_place(case: FaultCase) -> None:
    trainer = Pipelined()
    trainer.pipeline.checkpointing = True
    trainer.module.insert(0, InPlace())
    trainer.step(0)
