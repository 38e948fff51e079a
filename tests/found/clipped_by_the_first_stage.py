"""A pipeline without ZeRO in fp32 clips all stages by the first stage's norm (deepspeed 0.19.8)."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--zero", type=int, default=0)
args = parser.parse_args()
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
Pipeline = type(f"Pipeline{args.stages}", (PipelineModule,), {})  # the library's own, by another name
layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16)]
model = Pipeline(layers, num_stages=args.stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")
zero = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": args.zero}}
settings = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1, **zero}
engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=settings)[0]
for step in range(3):
    before = [p.detach().clone() for p in model.parameters()]
    x, y = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1 + step))
    engine.train_batch(iter(zip(x.chunk(2), y.chunk(2), strict=True)))
    squares = sum((p - q).detach().square().sum() for p, q in zip(model.parameters(), before, strict=True))
    dist.all_reduce(squares)
    if dist.get_rank() == 0:
        print(f"step {step} norm of the clipped gradient {squares.sqrt().item():.6f}")
