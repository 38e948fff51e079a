"""What is whole on each tensor-parallel rank is counted once for each rank in the norm, which is too large.

The squares of all gradients are summed over the tensor-parallel group, which is right for what is cut. Norms,
biases and the head are whole on each rank, and their squares are summed as often as there are ranks: clipping sets
in earlier than it should, more so the more ranks there are (NVIDIA-NeMo RL 3788).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Model, average_gradients, samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def clip(model: nn.Module, max_norm: float, group: dist.ProcessGroup, mended: bool) -> None:
    square = torch.zeros(())
    for p in model.parameters():
        once = hasattr(p, "is_cut") or not mended or dist.get_rank(group) == 0
        square += p.grad.square().sum() * once
    dist.all_reduce(square, group=group)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]

    torch.manual_seed(0)
    model = Model()
    if args.tp > 1:
        model.cut(tp.get_local_rank(), args.tp, tp.get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(6):
        x, y = samples(step, args.batch * args.accumulate * dp.size())
        printed = 0
        for m in range(args.accumulate):
            mine = torch.arange(args.batch) + (m * dp.size() + dp.get_local_rank()) * args.batch
            loss = F.mse_loss(model(x[mine]), y[mine]) / args.accumulate
            loss.backward()
            printed += loss.detach()
        average_gradients(model, dp.get_group())
        clip(model, 0.5, tp.get_group(), args.mended)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed, group=dp.get_group())
        if dist.get_rank() == 0:
            print(f"step {step} loss {printed / dp.size():.4f}")
