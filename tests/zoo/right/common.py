"""What the scripts of this folder share: arguments, a small random model, batches, losses, optimizers, clipping."""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pardemo.expert_parallel import Router
from pardemo.small_models.mixture import Mixture
from pardemo.zero import Zero1, Zero2, Zero3

ZERO = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
IGNORED = -100
STEPS = 4
#: Arguments of every script. ``samples``: of a step, over all ranks. ``way``: how an engine is used, words with commas.
DEFAULTS = {
    "engine": "plain", "way": "", "tp": 1, "pp": 1, "cp": 1, "accumulate": 1,
    "seed": 0, "kind": "tokens", "width": 12, "heads": 3, "gqa": 1, "layers": 2, "inner": 20, "outputs": 23,
    "sequence": 6, "norm": "LayerNorm", "bias": 1, "tied": 0, "frozen": "", "dropout": 0.0, "gated": 0, "optional": 0,
    "in_place": 0, "experts": 0,
    "samples": 12, "loss": "mean", "optimizer": "SGD", "clip": 0.0, "schedule": 0,
}  # fmt: skip


def arguments():
    parser = argparse.ArgumentParser()
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    args.way = set(args.way.split(","))
    return args


class Attention(nn.Module):
    """Causal attention; ``gqa`` query heads share a key/value head."""

    def __init__(self, args):
        super().__init__()
        self.head_dim, keys = args.width // args.heads, args.width // args.gqa
        self.q, self.out = (nn.Linear(args.width, args.width, bias=bool(args.bias)) for _ in range(2))
        self.k, self.v = (nn.Linear(args.width, keys, bias=bool(args.bias)) for _ in range(2))
        self.core = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=args.gqa > 1)

    def forward(self, x):
        q, k, v = (of(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for of in (self.q, self.k, self.v))
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))  # of [b, heads, s, d]


class MLP(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.up = nn.Linear(args.width, args.inner, bias=bool(args.bias))
        self.gate = nn.Linear(args.width, args.inner, bias=bool(args.bias)) if args.gated else None
        self.down = nn.Linear(args.inner, args.width, bias=bool(args.bias))

    def forward(self, x):
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.gelu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), unless samples have no sequence; then x + mlp(norm(x))."""

    def __init__(self, args):
        super().__init__()
        norm, self.in_place = getattr(nn, args.norm), args.in_place
        if args.kind != "rows":
            self.norm_1, self.attention = norm(args.width), Attention(args)
        mlp = Mixture(Router(args.width, args.experts, 2), args.inner) if args.experts else MLP(args)
        self.norm_2, self.mlp, self.drop = norm(args.width), mlp, nn.Dropout(args.dropout)
        self.checkpointed = "checkpoint" in args.way and args.engine != "pipeline"  # which does so by itself

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    def body(self, x):
        if self.in_place:
            x = F.leaky_relu_(x, 0.5)
        if hasattr(self, "attention"):
            x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class Optional(nn.Module):
    """A layer that some samples pass, x + linear(x): ranks and micro-batches that have none of them leave it out."""

    def __init__(self, args):
        super().__init__()
        self.linear = nn.Linear(args.width, args.width)

    def forward(self, x, chosen):
        chosen = chosen.view(-1, *[1] * (x.dim() - 1))
        return torch.where(chosen, x + self.linear(x), x) if chosen.any() else x


class Model(nn.Module):
    """Of tokens [b, s], of features [b, s, 7], or of rows [b, 7]: logits or numbers [b, (s,) outputs]."""

    def __init__(self, args):
        super().__init__()
        tokens = args.kind == "tokens"
        self.embed = nn.Embedding(args.outputs, args.width) if tokens else nn.Linear(7, args.width)
        self.positions = nn.Embedding(args.sequence, args.width) if tokens else None
        self.layers = nn.ModuleDict({str(number): Block(args) for number in range(args.layers)})
        self.optional = Optional(args) if args.optional else None
        self.norm = getattr(nn, args.norm)(args.width)
        self.head = nn.Linear(args.width, args.outputs, bias=False)
        if args.tied:
            self.head.weight = self.embed.weight

    def cut(self, first, end, layers):
        """Keeps the layers of a pipeline's stage; the embedding in the first one, norm and head in the last."""
        self.layers = nn.ModuleDict({name: layer for name, layer in self.layers.items() if first <= int(name) < end})
        if first > 0:
            self.embed = self.positions = None
        if end < layers:
            self.norm = self.head = None
        return self

    def forward(self, x, positions=None):
        first = x.flatten(1)[:, 0]
        chosen = first > 0 if x.is_floating_point() else first % 2 == 0  # [b]
        x = x if self.embed is None else self.embed(x)
        if self.positions is not None:
            x = x + self.positions(torch.arange(x.shape[1]) if positions is None else positions)
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.optional is None else self.optional(x, chosen)
        return x if self.head is None else self.head(self.norm(x))


def model_of(args):
    """The same on every rank."""
    torch.manual_seed(args.seed)
    model = Model(args)
    for name in filter(None, args.frozen.split(",")):
        model.get_submodule(name).requires_grad_(False)
    return model


def batch(args, step):
    """Inputs and targets of a step, of all ranks; of targets [b, s] some are left out where the loss weighs tokens."""
    generator = torch.Generator().manual_seed(1000 * args.seed + step)
    shape = (args.samples, args.sequence) if args.kind != "rows" else (args.samples,)
    inputs = torch.randn(*shape, 7, generator=generator)
    targets = torch.randint(args.outputs, shape, generator=generator)
    if args.kind == "tokens":
        inputs = torch.randint(args.outputs, shape, generator=generator)
    if args.loss == "tokens":
        targets[torch.rand(shape, generator=generator) < 0.3] = IGNORED
        targets.reshape(-1)[0] = 1
    return inputs, targets


def micro_batches(args, step, ranks, rank):
    """Inputs, targets and the loss function of each micro-batch of a rank, for engines that take the ranks' mean."""
    inputs, targets = batch(args, step)
    counted = int((targets != IGNORED).sum())

    def loss(logits, targets):
        if args.loss == "mean":  # of equal parts
            return F.cross_entropy(logits.flatten(0, -2), targets.flatten()) / args.accumulate
        total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total * ranks * args.cp / counted

    for part in range(args.accumulate):
        own = [whole.tensor_split(ranks)[rank].tensor_split(args.accumulate)[part] for whole in (inputs, targets)]
        yield *own, loss


def optimizer_of(args, parameters, **more):
    if args.optimizer == "AdamW":
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, **more)
    momentum = {"momentum": 0.9, "weight_decay": 0.01} if args.optimizer == "momentum" else {}
    return torch.optim.SGD(parameters, lr=0.1, **momentum, **more)


def zero_of(args, model, group=None, **more):
    """The ZeRO engine that the layout names; it clips by itself, unless the layout says that torch does."""
    stage = next(stage for stage in ZERO if stage in {args.engine, *args.way})
    if "clip" not in args.way:
        more["max_norm"] = args.clip or None
    if stage == "zero2":
        more["bucket_bytes"] = 64 if "small" in args.way else 2048
    if stage == "zero3":
        more["layers"] = [] if "whole" in args.way else None
    return ZERO[stage](model, partial(optimizer_of, args), group, **more)


def schedule_of(args, optimizer):
    """Warm-up, then a slow decay; the same rate throughout where none is asked for."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 3) * 0.9**n if args.schedule else 1)


def show(step, loss, ranks):
    """Prints the loss of the whole batch, of which each rank has `ranks` times its part."""
    total = torch.as_tensor(loss).detach().double().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {step} loss {total.item() / ranks:.4f}", flush=True)
