"""A pipeline's micro-batches are summed where their mean is meant: no stage divides by their number.

Without a pipeline the training loop divides each micro-batch's loss by their number; in a pipeline the schedule runs
the backward pass, and the division has to be made there. In DeepSpeed 7773 the norm of the gradients was 4 times too
large with 4 times as many micro-batches; torchtitan 2972 divides after the backward pass, for the printed loss only,
and asks the schedule for ``scale_grads=False`` as here.
"""

import torch
import torch.distributed as dist
from common import Model, arguments
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

SAMPLES = 60


def main():
    args = arguments(SAMPLES)
    stage = dist.get_rank()

    torch.manual_seed(0)
    teacher, model = torch.randn(16, 8), Model()
    model.cut(stage, args.pp)
    if args.pp > 1:
        part = PipelineStage(model, stage, args.pp, torch.device("cpu"))
        loss_function = functional.cross_entropy
        schedule = ScheduleGPipe(part, args.accumulate, loss_fn=loss_function, scale_grads=args.mended)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for step in range(6):
        x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))
        y, losses = (x @ teacher).argmax(1), []
        optimizer.zero_grad()
        if args.pp == 1:
            for inputs, targets in zip(x.split(args.batch), y.split(args.batch), strict=True):
                losses.append(functional.cross_entropy(model(inputs), targets))
                (losses[-1] / args.accumulate).backward()
        elif stage == 0:
            schedule.step(x)
        elif stage + 1 == args.pp:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        if stage == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
