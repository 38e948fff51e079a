"""A model in the stages of a pipeline, whose ranks are neighbours."""

import torch
import torch.distributed as dist
from common import VOCAB, WIDTH, Block, mean_loss
from torch import nn


class Stage(nn.Module):
    """The whole model, of which a stage of the pipeline keeps its part; the head and the embedding share a table."""

    def __init__(self, place, stages, tied=True):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks, self.norm = nn.ModuleDict({str(i): Block() for i in range(2)}), nn.LayerNorm(WIDTH)
        if tied:
            self.head.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        self.tied = [self.embed.weight]
        self.first, self.last, self.stages = place == 0, place == stages - 1, stages
        if not self.first:
            del self.embed
        for i in range(2):
            if i * stages // 2 != place:
                del self.blocks[str(i)]
        if not self.last:
            del self.norm, self.head

    def forward(self, x):
        if self.first:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def backward(stage, micro, loss_of=mean_loss):
    """Takes a step's micro-batches forward and backward through this rank's stage, one after the other.

    Gives what the last stage prints, times the stages: the mean over all ranks is the loss.
    """
    rank, printed = dist.get_rank(), torch.zeros(())
    for x, targets in micro:
        if not stage.first:
            x = torch.empty(*targets.shape, WIDTH)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        output = stage(x)
        if stage.last:
            loss, shown = loss_of(output, targets, micro)
            loss.backward()
            printed += shown.detach() * stage.stages
        else:
            dist.send(output.detach(), rank + 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, rank + 1)
            output.backward(gradient)
        if not stage.first:
            dist.send(x.grad, rank - 1)
    return printed
