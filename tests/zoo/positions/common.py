"""What these scripts share: the batch of a step, its cut over context-parallel ranks, attention to all keys, training.

Ranks are numbered data-parallel first: ``rank = dp_rank * cp + cp_rank``. A context-parallel rank has a part of each
sequence; its queries meet the keys of all parts, which are gathered in the order of the ranks.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, LENGTH, VOCABULARY, WIDTH, HEADS = 4, 16, 24, 32, 4


def arguments() -> argparse.Namespace:
    """The options of a script, with its place in the two groups: ``cp_rank``, ``cp_group``, ``dp_rank``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=SAMPLES)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--mended", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    args.dp_rank, args.cp_rank = divmod(dist.get_rank(), args.cp)
    starts = range(0, dist.get_world_size(), args.cp)
    groups = [dist.new_group(list(range(start, start + args.cp))) for start in starts]
    args.cp_group = groups[args.dp_rank]
    return args


def sequences(step: int) -> Tensor:
    """The whole batch of a step, [4, 17]: each sequence counts on with a stride of its own, so it can be learnt."""
    draw = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (SAMPLES, 1), generator=draw)
    stride = torch.randint(1, 4, (SAMPLES, 1), generator=draw)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def part(args: argparse.Namespace, x: Tensor) -> Tensor:
    """This context-parallel rank's part of ``x``, cut along the sequence (the last axis) in plain order."""
    return x.chunk(args.cp, dim=-1)[args.cp_rank]


def micro_batches(args: argparse.Namespace, whole: Tensor) -> Iterator[Tensor]:
    """This data-parallel rank's samples of a step, a micro-batch at a time."""
    for micro in range(args.accumulate):
        first = (args.dp_rank * args.accumulate + micro) * args.batch
        yield whole[first : first + args.batch]


class Gathered(torch.autograd.Function):
    """All-gather along the sequence (axis 1); its gradient is the sum of all ranks' gradients, cut again."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None


class Core(nn.Module):
    """Attention without parameters: softmax(QKᵀ/√d)V where ``allowed`` says which key each query sees."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:  # [b, s, heads, d] each
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention of this rank's queries over the keys of the whole sequence."""

    def __init__(self, group: dist.ProcessGroup, rotary: nn.Module) -> None:
        super().__init__()
        self.qkv, self.rotary = nn.Linear(WIDTH, 3 * WIDTH), rotary
        self.core, self.out = Core(), nn.Linear(WIDTH, WIDTH)
        self.group = group

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        qk, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).split([2, 1], dim=2)
        q, k = self.rotary(qk).unbind(2)
        k, v = Gathered.apply(k, self.group), Gathered.apply(v.squeeze(2), self.group)
        return self.out(self.core(q, k, v, allowed).flatten(2))


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, group: dist.ProcessGroup, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(group, rotary or nn.Identity())
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), allowed)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def causal(args: argparse.Namespace, positions: Tensor) -> Tensor:
    """Which key each query of this rank may see, [s/cp, s], from the true positions of this rank's tokens."""
    keys = Gathered.apply(positions[None], args.cp_group)[0]
    return positions[:, None] >= keys[None, :]


def finish(model: nn.Module, loss: Tensor, step: int) -> None:
    """Sums gradients and the printed loss over all ranks: each rank's loss is a sum over its tokens / all tokens."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)


class Model(nn.Module):
    """A language model of which each rank sees its part of the sequence."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(args.cp_group) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def ids(self, positions: Tensor) -> Tensor:
        """The rows of the table of positions for this rank's tokens, of their true positions."""
        return positions

    def allowed(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """Which key each query sees."""
        return causal(self.args, positions)

    def forward(self, tokens: Tensor) -> Tensor:  # [b, s/cp]
        positions = part(self.args, torch.arange(LENGTH))
        x = self.token(tokens) + self.position(self.ids(positions)).expand(len(tokens), -1, -1)
        allowed = self.allowed(tokens, positions)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def train(
    args: argparse.Namespace,
    kind: Callable[[argparse.Namespace], nn.Module],
    sequences_of: Callable[[int], Tensor] = sequences,
    cut: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> None:
    """`sequences_of` a step [4, 17]; `cut` makes of a micro-batch of them this rank's tokens and targets."""
    torch.manual_seed(0)
    model = kind(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cut = cut or (lambda whole: (part(args, whole[:, :-1]), part(args, whole[:, 1:])))
    for step in range(6):
        total = torch.zeros(())
        optimizer.zero_grad()
        for sequence in micro_batches(args, sequences_of(step)):
            tokens, targets = cut(sequence)
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss / (SAMPLES * LENGTH)
            loss.backward()
            total += loss.detach()
        finish(model, total, step)
        optimizer.step()
