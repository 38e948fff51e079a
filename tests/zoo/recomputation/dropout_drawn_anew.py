"""Recomputed activations have another dropout mask: the backward pass runs the layer again and draws anew.

Activation checkpointing throws activations away and repeats the forward pass when gradients are due. Unless the state
of the random numbers is put back first, gradients are of another network than the loss. guided-diffusion 167: a
checkpoint function of one's own, copied into many projects, that forgets it, and the loss diverges; OLMo-core 828:
``preserve_rng_state=False`` was harmless until a model with dropout came, and cost 0.3 of the loss.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

SAMPLES = 64


class Recomputed(torch.autograd.Function):
    """Runs ``layer(x)`` without keeping its activations, and again in the backward pass."""

    @staticmethod
    def forward(ctx, x, layer, mended):
        ctx.layer, ctx.random = layer, torch.get_rng_state() if mended else None
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
        return x.grad, None, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.dropout, self.down = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Dropout(0.2),
            nn.Linear(32, 16),
        )

    def forward(self, x):
        return x + self.down(self.dropout(functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = Recomputed.apply(x, layer, self.args.mended) if self.args.recompute else layer(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=SAMPLES)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--recompute", type=int, default=0)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    teacher, model = torch.randn(16, 8), Model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + rank)  # the ranks' dropout masks differ

    for step in range(6):
        x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))
        y, total = (x @ teacher).argmax(1), torch.zeros(())
        optimizer.zero_grad()
        for micro in range(args.accumulate):
            first = (rank * args.accumulate + micro) * args.batch
            mine = slice(first, first + args.batch)
            loss = functional.cross_entropy(model(x[mine]), y[mine]) / args.accumulate / ranks
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
