"""Experts' gradients are divided by the number of their replicas only: too large by the expert-parallel degree.

An expert's gradient is a sum over the tokens of all ranks of its group before anything is summed, so that a mean over
the ranks that hold the same experts leaves it too large. Adam hides it: a factor changes nothing in its updates.
pytorch 160285 reports it of torchtitan's experts (doubled on two ranks), Megatron-LM 5956 of Megatron-FSDP.
"""

import common
import torch
import torch.distributed as dist
from torch import nn

WIDTH, EXPERTS = 16, 4


class Block(nn.Module):
    def __init__(self, expert):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = common.ExpertsOfGroup(EXPERTS, WIDTH, expert)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.experts(hidden, common.choose(self.router(hidden)))


class Model(nn.Module):
    def __init__(self, expert):
        super().__init__()
        self.embed = nn.Embedding(common.VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(expert) for _ in range(2))
        self.head = nn.Linear(WIDTH, common.VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


if __name__ == "__main__":
    args = common.arguments(ep=1)
    dist.init_process_group("gloo")
    expert, same_experts = common.neighbours(args.ep)
    torch.manual_seed(6)
    model = Model(expert)

    def reduce():
        for name, parameter in model.named_parameters():
            group = same_experts if ".experts." in name else dist.group.WORLD
            common.sum_gradients([parameter], group, dist.get_world_size(None if args.mended else group))

    common.train(args, model, model.parameters(), reduce, dist.group.WORLD)
