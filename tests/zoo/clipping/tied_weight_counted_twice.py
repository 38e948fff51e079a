"""A weight that the first and the last stage of a pipeline share is counted twice in the gradients' norm.

The embedding stands on the first stage and, as the head, on the last; its gradient is summed over both, so each has
it whole. The squares of all stages' gradients are then summed, the shared one twice: the norm is up to √2 too large
and all gradients are clipped too much (Megatron-LM 7227: 40 for 28.28 with Megatron-FSDP; Megatron's own optimizer
leaves the copy out).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import WIDTH, Block
from torch import nn

WORDS, LENGTH = 24, 6


class Model(nn.Module):
    """The part of the model that stands on a stage: the first has the embedding, the last the head, tied to it."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        blocks = [Block(), Block()]
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head.weight = self.embed.weight
        mine = range(stage * 2 // stages, (stage + 1) * 2 // stages)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in mine})
        if stage > 0:
            self.embed = None
        if stage < stages - 1:
            self.head = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.head is not None else x


def clip(model: Model, max_norm: float, stage: int, mended: bool) -> None:
    shared = model.head.weight if stage > 0 else None
    counted = [p.grad for p in model.parameters() if not mended or p is not shared]
    square = nn.utils.get_total_norm(counted) ** 2
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, square.sqrt())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    stage, last = dist.get_rank(), args.pp - 1

    torch.manual_seed(0)
    model = Model(stage, args.pp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    # the word that follows each word
    words = torch.randint(WORDS, (WORDS,), generator=torch.Generator().manual_seed(1))
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(WORDS, (args.accumulate, args.batch, LENGTH), generator=generator)
        printed = torch.zeros(())
        for x in tokens:
            given = x
            if stage > 0:
                given = torch.empty(args.batch, LENGTH, WIDTH)
                dist.recv(given, stage - 1)
                given.requires_grad_()
            out = model(given)
            if stage < last:
                dist.send(out.detach(), stage + 1)
                grad = torch.empty_like(out)
                dist.recv(grad, stage + 1)
                out.backward(grad)
            else:
                loss = F.cross_entropy(out.flatten(0, 1), words[x].flatten()) / args.accumulate
                loss.backward()
                printed += loss.detach()
            if stage > 0:
                dist.send(given.grad, stage - 1)
        if args.pp > 1:
            dist.all_reduce((model.embed or model.head).weight.grad)
        clip(model, 0.3, stage, args.mended)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(printed)
        if stage == 0:
            print(f"step {step} loss {printed:.4f}")
