"""The shared expert's gradient is summed like an expert's, not over the expert-parallel ranks.

Experts are cut over neighbouring ranks and get their sum from the tokens that come to them. A shared expert is on
every rank and sees that rank's tokens only. Taken for an expert (here by its name), it is never summed over the
expert-parallel ranks. So it was with shared adapters of experts in Megatron-Bridge (6009), and over tensor-parallel
ranks with the gate of Qwen2's shared expert in Pai-Megatron-Patch (397).
"""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH, EXPERTS = 16, 4


class SharedExpert(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, expert):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = common.ExpertsOfGroup(EXPERTS, WIDTH, expert)
        self.shared_expert = SharedExpert()

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.experts(hidden, common.choose(self.router(hidden))) + self.shared_expert(hidden)


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
    torch.manual_seed(5)
    model = Model(expert)

    def reduce():
        for name, parameter in model.named_parameters():
            is_expert = ".experts." in name if args.mended else "expert" in name
            group = same_experts if is_expert else dist.group.WORLD
            common.sum_gradients([parameter], group, dist.get_world_size())

    common.train(args, model, model.parameters(), reduce, dist.group.WORLD)
