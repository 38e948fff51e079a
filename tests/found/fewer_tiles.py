"""TiledMLP that gets fewer tiles than it asked for leaves ZeRO without the last gradient (deepspeed 0.19.8)."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--tiles", type=int, default=4)
parser.add_argument("--stage", type=int, default=2)
args = parser.parse_args()
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
dist.init_process_group("gloo")
torch.manual_seed(0)
first, up, down = (nn.Linear(8, 8, bias=False) for _ in range(3))
model = nn.Sequential(first, up, down)
weights = [up.weight, down.weight]
mlp = lambda _, x: F.linear(F.linear(x, up.weight).tanh(), down.weight)  # noqa: E731
tiled = lambda x: TiledMLP.apply(mlp, model, x, args.tiles, weights) if args.tiles else mlp(None, x)  # noqa: E731
model.forward = lambda x: tiled(first(x))
zero = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": args.stage}}
settings = {"train_batch_size": 2, "gradient_clipping": 0.0, **zero}
engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=settings)[0]
for step in range(3):
    samples = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1 + step))  # 9 tokens: 3 tiles of 3, not 4
    loss = engine(samples.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
    engine.backward(loss)
    engine.step()
    dist.all_reduce(loss.detach_().div_(dist.get_world_size()))
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f} norm of the second weight {up.weight.norm().item():.6f}")
