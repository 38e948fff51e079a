"""Uneven micro-batches of a pipeline weigh the same: samples of the last, smaller one count for more.

A batch of 50 cut into micro-batches of 20, 20 and 10 gives three means, and the last stage takes the mean of these;
each of the last ten samples then weighs 1/30 instead of 1/50. Uneven micro-batches in PyTorch's
pipelining: pytorch 126600; equal weights of unequal micro-batches, with a loss that looks right: Soup 932, keras
20241.
"""

import torch
import torch.distributed as dist
from common import Model, arguments
from torch.nn import functional

SAMPLES = 50


def main():
    args = arguments(SAMPLES)
    stage, last = dist.get_rank(), args.pp - 1

    torch.manual_seed(0)
    teacher, model = torch.randn(16, 8), Model()
    model.cut(stage, args.pp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    for step in range(6):
        whole = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))
        total, waiting = torch.zeros(()), []
        optimizer.zero_grad()
        for x in whole.split(args.batch):  # all forward passes, then all backward passes
            y, share = (x @ teacher).argmax(1), len(x) / SAMPLES if args.mended else 1 / args.accumulate
            if stage > 0:
                x = torch.empty_like(x)
                dist.recv(x, stage - 1)
                x.requires_grad_()
            output = model(x)
            if stage < last:
                dist.send(output.detach(), stage + 1)
            else:
                output = functional.cross_entropy(output, y) * share
                total += output.detach()
            waiting.append((x, output))
        for x, output in waiting:
            gradient = None
            if stage < last:
                gradient = torch.empty_like(output)
                dist.recv(gradient, stage + 1)
            output.backward(gradient)
            if stage > 0:
                dist.send(x.grad, stage - 1)
        optimizer.step()
        dist.all_reduce(total)
        if stage == 0:
            print(f"step {step} loss {total.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
