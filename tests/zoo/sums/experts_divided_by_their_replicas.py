"""Experts' gradients are divided by the number of their replicas only: too large by the expert-parallel degree.

An expert's gradient is a sum over the tokens of all ranks of its group before anything is summed, so that a mean over
the ranks that hold the same experts leaves it too large. Adam hides it: a factor changes nothing in its updates.
pytorch 160285 reports it of torchtitan's experts (doubled on two ranks), Megatron-LM 5956 of Megatron-FSDP.
"""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

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


def main():
    args = common.arguments(ep=1)
    dist.init_process_group("gloo")
    data = dist.group.WORLD
    expert, same_experts = common.neighbours(args.ep)
    torch.manual_seed(6)
    model = Model(expert)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(common.STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in common.micro_batches(step, args, data):
            loss = F.cross_entropy(model(inputs).transpose(1, 2), targets) / args.accumulate
            loss.backward()
            total += loss.detach()
        for name, parameter in model.named_parameters():
            group = same_experts if ".experts." in name else data
            divide_by = dist.get_world_size(data) if args.mended else dist.get_world_size(group)
            common.sum_gradients([parameter], group, divide_by)
        optimizer.step()
        common.show(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
