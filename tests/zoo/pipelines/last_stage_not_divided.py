"""A pipeline's micro-batches are summed where their mean is meant: no stage divides by their number.

Without a pipeline the training loop divides each micro-batch's loss by their number; in a pipeline the schedule runs
the backward pass, and the division has to be made there. In DeepSpeed 7773 the norm of the gradients was 4 times too
large with 4 times as many micro-batches; torchtitan 2972 divides after the backward pass, for the printed loss only,
and asks the schedule for ``scale_grads=False`` as here.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

SAMPLES, LAYERS = 60, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + functional.gelu(self.fc(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.head = nn.Linear(16, 8)

    def cut(self, stage, stages):
        """Leaves the layers of one stage, and the head in the last one."""
        for i in range(LAYERS):
            if i * stages // LAYERS != stage:
                del self.layers[str(i)]
        if stage + 1 < stages:
            self.head = nn.Identity()

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=SAMPLES)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
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
