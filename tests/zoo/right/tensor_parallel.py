"""Tensor parallelism, rightly, with data parallelism around it: torch's parallelize_module, and our layers."""

from functools import partial

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pardemo.data_parallel import BucketedDataParallel
from pardemo.groups import Groups, ParallelDims
from pardemo.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelMLP,
    VocabParallelEmbedding,
    gather_from,
    gather_sequence,
    on_shards,
    scatter_sequence,
)


def cut_by_torch(args, model, mesh):
    """The plan of PyTorch's tutorial; the embedding and the head are cut where the layout says so."""
    sequence = "sequence" in args.way
    plan = {} if not sequence else {"norm": SequenceParallel()}
    if "vocabulary" in args.way:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    if "vocabulary" in args.way or sequence:
        before = Shard(1) if sequence else Replicate()
        plan["head"] = ColwiseParallel(input_layouts=before, output_layouts=Replicate())
    for name in model.layers:
        at = f"layers.{name}"
        output = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
        plan |= {f"{at}.attention.{part}": ColwiseParallel() for part in "qkv"}
        plan |= {f"{at}.mlp.{part}": ColwiseParallel() for part in (("up", "gate") if args.gated else ("up",))}
        plan |= {f"{at}.{part}": RowwiseParallel(**output) for part in ("attention.out", "mlp.down")}
        if sequence:
            inner = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {f"{at}.{part}": SequenceParallel() for part in ("norm_1", "norm_2")}
            plan |= {f"{at}.{part}": inner for part in ("attention", "mlp")}
    if sequence:
        plan["layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False
        )
    # a tied weight has two names, and is two parameters from here on until it is tied again
    trained = {name: one.requires_grad for name, one in model.named_parameters(remove_duplicate=False)}
    parallelize_module(model, mesh, plan)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])  # SequenceParallel makes frozen norms anew, and trains them
    if args.tied:
        model.head.weight = model.embed.weight
    return model


class Head(nn.Module):
    """Logits of all tokens from this rank's, each rank's for its part of the vocabulary, put together."""

    def __init__(self, head, group, sequence):
        super().__init__()
        self.linear = ColumnParallelLinear(head, group, sequence_parallel=sequence)

    def forward(self, x):
        return gather_from(self.linear(x), self.linear.group)


class OnShards(nn.Module):
    def __init__(self, norm, group):
        super().__init__()
        self.norm, self.group = norm, group

    def forward(self, x):
        return on_shards(self.norm, self.group, x)


class Sequence(nn.Module):
    """Each rank keeps its tokens; or has all of them again."""

    def __init__(self, change, group):
        super().__init__()
        self.change, self.group = change, group

    def forward(self, x):
        return self.change(x, self.group)


def cut_by_pardemo(args, model, group):
    sequence = "sequence" in args.way
    layers = nn.ModuleDict({"scatter": Sequence(scatter_sequence, group)} if sequence else {})
    for name, block in model.layers.items():
        own = block.attention
        attention = ParallelAttention(
            [own.q, own.k, own.v], own.out, args.heads, args.heads // args.gqa, group, sequence_parallel=sequence
        )
        first = [block.mlp.gate, block.mlp.up] if args.gated else block.mlp.up
        mlp = ParallelMLP(first, block.mlp.down, group, sequence_parallel=sequence)
        layers[name] = ParallelBlock(block.norm_1, attention, block.norm_2, mlp)
    model.layers = layers
    if "vocabulary" in args.way:
        model.embed = VocabParallelEmbedding(model.embed, group)
        model.norm = OnShards(model.norm, group) if sequence else model.norm
        model.head = Head(model.head, group, sequence)
        if args.tied:
            model.head.linear.weight = model.embed.weight
    elif sequence:
        layers["gather"] = Sequence(lambda x, group: gather_sequence(x, group, whole_gradient=True), group)
    return model


def clip(args, model):
    """By the norm of the whole model, whose parameters are of several meshes, or of none."""
    by_mesh = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    if len(by_mesh) == 1:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip, foreach=False)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in own], foreach=False) for own in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack(norms).norm()
    for own in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(own, args.clip, total, foreach=False)


def train(args, model, ranks, rank, group):
    zero = args.engine == "tensor_zero"
    optimizer = model.optimizer if zero else common.optimizer_of(args, model.parameters(), foreach=False)
    schedule = common.schedule_of(args, optimizer)
    for step in range(common.STEPS):
        total = 0.0
        for inputs, targets, loss_of in common.micro_batches(args, step, ranks, rank):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters() if group is not None else ():
            if parameter.grad is not None:
                own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                dist.all_reduce(own, group=group)
                own /= ranks
        if args.clip and not zero:
            clip(args, model)
        (model if zero else optimizer).step()
        schedule.step()
        optimizer.zero_grad()
        common.show(step, total, dist.get_world_size())


def main():
    args = common.arguments()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size() // args.tp
    rank, place = divmod(dist.get_rank(), args.tp)
    model = common.model_of(args)
    # tokens that a rank has for itself are dropped by numbers of its own
    torch.manual_seed(100 + (dist.get_rank() if "sequence" in args.way else rank))
    if args.engine == "dtensor":
        mesh = init_device_mesh("cpu", (ranks, args.tp), mesh_dim_names=("dp", "tp"))
        cut_by_torch(args, model, mesh["tp"])
        shards = "fsdp" in args.way and ranks > 1
        if shards:
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        train(args, model, ranks, rank, None if shards else mesh["dp"].get_group())
    else:
        with Groups(ParallelDims(tp=args.tp, dp=ranks)) as groups:
            cut_by_pardemo(args, model, groups.tp)
            wrap = partial(common.zero_of, args) if args.engine == "tensor_zero" else BucketedDataParallel
            train(args, wrap(model, groups.dp), ranks, rank, None)


if __name__ == "__main__":
    main()
