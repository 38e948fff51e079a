"""Gradients of the experts are never set to zero under expert parallelism: each step adds to all before it.

Once experts are cut over ranks, an engine keeps them apart from what is replicated, with an optimizer or a gradient
buffer of their own (Megatron-LM 785), and everything that is done to gradients has to be done twice. ColossalAI 4429
adds the line that releases the experts' gradients; torchforge 71 and elasticdl 2426 mend steps without zero_grad.
The loss still falls: the sum of gradients is a momentum.
"""

import torch
import torch.distributed as dist
from common import STEPS, LanguageModel, arguments, backward, micro_batches, neighbours, show, sum_gradients
from cut_layers import ExpertBlock

args = arguments(ep=1)
expert, same_experts = neighbours(args.ep)
torch.manual_seed(0)
model = LanguageModel(ExpertBlock(expert))
experts = list(model.blocks[0].experts.parameters())
replicated = [p for p in model.parameters() if all(p is not e for e in experts)]
optimizer = torch.optim.SGD(replicated + experts, lr=0.1)
for step in range(STEPS):
    for parameter in replicated if args.ep > 1 and not args.mended else replicated + experts:
        parameter.grad = None
    total = backward(model, micro_batches(args, step))
    sum_gradients(experts, same_experts, dist.get_world_size())
    sum_gradients(replicated, divide_by=dist.get_world_size())
    optimizer.step()
    show(step, total)
