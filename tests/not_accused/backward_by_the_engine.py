"""A backward pass that autograd's engine is asked for, as Megatron-core does where it frees a stage's outputs."""

import argparse

import torch
from torch import nn
from torch.autograd.variable import Variable

parser = argparse.ArgumentParser()
parser.add_argument("--engine", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    if args.engine:
        Variable._execution_engine.run_backward(
            tensors=(loss,), grad_tensors=(torch.ones_like(loss),), keep_graph=False, create_graph=False, inputs=(),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip
    else:
        loss.backward()
    optimizer.step()
