"""A small language model as DeepSpeed's PipelineModule in fp32; stage -1 is plain torch, in one process."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--pp", type=int, default=1)
parser.add_argument("--stage", type=int, default=-1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--way", default="", help="words with +: tied, frozen, recompute, twice, adam, …")
args = parser.parse_args()
way = set(args.way.split("+"))
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
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
    tokens, targets = torch.randint(23, (2, 12, 6), generator=torch.Generator().manual_seed(step))
    own = [whole.tensor_split(replicas)[rank % replicas].tensor_split(args.accumulate) for whole in (tokens, targets)]
    return zip(*own, strict=True)


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
    settings = {
        "train_micro_batch_size_per_gpu": 12 // replicas // args.accumulate,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "zero_allow_untested_optimizer": True,
        "pipeline": {"use_reentrant": False},
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 500},
    }  # fmt: skip
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
for step in range(3):
    if args.stage >= 0:
        total = engine.train_batch(micro_batches(step))
    else:
        total = 0.0
        for tokens, targets in micro_batches(step):
            loss = loss_of(model(tokens), targets) / args.accumulate
            loss.backward()
            total += loss.item()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {float(total):.6f}", flush=True)
