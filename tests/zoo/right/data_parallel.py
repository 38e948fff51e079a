"""Data parallelism, rightly: torch's DDP, FSDP1, FSDP2 and HSDP, sums by hand, and this package's engines."""

import contextlib

import common
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from pardemo.collectives import parameter_server_all_reduce, ring_all_reduce
from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel


def wrapped(args, model):
    """The model as the engine has it; parameters stay the model's own but for FSDP1's."""
    if args.engine in ("ddp", "ddp_zero"):
        return DistributedDataParallel(
            model, bucket_cap_mb=0.002, gradient_as_bucket_view="view" in args.way, static_graph="static" in args.way,
            find_unused_parameters="unused" in args.way,
        )  # fmt: skip
    if args.engine == "fsdp1":
        strategy = ShardingStrategy.SHARD_GRAD_OP if "grad_op" in args.way else ShardingStrategy.FULL_SHARD
        policy = ModuleWrapPolicy({common.Block}) if "blocks" in args.way else None
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, sharding_strategy=strategy, use_orig_params="original" in args.way,
            device_id=torch.device("cpu"), mixed_precision=MixedPrecision(),
        )  # fmt: skip
    if args.engine in ("fsdp2", "hsdp"):
        ranks = dist.get_world_size()
        shape, names = ((2, ranks // 2), ("replicate", "shard")) if args.engine == "hsdp" else ((ranks,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in model.layers.values() if "blocks" in args.way else ():
            fully_shard(layer, mesh=mesh, reshard_after_forward="keep" not in args.way)
        return fully_shard(model, mesh=mesh, reshard_after_forward="keep" not in args.way)
    unused = {"find_unused_parameters": "unused" in args.way}
    if args.engine == "naive":
        all_reduce = parameter_server_all_reduce if "server" in args.way else ring_all_reduce
        return NaiveDataParallel(model, all_reduce=all_reduce, **unused)
    if args.engine == "bucketed":
        small, overlap = "small" in args.way, "late" not in args.way
        return BucketedDataParallel(model, bucket_bytes=64 if small else 2048, overlap=overlap, **unused)
    return common.zero_of(args, model) if args.engine in common.ZERO else model


def without_sums(args, model, last):
    """Within it no gradient is summed, in all micro-batches but the last one where the layout says so."""
    if last or "no_sync" not in args.way:
        return contextlib.nullcontext()
    if args.engine in ("fsdp2", "hsdp"):
        model.set_requires_gradient_sync(False)
        return contextlib.nullcontext()
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def sum_by_hand(model, ranks):
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # of a layer that none of this rank's samples pass
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks


def clip(args, model):
    if args.engine == "fsdp1":
        model.clip_grad_norm_(args.clip)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)


def main():
    args = common.arguments()
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = wrapped(args, common.model_of(args))
    torch.manual_seed(100 + rank)  # replicas drop each their own
    if args.engine in common.ZERO:
        optimizer = model.optimizer
    elif args.engine == "ddp_zero":
        settings = {"lr": 0.01} if args.optimizer == "AdamW" else {"lr": 0.1}
        settings |= {"weight_decay": 0.1} if args.optimizer == "AdamW" else {}
        settings |= {"momentum": 0.9, "weight_decay": 0.01} if args.optimizer == "momentum" else {}
        kind = torch.optim.AdamW if args.optimizer == "AdamW" else torch.optim.SGD
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = ZeroRedundancyOptimizer(trained, optimizer_class=kind, **settings)
    else:
        optimizer = common.optimizer_of(args, model.parameters())
    schedule = common.schedule_of(args, optimizer)
    for step in range(common.STEPS):
        total = 0.0
        for number, (inputs, targets, loss_of) in enumerate(common.micro_batches(args, step, ranks, rank), 1):
            last = number == args.accumulate
            if last and args.engine in ("fsdp2", "hsdp"):
                model.set_requires_gradient_sync(True)
            with without_sums(args, model, last):
                loss = loss_of(model(inputs), targets)
                loss.backward()
            total += loss.detach()
        if args.engine == "by_hand":
            sum_by_hand(model, ranks)
        if args.clip and (args.engine not in common.ZERO or "clip" in args.way):
            clip(args, model)
        (model if args.engine in common.ZERO else optimizer).step()
        schedule.step()
        optimizer.zero_grad()
        common.show(step, total, ranks)


if __name__ == "__main__":
    main()
