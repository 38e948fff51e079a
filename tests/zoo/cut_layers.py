"""Layers that are cut over ranks: Megatron's operators and linear layers, a loss over a cut vocabulary, experts.

The operators (arXiv 1909.08053, section 3; 2205.05198, section 4.2.2) are one function in the forward pass, and
another for the gradient in the backward pass.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from common import VOCAB, WIDTH, LanguageModel, arguments, labelled, neighbours, over_ranks, text, train
from torch import nn
from torch.nn import functional as F


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.of_gradient(gradient), None, None


def copy_to_cut(x, group):
    """f: all parts of a layer get the same input; the gradients that they give are summed."""
    return Exchange.apply(x, torch.clone, lambda gradient: summed(gradient, group))


def sum_of_cut(x, group):
    """g: the sum of all parts' outputs; each part gets the gradient of the sum."""
    return Exchange.apply(x, lambda x: summed(x, group), torch.clone)


def split(x, group, dim=1):
    """Each rank keeps its part of a tensor that all have; the gradients of the parts are put together."""
    return Exchange.apply(x, lambda x: own_part(x, group, dim), lambda gradient: gathered(gradient, group, dim))


def join(x, group, dim=1):
    """Puts the parts together; what follows is the same on all ranks, so that each takes its part of the gradient."""
    return Exchange.apply(x, lambda x: gathered(x, group, dim), lambda gradient: own_part(gradient, group, dim))


def gather_to_cut(x, group, dim=1):
    """f for an input that is split: put together for all parts of a layer; gradients are summed and split again."""
    return Exchange.apply(x, lambda x: gathered(x, group, dim), lambda g: own_part(summed(g, group), group, dim))


def scatter_of_cut(x, group, dim=1):
    """g for an output that is split: the sum of all parts' outputs, of which each rank keeps its part."""
    return Exchange.apply(x, lambda x: own_part(summed(x, group), group, dim), lambda g: gathered(g, group, dim))


def summed(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def gathered(x, group, dim):
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim)


def own_part(x, group, dim):
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def cut(parameter, dim, group):
    """This rank's part of a parameter that is cut along `dim` over the group, with a mark."""
    part = nn.Parameter(own_part(parameter.detach(), group, dim).clone(), requires_grad=parameter.requires_grad)
    part.is_cut = True
    return part


class ColumnLinear(nn.Linear):
    """A linear layer whose output features are cut over the group."""

    def __init__(self, inputs, outputs, group, bias=True):
        super().__init__(inputs, outputs, bias)
        self.group, self.weight = group, cut(self.weight, 0, group)
        if bias:
            self.bias = cut(self.bias, 0, group)

    def forward(self, x):
        return super().forward(copy_to_cut(x, self.group))


class RowLinear(nn.Linear):
    """A linear layer whose input features are cut; the bias is whole on each rank and added after the sum."""

    def __init__(self, inputs, outputs, group):
        super().__init__(inputs, outputs)
        self.group, self.weight = group, cut(self.weight, 1, group)

    def forward(self, x):
        return sum_of_cut(F.linear(x, self.weight), self.group) + self.bias


class Block(nn.Module):
    """x + fc2(gelu(fc1(norm(x)))): fc1 is cut by columns, fc2 by rows."""

    def __init__(self, group):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(WIDTH), ColumnLinear(WIDTH, 4 * WIDTH, group)
        self.fc2 = RowLinear(4 * WIDTH, WIDTH, group)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def in_parts(logits, labels, group):
    """Of logits [b, s, v/t]: the logarithm of the whole softmax's divisor, each label's logit or 0, and whose it is.

    Each [b, s]; the label's logit is 0 on all ranks but the one whose part of the vocabulary has the label.
    """
    local = labels - dist.get_rank(group) * logits.shape[-1]
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    log_sum = largest + sum_of_cut((logits - largest[..., None]).exp().sum(-1), group).log()
    here = (local >= 0) & (local < logits.shape[-1])
    return log_sum, logits.gather(-1, local.where(here, 0)[..., None])[..., 0].where(here, 0), here


def train_vocabulary(cross_entropy, batch=text):
    """Trains a model whose vocabulary is cut by `cross_entropy(logits [b, s, v/t], labels, group, mended)`, [b, s]."""
    args = arguments(tp=1)
    tensor, data = neighbours(args.tp)
    torch.manual_seed(0)
    model = LanguageModel(Block(tensor), head=ColumnLinear(WIDTH, VOCAB, tensor, bias=False))

    def loss_of(logits, labels, micro):
        losses = cross_entropy(logits, labels, tensor, args.mended)
        loss = losses.sum() * dist.get_world_size() / over_ranks(labelled(micro))
        return loss, loss

    train(args, model, loss_of, batch=batch, group=data)


class Experts(nn.Module):
    """A layer's experts in two tables [experts, …]; each token takes as much of each as `weights` [b, s, e] says."""

    def __init__(self, experts):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x, weights):
        hidden = F.gelu(torch.einsum("bsw,ewf->bsef", x, self.up))
        return torch.einsum("bsef,efw,bse->bsw", hidden, self.down, weights)


class ExpertsOfGroup(Experts):
    """Experts that are cut over a group: a rank computes its own for the tokens of all ranks of the group."""

    def __init__(self, experts, group):
        super().__init__(experts)
        self.up, self.down, self.group = cut(self.up, 0, group), cut(self.down, 0, group), group

    def forward(self, x, weights):
        weights = gather_to_cut(weights, self.group, dim=0)  # [b x ranks, s, e]
        first = dist.get_rank(self.group) * len(self.up)
        weights = weights[..., first : first + len(self.up)]
        output = super().forward(gather_to_cut(x, self.group, dim=0), weights)
        return scatter_of_cut(output, self.group, dim=0)


def choose(probabilities):
    """Weights [b, s, e]: the probability of the likeliest expert, zero for the others."""
    return probabilities * F.one_hot(probabilities.argmax(-1), probabilities.shape[-1])


def balance(probabilities):
    """The loss that keeps experts busy alike, of each sequence by itself: the same however the batch is cut.

    DeepSeek-V3 (arXiv 2412.19437), equation 17, with one expert to a token.
    """
    experts = probabilities.shape[-1]
    chosen = F.one_hot(probabilities.argmax(-1), experts).to(probabilities.dtype)
    return experts * (chosen.mean(1) * probabilities.mean(1)).sum(-1).mean()


class ExpertBlock(nn.Module):
    """x + experts(norm(x)): four experts over the ranks of a group, each rank of which has samples of its own."""

    def __init__(self, group):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.experts = ExpertsOfGroup(4, group)

    def forward(self, x):
        hidden = self.norm(x)
        return x + self.experts(hidden, choose(self.router(hidden).softmax(-1)))


class RandomState:
    """A second state of the random number generator, for regions of a model that are cut (Megatron-core's tracker)."""

    def __init__(self, seed):
        outside = torch.get_rng_state()
        torch.manual_seed(seed)
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)

    @contextmanager
    def __call__(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)
