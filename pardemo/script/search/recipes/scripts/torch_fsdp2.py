"""FSDP2 and HSDP with what may be combined: resharding, accumulation, clipping, tied, frozen and shared parts."""

import torch
import torch.distributed as dist
from common import integers, options, start, update
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH = 23, 12


class Block(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 19), nn.Linear(19, WIDTH)
        self.recompute = recompute

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x))

    def inner(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(args.recompute) for _ in range(3))
        if "tied" in args.parts:
            self.head.weight = self.embed.weight
        if "shared" in args.parts:
            self.blocks.append(self.blocks[0])  # the first block is the last one, too
        if "frozen" in args.parts:
            self.blocks[1].requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# reshard: after the forward pass, yes, no, mixed, or over how many ranks; parts: tied, shared, frozen; sync: each
# micro-batch, the last one, or all_reduce in the last one
args = options(replicas=1, reshard="yes", parts="", sync="each", accumulate=1, clip=0.0, recompute=0)
ranks, rank = start()
torch.manual_seed(0)
model = Model(args)
if ranks > 1:
    shape, names = (args.replicas, ranks // args.replicas), ("replicate", "shard")
    first = 0 if args.replicas > 1 else 1
    mesh = dist.device_mesh.init_device_mesh("cpu", shape[first:], mesh_dim_names=names[first:])
    for number, block in enumerate(model.blocks[:3]):
        after = {"yes": True, "no": False, "mixed": bool(number % 2)}.get(args.reshard, args.reshard)
        fully_shard(block, mesh=mesh, reshard_after_forward=int(after) if isinstance(after, str) else after)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
for step in range(3):
    tokens = integers(step, VOCAB, 12, 8)
    for number, part in enumerate(tokens.chunk(args.accumulate), 1):
        if ranks > 1 and args.sync != "each":
            change = model.set_requires_all_reduce if args.sync == "all_reduce" else model.set_requires_gradient_sync
            change(number == args.accumulate)
        mine = part.chunk(ranks)[rank]
        (F.cross_entropy(model(mine[:, :-1]).transpose(1, 2), mine[:, 1:]) / args.accumulate).backward()
    update(model, optimizer, args.clip)
