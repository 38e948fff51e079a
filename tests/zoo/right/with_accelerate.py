"""Accelerate's DDP, rightly: gradients are accumulated as its guide says."""

import common
import torch
import torch.distributed as dist
from accelerate import Accelerator


def main():
    args = common.arguments()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = common.model_of(args)
    optimizer = common.optimizer_of(args, model.parameters())
    schedule = common.schedule_of(args, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(100 + rank)
    for step in range(common.STEPS):
        total = 0.0
        for inputs, targets, loss_of in common.micro_batches(args, step, ranks, rank):
            with accelerator.accumulate(model):
                loss = loss_of(model(inputs), targets)
                accelerator.backward(loss * args.accumulate)  # which divides by it
                if args.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        schedule.step()
        common.show(step, total, ranks)


if __name__ == "__main__":
    main()
