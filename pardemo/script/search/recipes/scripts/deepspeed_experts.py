"""A mixture of experts of DeepSpeed's own layer in fp32; stage -1 is plain torch, in one process."""

import deepspeed
import torch
import torch.distributed as dist
from common import integers, options
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed_shared import engine, take_step
from torch import nn
from torch.nn import functional as F

args = options(stage=-1, ep=1, topk=1, accumulate=1, clip=0.0, way="")
way = args.way  # aux, keep, residual, second, frozen, …
deepspeed.init_distributed("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 12), nn.Linear(12, 23, bias=False)
        settings = {"k": args.topk, "use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 0,
                    "drop_tokens": "keep" not in way, "use_residual": "residual" in way}  # fmt: skip
        number = 2 if "second" in way else 1
        self.mixed = nn.ModuleList(MoE(12, Expert(), num_experts=4, ep_size=args.ep, **settings) for _ in range(number))
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(number))

    def forward(self, tokens):
        x, auxiliary = self.embed(tokens), 0.0
        for norm, mixed in zip(self.norms, self.mixed, strict=True):
            y, routed, _ = mixed(norm(x))
            x, auxiliary = x + y, auxiliary + routed
        return self.head(x), auxiliary


torch.manual_seed(0)
model = Model()
whole = torch.Generator().manual_seed(1)
with torch.no_grad():  # the whole model's numbers, whatever the part of it that is here
    for name, parameter in model.named_parameters():
        if "deepspeed_experts" not in name:
            parameter.copy_(torch.randn(parameter.shape, generator=whole) * 0.5)
    for mixed in model.mixed:
        for index in range(4):
            expert, local = Expert(), index - rank % args.ep * (4 // args.ep)
            for parameter in expert.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=whole) * 0.5)
            if 0 <= local < 4 // args.ep:
                mixed.deepspeed_moe.experts.deepspeed_experts[local].load_state_dict(expert.state_dict())
if "frozen" in way:
    for mixed in model.mixed:
        mixed.deepspeed_moe.gate.requires_grad_(False)
group = {"params": [p for p in model.parameters() if p.requires_grad], "name": "parameters"}
optimizer = torch.optim.SGD(split_params_into_different_moe_groups_for_optimizer(group), lr=0.3, momentum=0.9)
if args.stage >= 0:
    zero = {"reduce_bucket_size": 700, "contiguous_gradients": True, "reduce_scatter": True,
            "overlap_comm": "overlap" in way, "use_multi_rank_bucket_allreduce": "one" not in way}  # fmt: skip
    model, optimizer = engine(model, optimizer, args, 12 // ranks // args.accumulate, zero)


def losses(step):
    tokens, targets = integers(step, 23, 2, 12, 6)
    mine = [whole.tensor_split(ranks)[rank].tensor_split(args.accumulate) for whole in (tokens, targets)]
    for inputs, labels in zip(*mine, strict=True):
        logits, auxiliary = model(inputs)
        yield F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + ("aux" in way) * 0.1 * auxiliary


for step in range(3):
    take_step(step, model, optimizer, args, losses(step))
