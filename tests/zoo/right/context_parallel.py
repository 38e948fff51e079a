"""Sequences that are cut over ranks, rightly, with data parallelism around them: ring attention, and Ulysses."""

from functools import partial

import common
import torch
import torch.distributed as dist

from pardemo.context_parallel import cut, ring_attention, ulysses_attention
from pardemo.data_parallel import BucketedDataParallel
from pardemo.groups import Groups, ParallelDims


def main():
    args = common.arguments()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    with Groups(ParallelDims(tp=args.cp, dp=world // args.cp)) as groups:
        train(args, groups.tp, world, groups)


def train(args, group, world, groups):
    ranks, rank = world // args.cp, dist.get_rank(groups.dp)
    order = "zigzag" if "zigzag" in args.way else "plain"
    model = common.model_of(args)
    for block in model.layers.values():
        ring = partial(ring_attention, group=group, causal=True, order=order)
        block.attention.core = ring if args.engine == "ring" else partial(ulysses_attention, group=group, causal=True)
    wrapped = BucketedDataParallel(model)  # over all ranks: each has gradients of its own tokens
    torch.manual_seed(100 + dist.get_rank())
    optimizer = common.optimizer_of(args, model.parameters())
    schedule = common.schedule_of(args, optimizer)
    mine = partial(cut, dim=1, group=group, order=order)
    for step in range(common.STEPS):
        total = 0.0
        for inputs, targets, loss_of in common.micro_batches(args, step, ranks, rank):
            at = cut(torch.arange(args.sequence), group, 0, order)
            loss = loss_of(wrapped(mine(inputs), at), mine(targets))
            loss.backward()
            total += loss.detach()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        common.show(step, total, world)


if __name__ == "__main__":
    main()
