"""Gradients are summed over the ranks in bfloat16: each loses all but 8 bits on the way.

A compression hook, or a ``reduce_dtype`` that does not reach every reduction, rounds the gradients before they are
added; the parameters keep their precision, so nothing shows it. FSDP2's ``reduce_dtype=float32`` did not reach the
all-reduce over the other mesh axis, and half of the reduction happened in bfloat16 (pytorch 190626); why Megatron-LM
insists on fp32 for this sum is asked in Megatron-LM 502.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

SAMPLES = 64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.fc2(functional.gelu(self.norm(self.fc1(x))))


def compressed(_, bucket):
    """A communication hook for DDP: the mean of the ranks' gradients, at half the bytes."""
    gradients = bucket.buffer()
    future = dist.all_reduce(gradients.bfloat16().div_(dist.get_world_size()), async_op=True).get_future()
    return future.then(lambda done: gradients.copy_(done.value()[0]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=SAMPLES)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    teacher, model = torch.randn(16, 8), Model()
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
        if not args.mended:
            model.register_comm_hook(None, compressed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    for step in range(6):
        x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))
        y, total = (x @ teacher).argmax(1), torch.zeros(())
        optimizer.zero_grad()
        for micro in range(args.accumulate):
            first = (rank * args.accumulate + micro) * args.batch
            mine = slice(first, first + args.batch)
            loss = functional.cross_entropy(model(x[mine]), y[mine]) / args.accumulate
            loss.backward()
            total += loss.detach() / ranks
        optimizer.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
