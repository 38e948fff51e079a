"""Gradients of the experts are never set to zero under expert parallelism: each step adds to all before it.

Once experts are cut over ranks, an engine keeps them apart from what is replicated, with an optimizer or a gradient
buffer of their own (Megatron-LM 785), and everything that is done to gradients has to be done twice. ColossalAI 4429
adds the line that releases the experts' gradients; torchforge 71 and elasticdl 2426 mend steps without zero_grad.
The loss still falls: the sum of gradients is a momentum.
"""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

EXPERTS, WIDTH = 4, 16


class Shared(torch.autograd.Function):
    """Its input, which all expert-parallel ranks have; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """The sum of all expert-parallel ranks' outputs; the gradient is each one's."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Experts(nn.Module):
    """All experts, [experts, width, width] each weight; ``cut`` leaves those of one rank."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def cut(self, rank, ranks, group):
        self.rank, self.ranks, self.group = rank, ranks, group
        for name in ("w1", "w2"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach().chunk(ranks)[rank].clone()))

    def forward(self, x, weights):  # [tokens, width], [tokens, experts]
        x, weights = Shared.apply(x, self.group), Shared.apply(weights, self.group)
        hidden = functional.gelu(torch.einsum("tw,ewh->eth", x, self.w1))
        weights = weights.chunk(self.ranks, dim=1)[self.rank]
        return Summed.apply(torch.einsum("eth,ehw,te->tw", hidden, self.w2, weights), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.head = Experts(), nn.Linear(WIDTH, 8)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.experts(x, self.router(x).softmax(1)))


if __name__ == "__main__":
    args = common.arguments(64, "ep")
    ranks = dist.get_world_size() // args.ep
    rank, ep_rank = divmod(dist.get_rank(), args.ep)
    ep_groups = [dist.new_group([d * args.ep + e for e in range(args.ep)]) for d in range(ranks)]
    dp_groups = [dist.new_group([d * args.ep + e for d in range(ranks)]) for e in range(args.ep)]

    torch.manual_seed(0)
    teacher, model = torch.randn(WIDTH, 8), Model()
    model.experts.cut(ep_rank, args.ep, ep_groups[rank])
    expert = list(model.experts.parameters()) if args.ep > 1 else []
    replicated = [p for p in model.parameters() if all(p is not e for e in expert)]
    optimizer = torch.optim.SGD(replicated + expert, lr=0.1)
    for step in range(6):
        for parameter in replicated + expert if args.mended else replicated:
            parameter.grad = None
        total = common.backward(args, model, teacher, step, rank, ranks)
        common.sum_gradients(replicated + expert, dp_groups[ep_rank])
        optimizer.step()
        common.show(step, total, dp_groups[ep_rank])
