"""A step of Muon on sharded matrices, by torch, by this package and by DeepSpeed, compared with one process."""

import contextlib
import copy
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from pardemo.meters import WireMeter
from pardemo.optimizers import ShardedMuon
from pardemo.small_models import gpt
from pardemo.world.rank import device

LR = 0.02
STEPS = 2


class MuonStep(NamedTuple):
    """One rank's view of training with Muon.

    Attributes:
        error: of the parameters' movement, against ``torch.optim.Muon`` in one process (0: the same bits).
        sent: numbers of 16 bits for each parameter that this rank sent in the last step of the optimizer.
        kept: bytes of momentum for each parameter.
        seconds: of the last step.
    """

    error: float
    sent: float
    kept: float
    seconds: float


def muon_step(way: str, rows: int, columns: int, layers: int) -> MuonStep:
    """Two steps with the same gradients, by ``torch, DDP``, ``torch, FSDP2`` or ``ShardedMuon``. Collective.

    Under DDP every rank has whole gradients when the optimizer begins, and under FSDP2 its rows of them: they are given
    here, so that what is measured is the optimizer alone.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    alone = gpt.linear_stack(columns, layers, rows).to(device())
    module, begin = copy.deepcopy(alone), [p.detach().clone() for p in alone.parameters()]
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    sharded = way != "torch, DDP"
    if sharded:
        fully_shard(module, mesh=mesh)
    kind = ShardedMuon if way == "ShardedMuon" else torch.optim.Muon
    optimizer, truth = kind(module.parameters(), lr=LR), torch.optim.Muon(alone.parameters(), lr=LR)
    for step in range(STEPS):
        for index, (mine, plain) in enumerate(zip(module.parameters(), alone.parameters(), strict=True)):
            plain.grad = gpt.numbers(rows, columns, seed=100 * step + index).to(device())
            mine.grad = distribute_tensor(plain.grad, mesh, [Shard(0)], src_data_rank=None) if sharded else plain.grad
        truth.step()
        with WireMeter() as wire:
            started = time.perf_counter()
            optimizer.step()
            seconds = time.perf_counter() - started
    parameters = [p.full_tensor() if sharded else p for p in module.parameters()]
    triples = zip(parameters, alone.parameters(), begin, strict=True)
    error = max(gpt.relative_error(mine.detach() - old, plain.detach() - old) for mine, plain, old in triples)
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    numbers = rows * columns * layers
    kept = sum((momentum.to_local() if sharded else momentum).nbytes for momentum in momenta) / numbers
    return MuonStep(error, wire.sent_bytes / 2 / numbers, kept, seconds)


class EngineStep(NamedTuple):
    """One rank's view of a whole step of an engine of DeepSpeed.

    Attributes:
        error: of the parameters' movement, against ``torch.optim.Muon`` in one process; None with Adam.
        sent: numbers of 16 bits for each parameter, forward, backward and step.
        kept: bytes of optimizer states for each parameter.
    """

    error: float | None
    sent: float
    kept: float


def deepspeed_step(stage: int, optimizer: str, width: int, layers: int) -> EngineStep:
    """Two steps of DeepSpeed's ZeRO with ``Muon`` or ``Adam``, each rank with samples of its own. Collective."""
    from pardemo.peers.deepspeed import engine as peer

    module = gpt.linear_stack(width, layers).to(device(), torch.bfloat16)
    alone = copy.deepcopy(module).float()
    begin = [p.detach().clone() for p in alone.parameters()]
    # stage 3 refuses Muon together with its reduce-scatter
    settings = peer.zero_settings(stage, reduce_scatter=stage < 3)
    if optimizer == "Muon":
        rates = {"lr": LR, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "standard"}
        settings["optimizer"] = {"type": "Muon", "params": rates}
    running, truth = peer.engine(module, settings), torch.optim.Muon(alone.parameters(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        inputs = [gpt.numbers(2 * width, width, seed=10 * step + rank).to(device(), torch.bfloat16)
                  for rank in range(dist.get_world_size())]  # fmt: skip
        truth.zero_grad()
        for x in inputs:
            (alone(x.float()).square().mean() / len(inputs)).backward()
        truth.step()
        # without torch's compiler: its first step would take half a minute, for the same update
        with torch.compiler.set_stance("force_eager"), WireMeter() as wire:
            running.backward(running(inputs[dist.get_rank()]).float().square().mean())
            running.step()
    with peer.gathered_parameters(running.module) if stage == 3 else contextlib.nullcontext():
        now = [p.detach().float().clone() for p in running.module.parameters()]
    numbers = width**2 * layers
    kept = sum(t.nbytes for t in peer.states(running)["optimizer states"]) / numbers
    triples = zip(now, alone.parameters(), begin, strict=True)
    error = max(gpt.relative_error(mine - old, plain.detach() - old) for mine, plain, old in triples)
    peer.close(running)
    return EngineStep(error if optimizer == "Muon" else None, wire.sent_bytes / 2 / numbers, kept)


def megatron_layer_wise(width: int, layers: int) -> MuonStep:
    """Megatron-core's layer-wise distributed optimizer around torch's Muon: each rank updates its own matrices, and
    all gather the new weights. Collective."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    from pardemo.peers import megatron

    module = gpt.linear_stack(width, layers).to(device())
    alone = copy.deepcopy(module)
    begin = [p.detach().clone() for p in alone.parameters()]
    inner, truth = (torch.optim.Muon(model.parameters(), lr=LR) for model in (module, alone))
    with megatron.megatron():
        groups = ProcessGroupCollection.use_mpu_process_groups()
        outer = LayerWiseDistributedOptimizer([inner], OptimizerConfig(optimizer="adam"), groups)
        for step in range(STEPS):
            for index, (mine, plain) in enumerate(zip(module.parameters(), alone.parameters(), strict=True)):
                plain.grad = mine.grad = gpt.numbers(width, width, seed=100 * step + index).to(device())
            truth.step()
            with WireMeter() as wire:
                started = time.perf_counter()
                inner.step()  # this rank's matrices: the wrapper has taken the others out
                outer.allgather_params()
                seconds = time.perf_counter() - started
    numbers = width**2 * layers
    triples = zip(module.parameters(), alone.parameters(), begin, strict=True)
    error = max(gpt.relative_error(mine.detach() - old, plain.detach() - old) for mine, plain, old in triples)
    kept = sum(state["momentum_buffer"].nbytes for state in inner.state.values()) / numbers
    return MuonStep(error, wire.sent_bytes / 2 / numbers, kept, seconds)
