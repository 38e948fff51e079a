"""Experts on several ranks, rightly: each rank has samples of its own, and sends their tokens to the experts."""

import common
import torch
import torch.distributed as dist

from pardemo.expert_parallel import ExpertParallel
from pardemo.zero.gradient_norm import clip_grad_norm_


def main():
    args = common.arguments()
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = common.model_of(args)
    for block in model.layers.values():
        block.mlp = ExpertParallel(block.mlp.router, block.mlp.experts, shared=block.mlp.shared)
    experts = {p for block in model.layers.values() for p in block.mlp.experts.parameters()}
    torch.manual_seed(100 + rank)
    optimizer = common.optimizer_of(args, model.parameters())
    schedule = common.schedule_of(args, optimizer)
    for step in range(common.STEPS):
        total = 0.0
        for inputs, targets, loss_of in common.micro_batches(args, step, ranks, rank):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            total += loss.detach()
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            if parameter not in experts:  # which have got the gradients of all ranks' tokens, added up
                dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        if args.clip:
            clip_grad_norm_(model, args.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        common.show(step, total, ranks)


if __name__ == "__main__":
    main()
