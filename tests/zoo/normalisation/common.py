"""What this family's scripts share: options, a small language model, its training under DDP."""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, LENGTH, STEPS = 32, 24, 12, 8
IGNORED = -100


class LanguageModel(nn.Module):
    """Predicts each token's next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [b, s] -> [b, s, v]
        hidden = self.embedding(tokens)
        hidden = hidden + self.fc2(F.gelu(self.fc1(self.norm(hidden))))
        return self.head(hidden)


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


def answers_only(labels: torch.Tensor, step: int) -> torch.Tensor:
    """The labels with each sample's question ignored: answers have from 1 to s tokens."""
    answers = torch.randint(1, LENGTH + 1, (len(labels), 1), generator=torch.Generator().manual_seed(1000 + step))
    return labels.masked_fill(torch.arange(LENGTH) < LENGTH - answers, IGNORED)


def micro_batches(args: argparse.Namespace, *whole: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """This data-parallel rank's micro-batches of the whole batch."""
    each = args.batch * args.accumulate
    mine = slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
    return list(zip(*(part[mine].split(args.batch) for part in whole), strict=True))


def labelled(micro: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
    """The number of labels that are not ignored in this rank's micro-batches."""
    return sum((labels != IGNORED).sum() for _, labels in micro)


def over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The value's sum over all ranks, without a gradient."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def report(step: int, loss: torch.Tensor) -> None:
    """Print a step's loss, the mean over all ranks."""
    mean = over_ranks(loss) / dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean:.4f}", flush=True)


def train(
    args: argparse.Namespace,
    loss_of: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    labels_of: Callable[[torch.Tensor, int], torch.Tensor] = lambda labels, step: labels,
) -> None:
    """Trains the model under DDP.

    `loss_of` makes of logits [b·s, v], labels [b·s] and all micro-batches of the step what is differentiated, and what
    is printed; `labels_of` of a step's labels those that count.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels = whole_batch(step, args.batch * args.accumulate * dist.get_world_size())
        micro = micro_batches(args, tokens, labels_of(labels, step))
        printed = torch.zeros(())
        for number, (inputs, targets) in enumerate(micro):
            model.require_backward_grad_sync = number == args.accumulate - 1
            loss, shown = loss_of(model(inputs).flatten(0, 1), targets.flatten(), micro)
            loss.backward()
            printed += shown.detach()
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()
