"""Master weights are stale: the working weights are replaced after the optimizer copied them, and it is not told.

A mixed-precision optimizer updates fp32 copies and writes them over the model's bf16 weights. Here the ranks get rank
0's weights by a broadcast after the copies were made, as after loading a checkpoint of weights only; the first update
of the other ranks brings their old weights back. With bf16 a pretrained model was trained from scratch this way
(megablocks 80), and a restored checkpoint was overwritten at the next step (SkyRL 2149).
"""

import torch
import torch.distributed as dist
from common import STEPS, Block, LanguageModel, arguments, average_gradients, backward, micro_batches, show
from torch import nn

args = arguments()
torch.manual_seed(100 + dist.get_rank())  # ranks differ until the broadcast
model = LanguageModel(Block())
masters = [nn.Parameter(weight.detach().clone()) for weight in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
for weight, master in zip(model.parameters(), masters, strict=True):
    dist.broadcast(weight.data, 0)
    if args.mended:
        master.data.copy_(weight.data)
for step in range(STEPS):
    model.zero_grad()
    total = backward(model, micro_batches(args, step))
    average_gradients(model.parameters())
    for weight, master in zip(model.parameters(), masters, strict=True):
        master.grad = weight.grad
    optimizer.step()
    for weight, master in zip(model.parameters(), masters, strict=True):
        weight.data.copy_(master.data)
    show(step, total)
