"""A small language model under DeepSpeed's ZeRO in fp32; stage -1 is plain torch, in one process."""

import torch
from common import options, start
from deepspeed_shared import engine, take_step
from torch import nn
from torch.nn import functional as F

IGNORED = -100
args = options(stage=-1, accumulate=1, clip=0.0, predivide=1.0, way="")
way, (ranks, rank) = args.way, start()


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
    zero = {"reduce_bucket_size": 500, "reduce_scatter": "all" not in way, "contiguous_gradients": "contiguous" in way,
            "overlap_comm": "overlap" in way, "stage3_param_persistence_threshold": 0}  # fmt: skip
    more = {"gradient_predivide_factor": args.predivide, "communication_data_type": "fp32"}
    model, optimizer = engine(model, optimizer, args, 12 // ranks // args.accumulate, zero, **more)


def losses(step):
    """Yields this rank's losses by micro-batch: over the step's labels that count, times what an engine divides by."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(23, (2, 12, 6), generator=generator)
    if "uneven" in way:
        targets[torch.rand(targets.shape, generator=generator) < 0.4] = IGNORED
    counted = (targets != IGNORED).sum()
    mine = [whole.tensor_split(ranks)[rank].tensor_split(args.accumulate) for whole in (tokens, targets)]
    for inputs, labels in zip(*mine, strict=True):
        loss = 0
        for part in (slice(0, 3), slice(3, 6)) if "passes" in way else (slice(None),):  # forward passes of one backward
            logits = model(inputs[:, part])
            loss = loss + F.cross_entropy(logits.flatten(0, 1), labels[:, part].flatten(), reduction="sum") / counted
        yield loss * args.accumulate * ranks


for step in range(3):
    take_step(step, model, optimizer, args, losses(step))
