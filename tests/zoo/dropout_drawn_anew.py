"""Recomputed activations have another dropout mask: the backward pass runs the layer again and draws anew.

Activation checkpointing throws activations away and repeats the forward pass when gradients are due. Unless the state
of the random numbers is put back first, gradients are of another network than the loss. guided-diffusion 167: a
checkpoint function of one's own, copied into many projects, that forgets it, and the loss diverges; OLMo-core 828:
``preserve_rng_state=False`` was harmless until a model with dropout came, and cost 0.3 of the loss.
"""

import torch
import torch.distributed as dist
from common import WIDTH, LanguageModel, arguments, train
from torch import nn
from torch.nn import functional as F


class Recomputed(torch.autograd.Function):
    """Runs ``layer(x)`` without keeping its activations, and again in the backward pass."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer, ctx.random = layer, torch.get_rng_state() if args.mended else None
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            if ctx.random is not None:
                torch.set_rng_state(ctx.random)
            output = ctx.layer(x)
        output.backward(gradient)
        return x.grad, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Model(LanguageModel):
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.blocks:
            x = Recomputed.apply(x, layer) if args.recompute else layer(x)
        return self.head(x)


args = arguments(recompute=0)
torch.manual_seed(0)
model = Model(Layer(), Layer())
torch.manual_seed(1 + dist.get_rank())  # the ranks' dropout masks differ
train(args, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
