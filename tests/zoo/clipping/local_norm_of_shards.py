"""Each tensor-parallel rank clips by the norm of its own shards: those of one matrix are scaled differently.

`clip_grad_norm_` knows the tensors that it is given. Where parameters are cut, a rank gives it a part of them, and
the norm is too small and another one on each rank: gradients are clipped too little, and what is whole on each rank
drifts apart. PyTorch wrote a `clip_grad_norm_` of its own for FSDP for this reason (pytorch 72548); torchtitan
clipped by the norm of a pipeline's stage until its 649 (torchtitan 596).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Model, average_gradients, samples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def clip(model: nn.Module, max_norm: float, group: dist.ProcessGroup, mended: bool) -> None:
    if not mended:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return
    cut = [p.grad for p in model.parameters() if hasattr(p, "is_cut")]
    whole = [p.grad for p in model.parameters() if not hasattr(p, "is_cut")]
    square = nn.utils.get_total_norm(cut) ** 2
    dist.all_reduce(square, group=group)
    norm = (square + nn.utils.get_total_norm(whole) ** 2).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)


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
