"""DeepSpeed's PipelineModule, whose engine calls it by its forward."""

import argparse

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--pp", type=int, default=1)
args = parser.parse_args()
deepspeed.ops.__compatible_ops__ = {}
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU()]
model = PipelineModule(layers, num_stages=args.pp, loss_fn=nn.functional.mse_loss, partition_method="uniform")
settings = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings)[0]
for step in range(2):
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
    engine.train_batch(iter(zip(x.chunk(2), y.chunk(2), strict=True)))
