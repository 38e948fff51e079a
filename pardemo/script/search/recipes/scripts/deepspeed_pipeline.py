"""A small language model as DeepSpeed's PipelineModule in fp32; stage -1 is plain torch, in one process."""

import deepspeed
import torch
import torch.distributed as dist
from common import integers, options, show
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed_shared import engine, take_step
from torch import nn
from torch.nn import functional as F

args = options(pp=1, stage=-1, accumulate=1, clip=0.0, way="")
way = args.way  # tied, frozen, recompute, adam
deepspeed.init_distributed("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
replicas = ranks // args.pp


class Embed(nn.Embedding):
    def __init__(self):
        torch.manual_seed(7)
        super().__init__(23, 12)


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.norm, self.hidden = nn.LayerNorm(12), nn.Linear(12, 12)
        if "frozen" in way and index % 2:
            self.hidden.weight.requires_grad_(False)

    def forward(self, x):
        return x + self.hidden(F.gelu(self.norm(x)))


def head(module, x):
    """The embedding's second use."""
    return x @ module.weight.T


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def micro_batches(step):
    """This rank's samples of a step."""
    tokens, targets = integers(step, 23, 2, 12, 6)
    mine = [whole.tensor_split(replicas)[rank % replicas].tensor_split(args.accumulate) for whole in (tokens, targets)]
    return zip(*mine, strict=True)


class Whole(nn.Sequential):
    def forward(self, tokens):
        x = super().forward(tokens)
        return head(self[0], x) if "tied" in way else x


torch.manual_seed(0)
layers = [Block(i) for i in range(4)]
if "tied" not in way:
    layers.append(nn.Linear(12, 23, bias=False))
tied = [TiedLayerSpec("embed", Embed), TiedLayerSpec("embed", Embed, forward_fn=head)]
if args.stage < 0:
    model = Whole(Embed(), *layers)
else:
    layers = [tied[0], *layers, tied[1]] if "tied" in way else [Embed(), *layers]
    interval = 1 if "recompute" in way else 0
    model = PipelineModule(layers, num_stages=args.pp, loss_fn=loss_of, partition_method="uniform",
                           activation_checkpoint_interval=interval)  # fmt: skip
parameters = [p for p in model.parameters() if p.requires_grad]
kind = torch.optim.AdamW if "adam" in way else torch.optim.SGD
optimizer = kind(parameters, lr=0.01 if "adam" in way else 0.3)
if args.stage >= 0:
    micro_batch, pipeline = 12 // replicas // args.accumulate, {"use_reentrant": False}
    model, _ = engine(model, optimizer, args, micro_batch, {"reduce_bucket_size": 500}, pipeline=pipeline)
for step in range(3):
    if args.stage >= 0:
        show(step, model.train_batch(micro_batches(step)))
    else:
        losses = (loss_of(model(tokens), targets) for tokens, targets in micro_batches(step))
        take_step(step, model, optimizer, args, losses)
