"""What the scripts of this folder share: arguments, groups of ranks, batches, training, cut layers."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

STEPS = 6
VOCAB = 23
WIDTH = 32  # of a pipeline's stages


def arguments(**degrees):
    """Reads --batch, --accumulate, --mended and a degree of parallelism for each name in `degrees` (its default)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8, help="samples of a micro-batch on a rank")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--mended", action="store_true")
    for name, default in degrees.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def neighbours(size):
    """Cuts the ranks into groups of `size` neighbours: this rank's, and the group of those with its place in theirs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
    columns = [dist.new_group(range(place, world, size)) for place in range(size)]
    return rows[rank // size], columns[rank % size]


def micro_batches(step, args, data_group=None, mark=None):
    """Yields inputs and targets [batch, 12] of this rank; the step's whole batch is the same in every layout."""
    ranks, rank = dist.get_world_size(data_group), dist.get_rank(data_group)
    tokens = language(args.batch * args.accumulate * ranks, 13, torch.Generator().manual_seed(step))
    if mark:
        mark(tokens)
    for part in tokens.chunk(ranks)[rank].split(args.batch):
        yield part[:, :-1], part[:, 1:]


def language(samples, length, generator):
    """Draws sequences in which a token follows from the one before it, but for one in ten: something to learn."""
    tokens = torch.randint(VOCAB, (samples, length), generator=generator)
    surprise = torch.rand(samples, length, generator=generator) < 0.1
    for place in range(1, length):
        follows = (5 * tokens[:, place - 1] + 3) % VOCAB
        tokens[:, place] = torch.where(surprise[:, place], tokens[:, place], follows)
    return tokens


def show(step, loss, ranks=None):
    """Prints the loss of the whole batch on rank 0: a mean over all ranks, or over as many as have a loss."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item() / (ranks or dist.get_world_size()):.4f}", flush=True)


def sum_gradients(parameters, group=None, divide_by=1):
    """Sums each parameter's gradient over the group and divides it."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= divide_by


def train(args, model, parameters, reduce, data=None, lr=0.01, mark=None):
    """Trains, with `reduce()` between the last backward pass of a step and the optimizer's step."""
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in micro_batches(step, args, data, mark):
            loss = F.cross_entropy(model(inputs).transpose(1, 2), targets) / args.accumulate
            loss.backward()
            total += loss.detach()
        reduce()
        optimizer.step()
        show(step, total)
    dist.destroy_process_group()


def train_cut(seed, build, own, parameters_of=lambda model: list(model.parameters()), lr=0.01):
    """Trains a model that is cut over tensor-parallel ranks.

    `build(group, args)` makes it, `own(model, group, args)` sums what is its own to sum, and then all gradients are
    averaged over data-parallel ranks.
    """
    args = arguments(tp=1)
    dist.init_process_group("gloo")
    tensor, data = neighbours(args.tp)
    torch.manual_seed(seed)
    model = build(tensor, args)
    parameters = parameters_of(model)

    def reduce():
        own(model, tensor, args)
        sum_gradients(parameters, data, divide_by=dist.get_world_size(data))

    train(args, model, parameters, reduce, data, lr)


def cut(parameter, dim, group):
    """This rank's part of a parameter that is cut along `dim` over the group."""
    return nn.Parameter(own_part(parameter.detach(), group, dim).clone(), requires_grad=parameter.requires_grad)


# What surrounds layers that are cut (arXiv 1909.08053, section 3; 2205.05198, section 4.2.2): one function in the
# forward pass, and another for the gradient in the backward pass.


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


class Experts(nn.Module):
    """A layer's experts in two tables [experts, …]; each token takes as much of each as `weights` [b, s, e] says."""

    def __init__(self, experts, width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x, weights):
        hidden = F.gelu(torch.einsum("bsw,ewf->bsef", x, self.up))
        return torch.einsum("bsef,efw,bse->bsw", hidden, self.down, weights)


class ExpertsOfGroup(Experts):
    """Experts that are cut over a group: a rank computes its own for the tokens of all ranks of the group."""

    def __init__(self, experts, width, group):
        super().__init__(experts, width)
        self.up, self.down, self.group = cut(self.up, 0, group), cut(self.down, 0, group), group

    def forward(self, x, weights):
        weights = gather_to_cut(weights, self.group, dim=0)  # [b x ranks, s, e]
        first = dist.get_rank(self.group) * len(self.up)
        weights = weights[..., first : first + len(self.up)]
        output = super().forward(gather_to_cut(x, self.group, dim=0), weights)
        return scatter_of_cut(output, self.group, dim=0)


def choose(logits):
    """Weights [b, s, e]: the probability of the likeliest expert, zero for the others."""
    probabilities = logits.softmax(-1)
    return probabilities * F.one_hot(probabilities.argmax(-1), probabilities.shape[-1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(x)))


class Stage(nn.Module):
    """The whole model, of which a stage of the pipeline keeps its part; the head and the embedding share a table."""

    def __init__(self, place, stages):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(2)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        self.tied = [self.embed.weight]
        self.first, self.last = place == 0, place == stages - 1
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


def through_stage(stage, inputs, targets, scale):
    """Takes a micro-batch forward and backward through this rank's stage of a pipeline; gives the last one's loss."""
    rank, x = dist.get_rank(), inputs
    if not stage.first:
        x = torch.empty(*inputs.shape, WIDTH)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    output, loss = stage(x), torch.zeros(())
    if stage.last:
        loss = F.cross_entropy(output.transpose(1, 2), targets) * scale
        loss.backward()
    else:
        dist.send(output.detach(), rank + 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, rank + 1)
        output.backward(gradient)
    if not stage.first:
        dist.send(x.grad, rank - 1)
    return loss.detach()
