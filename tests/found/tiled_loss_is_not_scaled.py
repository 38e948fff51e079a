"""TiledFusedLogitsLoss leaves the scale of the loss out of the head's gradient (deepspeed 0.19.8)."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--tiles", type=int, default=4)
args = parser.parse_args()
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
dist.init_process_group("gloo")
loss_of = lambda head, x, y: F.cross_entropy(F.linear(x, head.weight).flatten(0, -2), y.flatten())  # noqa: E731
torch.manual_seed(0)
body, head = nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
model = nn.Sequential(body, head)
model.forward = lambda x, y: (
    TiledFusedLogitsLoss.apply(loss_of, head, body(x), y, None, args.tiles, [head.weight], "mean")
    if args.tiles else loss_of(head, body(x), y))  # fmt: skip
settings = {"train_batch_size": 8, "gradient_accumulation_steps": args.accumulate, "gradient_clipping": 0.0}
engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings)[0]
for step in range(3):
    samples = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(1 + step))
    for x in samples.chunk(args.accumulate):
        engine.backward(engine(x, x.argmax(-1)))
        norms = [f"{one.weight.grad.norm().item():.6f}" for one in (body, head)]
        engine.step()
    print(f"step {step} norms of the gradients of body and head {' '.join(norms)}")
