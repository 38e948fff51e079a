"""ZeRO-3 with gradient_predivide_factor equal to the number of ranks divides gradients twice (deepspeed 0.19.8)."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--predivide", type=float, default=2.0)
args = parser.parse_args()
dist.init_process_group("gloo")
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
settings = {
    "train_micro_batch_size_per_gpu": 8 // ranks,
    "gradient_predivide_factor": args.predivide,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": args.stage, "reduce_scatter": False},
}
engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=settings)[0]
for step in range(3):
    samples = torch.randn(8, 16, generator=torch.Generator().manual_seed(1 + step)).chunk(ranks)[rank]
    loss = engine(samples).square().mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {total.item() / ranks:.6f} norm of the gradient {engine.get_global_grad_norm():.6f}")
