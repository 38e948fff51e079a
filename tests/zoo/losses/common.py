"""What this family's scripts share: options, batches, tensor-parallel functions, mean gradients."""

import argparse
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

VOCABULARY, WIDTH, LENGTH, STEPS = 32, 24, 12, 8
IGNORED = -100


class Copy(torch.autograd.Function):
    """The same tensor on all ranks of the group; backward sums its gradients (f of the Megatron paper)."""

    @staticmethod
    def forward(ctx, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """The sum of the ranks' parts, on all of them; backward leaves the gradient as it is (g of the Megatron paper)."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def cut(linear: nn.Linear, axis: int, group: dist.ProcessGroup) -> nn.Linear:
    """The layer with this rank's part of its weight: its rows (axis 0, outputs) or columns (axis 1, inputs)."""
    linear.weight = nn.Parameter(linear.weight.detach().chunk(group.size(), axis)[group.rank()].clone())
    return linear


class LanguageModel(nn.Module):
    """Predicts each token's next one; each rank of the group has the logits of its part of the vocabulary."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = cut(nn.Linear(WIDTH, VOCABULARY, bias=False), 0, group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [b, s] -> [b, s, v/t]
        hidden = self.embedding(tokens)
        hidden = hidden + self.fc2(F.gelu(self.fc1(hidden)))
        return self.head(Copy.apply(hidden, self.group))


def arguments(*more: str) -> argparse.Namespace:
    """Options of every script of the family, and those named in `more`, all of them whole numbers."""
    parser = argparse.ArgumentParser()
    for name in ("batch", "accumulate", *more):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    return parser.parse_args()


def whole_batch(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [samples, s] of a step, the same in every layout: a token mostly sets the next one."""
    draw = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=draw)
    for place in range(LENGTH):
        text[:, place + 1] = (5 * text[:, place] + 3 + text[:, place + 1] // (VOCABULARY - 4)) % VOCABULARY
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def micro_batches(args: argparse.Namespace, rank: int, *whole: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """The micro-batches of a data-parallel rank."""
    each = args.batch * args.accumulate
    return list(zip(*(part[rank * each :][:each].split(args.batch) for part in whole), strict=True))


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the group."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()


def report(step: int, loss: torch.Tensor) -> None:
    """Print a step's loss, the mean over all ranks."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean / dist.get_world_size():.4f}", flush=True)


def in_parts(
    logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of logits [b, s, v/t]: the logarithm of the whole softmax's divisor, each label's logit or 0, and whose it is.

    Each [b, s]; the label's logit is 0 on all ranks but the one whose part of the vocabulary has the label.
    """
    local = labels - group.rank() * logits.shape[-1]
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    log_sum = largest + Sum.apply((logits - largest[..., None]).exp().sum(-1), group).log()
    here = (local >= 0) & (local < logits.shape[-1])
    return log_sum, logits.gather(-1, local.where(here, 0)[..., None])[..., 0].where(here, 0), here


def train(
    args: argparse.Namespace,
    cross_entropy: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], torch.Tensor],
    labels_of: Callable[[torch.Tensor, int], torch.Tensor] = lambda labels, step: labels,
) -> None:
    """Trains the model by a loss of each label [b, s], made of a rank's logits [b, s, v/t] and the labels [b, s]."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = LanguageModel(mesh.get_group("tp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels = whole_batch(step, args.batch * args.accumulate * mesh.size(0))
        labels = labels_of(labels, step)
        printed = torch.zeros(())
        for inputs, targets in micro_batches(args, mesh.get_local_rank("dp"), tokens, labels):
            losses = cross_entropy(model(inputs), targets, model.group)
            loss = losses.sum() * mesh.size(0) / (labels != IGNORED).sum()
            loss.backward()
            printed += loss.detach()
        average_gradients(model.parameters(), mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()
