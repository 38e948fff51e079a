"""AutoTP does not sum the gradient that a column-parallel layer gives a transposed input (deepspeed 0.19.8)."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--copy", type=int, default=0)
args = parser.parse_args()
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
dist.init_process_group("gloo")


class Turn(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2).contiguous() if args.copy else x.transpose(1, 2)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 12), Turn(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))  # mixes 16 tokens
kinds = {"column": r".*2\.weight$", "row": r".*4\.weight$"}
specs = [{"patterns": [pattern], "partition_type": kind} for kind, pattern in kinds.items()]
parallel = {"autotp_size": args.tp, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "tensor_parallel": parallel}
engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings)[0]
for step in range(3):
    loss = engine(torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(1 + step))).square().mean()
    engine.backward(loss)
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.6f} norm of the first gradient {model[0].weight.grad.norm():.6f}")
    engine.step()
