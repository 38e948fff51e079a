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


def main():
    args = common.arguments(ep=1)
    dist.init_process_group("gloo")
    data = dist.group.WORLD
    expert, same_experts = common.neighbours(args.ep)
    torch.manual_seed(5)
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
            is_expert = ".experts." in name if args.mended else "expert" in name
            common.sum_gradients([parameter], same_experts if is_expert else data, divide_by=dist.get_world_size(data))
        optimizer.step()
        common.show(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
