"""What the zoo's scripts share: options, groups of ranks, a language to learn, a model of it, a training loop."""

import argparse
from itertools import count, islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS, VOCAB, WIDTH, LENGTH = 8, 24, 16, 12
IGNORED = -100  # a label that does not count


def arguments(**more):
    """Reads --batch, --accumulate, --mended and the numbers in `more` (their defaults); starts the process group."""
    parser = argparse.ArgumentParser()
    for name, default in ({"batch": 8, "accumulate": 1} | more).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mended", action="store_true")
    dist.init_process_group("gloo")
    return parser.parse_args()


def neighbours(size):
    """Cuts the ranks into groups of `size` neighbours: this rank's, and the group of those with its place in theirs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
    columns = [dist.new_group(range(place, world, size)) for place in range(size)]
    return rows[rank // size], columns[rank % size]


def text(step, samples):
    """Tokens [samples, LENGTH] and the next one of each, the same in every layout: a token mostly sets the next one."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (samples, LENGTH + 1), generator=draw)
    for place in range(LENGTH):
        tokens[:, place + 1] = (5 * tokens[:, place] + 3 + tokens[:, place + 1] // (VOCAB - 4)) % VOCAB
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def answers(step, samples):
    """The same text with each sample's question ignored: answers have from 1 to LENGTH tokens."""
    tokens, labels = text(step, samples)
    given = torch.randint(1, LENGTH + 1, (samples, 1), generator=torch.Generator().manual_seed(1000 + step))
    return tokens, labels.masked_fill(torch.arange(LENGTH) < LENGTH - given, IGNORED)


def micro_batches(args, step, group=None, batch=text):
    """A rank's micro-batches of what `batch(step, samples)` gives to all data-parallel ranks, which are the group's."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = batch(step, args.batch * args.accumulate * ranks)
    return list(zip(*(part.chunk(ranks)[rank].split(args.batch) for part in whole), strict=True))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class LanguageModel(nn.Module):
    """Gives each token's logits of the next one, [b, s] -> [b, s, v]."""

    def __init__(self, *blocks, head=None):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(blocks)
        self.head = head or nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(logits, labels, **more):
    """Of logits [b, s, v] and labels [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, **more)


def mean_loss(logits, labels, micro):
    """A micro-batch's mean over its labels, divided by their number: what is differentiated, and what is printed."""
    loss = cross_entropy(logits, labels) / len(micro)
    return loss, loss


def labelled(micro):
    """The number of labels that are not ignored in micro-batches."""
    return sum((labels != IGNORED).sum() for _, labels, *_ in micro)


def over_ranks(value):
    """The value's sum over all ranks, without a gradient."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def sum_gradients(parameters, group=None, divide_by=1):
    """Sums each parameter's gradient over the group and divides it."""
    for parameter in parameters:
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= divide_by


def average_gradients(parameters, group=None):
    """Averages each gradient over a group, as DDP does."""
    sum_gradients(parameters, group, dist.get_world_size(group))


def backward(model, micro, loss_of=mean_loss):
    """Takes a step's micro-batches forward and backward; gives the loss that is printed."""
    printed = torch.zeros(())
    for number, (inputs, *targets) in enumerate(micro, 1):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = number == len(micro)
        loss, shown = loss_of(model(inputs), *targets, micro)
        loss.backward()
        printed += shown.detach()
    return printed


def show(step, loss):
    """Prints a step's loss, the mean over all ranks."""
    mean = over_ranks(loss) / dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean:.4f}", flush=True)


def train(args, model, loss_of=mean_loss, *, batch=text, group=None, reduce=None, optimizer=None, backward=backward):
    """Trains a model on a rank's micro-batches, the group's ranks being the data-parallel ones.

    `reduce()` comes between a step's backward passes and the optimizer's step. Where none is given, gradients are
    averaged over the group, unless DDP does so.
    """
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        printed = backward(model, micro_batches(args, step, group, batch), loss_of)
        if reduce is not None:
            reduce()
        elif not isinstance(model, DistributedDataParallel):
            average_gradients(model.parameters(), group)
        optimizer.step()
        show(step, printed)
    dist.destroy_process_group()


def train_on(args, loader):
    """Trains under DDP on a loader's tokens and labels: a step for each `accumulate` of its batches."""
    torch.manual_seed(0)
    model, batches = DistributedDataParallel(LanguageModel(Block())), iter(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in count():
        if not (micro := list(islice(batches, args.accumulate))):
            return
        printed = backward(model, micro)
        optimizer.step()
        optimizer.zero_grad()
        show(step, printed)
