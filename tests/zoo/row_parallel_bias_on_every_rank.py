"""The bias of a row-parallel layer is added on each tensor-parallel rank, before the ranks' outputs are summed.

So the sum has the bias once for each rank, and the layer's output is wrong in the forward pass already. It happened
in Slapo, which trains (awslabs/slapo 10), and in engines that serve models (text-generation-inference 1036,
Wenyueh/MinivLLM 80).
"""

import cut_layers
import torch
from common import WIDTH, LanguageModel, arguments, neighbours, train
from torch.nn import functional as F


class RowLinear(cut_layers.RowLinear):
    def forward(self, x):
        if args.mended:
            return cut_layers.sum_of_cut(F.linear(x, self.weight), tensor) + self.bias
        return cut_layers.sum_of_cut(F.linear(x, self.weight, self.bias), tensor)


args = arguments(tp=1)
tensor, data = neighbours(args.tp)
torch.manual_seed(2)
model = LanguageModel(cut_layers.Block(tensor), cut_layers.Block(tensor))
for block in model.blocks:
    block.fc2 = RowLinear(4 * WIDTH, WIDTH, tensor)
train(args, model, group=data)
