"""A small language model under DeepSpeed's ZeRO in fp32; stage -1 is plain torch, in one process."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

IGNORED = -100
parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=-1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--predivide", type=float, default=1.0)
parser.add_argument("--way", default="", help="words with +: tied, frozen, groups, twice, uneven, prescale, …")
args = parser.parse_args()
way = set(args.way.split("+"))
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
dist.init_process_group("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.hidden = nn.Embedding(23, 12), nn.LayerNorm(12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 23, bias=False)
        if "tied" in way:
            self.head.weight = self.embed.weight
        if "frozen" in way:
            self.hidden.weight.requires_grad_(False)
            self.norm.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(3 if "twice" in way else 1):  # one layer that is run more than once
            x = x + self.hidden(F.gelu(self.norm(x)))
        return self.head(x)


torch.manual_seed(0)
model = Model()
parameters = [p for p in model.parameters() if p.requires_grad]
if "groups" in way:
    parameters = [{"params": [p for p in parameters if p.ndim == 1], "lr": 0.02, "weight_decay": 0.0},
                  {"params": [p for p in parameters if p.ndim > 1]}]  # fmt: skip
optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
if args.stage >= 0:
    settings = {
        "train_micro_batch_size_per_gpu": 12 // ranks // args.accumulate,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "prescale_gradients": "prescale" in way,
        "gradient_predivide_factor": args.predivide,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 500, "reduce_scatter": "all" not in way,
                              "contiguous_gradients": "contiguous" in way, "overlap_comm": "overlap" in way,
                              "round_robin_gradients": "robin" in way,
                              "use_multi_rank_bucket_allreduce": "one" not in way,
                              "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
for step in range(3):
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(23, (2, 12, 6), generator=generator)
    if "uneven" in way:
        targets[torch.rand(targets.shape, generator=generator) < 0.4] = IGNORED
    counted, total = (targets != IGNORED).sum(), 0.0
    own = [whole.tensor_split(ranks)[rank].tensor_split(args.accumulate) for whole in (tokens, targets)]
    for inputs, labels in zip(*own, strict=True):
        loss = 0
        for part in (slice(0, 3), slice(3, 6)) if "passes" in way else (slice(None),):  # forward passes of one backward
            logits = model(inputs[:, part])
            loss = loss + F.cross_entropy(logits.flatten(0, 1), labels[:, part].flatten(), reduction="sum") / counted
        total += loss.detach() * 1.0
        if args.stage >= 0:
            model.backward(loss * args.accumulate * ranks)  # which takes the mean of both
            model.step()
        else:
            loss.backward()
    if args.stage < 0:
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {total.item():.6f}", flush=True)
