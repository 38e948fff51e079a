"""The vocabulary divided among the ranks: its embedding, and the loss over logits that no rank ever has whole."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import compat
from pardemo.collectives.decorators import first_derivative_only, not_compiled
from pardemo.groups import divide, group_of
from pardemo.tensor_parallel import exchange
from pardemo.tensor_parallel.full_layers import check_plain, compare_layers
from pardemo.tensor_parallel.gradients import mark_part
from pardemo.tensor_parallel.module import GroupModule
from pardemo.tensor_parallel.operators import reduce_from, reduce_scatter_sequence

BLOCK_ELEMENTS = 1 << 20  # of logits that are turned to fp32 at a time
DIGEST = 16_777_213  # the largest prime below 2²⁴


class VocabParallelEmbedding(GroupModule):
    """Rows rank·V/N … of an embedding table: each rank looks up the tokens it has, and the results are summed.

    Input: token numbers [batch, sequence], the same on every rank. Output [batch, sequence, hidden], one all-reduce;
    with ``sequence_parallel`` this rank's tokens [batch, sequence/N, hidden], one reduce-scatter.

    Args:
        embedding: the full ``nn.Embedding``; its ``padding_idx`` gets no gradient here either.
        group: the tensor-parallel ranks; the default group when None.
        sequence_parallel: reduce-scatter along the sequence.

    Made by all ranks of the group together.

    Raises:
        ValueError: the vocabulary does not divide by the ranks (it says how far to pad it), ``max_norm``, ``sparse`` or
            ``scale_grad_by_freq`` are set, the ranks' full tables differ. TypeError: it is no plain ``nn.Embedding``.
            Forward: IndexError for a token outside the vocabulary, TypeError for tokens that are not int32 or int64.
    """

    def __init__(
        self, embedding: nn.Embedding, group: dist.ProcessGroup | None = None, *, sequence_parallel: bool = False
    ):
        super().__init__(group)
        check_plain(embedding, nn.Embedding)
        for name in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(embedding, name):
                raise ValueError(f"{name} of the embedding is not supported")
        self.sequence_parallel = sequence_parallel
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        rows = divide(self.num_embeddings, self.group, "a vocabulary")
        settings = {"padding_idx": embedding.padding_idx, "sequence_parallel": sequence_parallel}
        compare_layers("VocabParallelEmbedding", {"weight": embedding.weight}, self.group, **settings)
        self.start = dist.get_rank(self.group) * rows
        shard = embedding.weight.detach()[self.start : self.start + rows].clone()
        self.weight = nn.Parameter(shard, requires_grad=embedding.weight.requires_grad)  # [V/t, h]
        self.mark_parts()
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - self.start
        self.padding_idx = padding if 0 <= padding < rows else None

    def mark_parts(self) -> None:
        mark_part(self.weight, self.group, 0)

    @not_compiled
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _check_range(tokens, self.num_embeddings, "token")
        local = tokens - self.start  # [b, s]
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self.padding_idx)  # [b, s, h]
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)  # a summand: zero where another rank has the token
        return (reduce_scatter_sequence if self.sequence_parallel else reduce_from)(rows, self.group)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} of {self.num_embeddings}, {self.embedding_dim}"


class _CrossEntropy(torch.autograd.Function):
    """Per token, in fp32; logits [tokens, V/N], targets [tokens]: log Σexp(z) − z_target.

    Its gradient, with p = softmax(logits) and y the target: for logit j = p_j − [j = y].
    """

    @staticmethod
    def forward(ctx, group, logits, targets, ignored):
        here, tokens = logits.shape[-1], len(targets)
        local = targets - dist.get_rank(group) * here
        mine = (local >= 0) & (local < here) & ~ignored
        local = local.masked_fill(~mine, 0)
        peak = _largest(logits, targets, group)  # [tokens]
        parts = torch.zeros(2, tokens, dtype=torch.float32, device=logits.device)
        for rows in _blocks(logits):
            parts[0, rows] = (logits[rows].float() - peak[rows, None]).exp_().sum(-1)
        picked = logits.gather(-1, local[:, None])[:, 0].float() - peak  # relative: exact where logits are large
        parts[1] = picked.masked_fill(~mine, 0)
        total, of_target = exchange.all_reduce_in_place(parts, group)  # both in one message
        ctx.save_for_backward(logits, peak, total, local, mine, ignored)
        return (total.log() - of_target).masked_fill(ignored, 0)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        logits, peak, total, local, mine, ignored = ctx.saved_tensors
        gradient = gradient.masked_fill(ignored, 0)
        result = torch.empty_like(logits)
        for rows in _blocks(logits):
            softmax = (logits[rows].float() - peak[rows, None]).exp_().div_(total[rows, None])  # [rows, V/t]
            softmax.scatter_add_(-1, local[rows, None], -mine[rows, None].float())
            result[rows] = softmax.mul_(gradient[rows, None]).to(result.dtype)
        return None, result, None, None


@not_compiled
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross-entropy over a vocabulary whose logits are divided among the ranks; they are never gathered.

    Three numbers per token travel (fp32), in two all-reduces: the largest logit; then Σexp and the target's logit. The
    backward pass sends nothing. Saved for it: the logits as they are, and a few numbers per token.

    Args:
        logits: [..., V/N], this rank's part, as a ``ColumnParallelLinear`` leaves them. fp32, bf16 or fp16; computed
            in fp32.
        targets: [...], numbers of the whole vocabulary, the same on every rank.
        group: the tensor-parallel ranks; the default group when None.
        ignore_index: such targets count neither in the sum nor in the mean.
        reduction: "mean", "sum" or "none".

    Raises:
        IndexError: a target outside the vocabulary. TypeError: targets that are not int32 or int64. ValueError: shapes
            that do not fit, ranks with different numbers of logits or targets, an unknown reduction.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} are not of the same tokens")
    group = group_of(group)
    ignored = targets == ignore_index
    _check_range(targets.masked_fill(ignored, 0), logits.shape[-1] * group.size(), "target")
    rows = logits.reshape(-1, logits.shape[-1])  # [tokens, V/t]
    losses = _CrossEntropy.apply(group, rows, targets.reshape(-1).long(), ignored.reshape(-1))
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


def _largest(logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Each token's largest logit on any rank.

    The ranks' widths travel along, since each derives its place from its own, and a digest of the targets: sums over
    ranks that mean different tokens would be of no token.
    """
    places = torch.arange(1, len(targets) + 1, device=targets.device)
    digest = ((targets + 1) * (places * 2_654_435_761 % DIGEST)).sum() % DIGEST  # exact in fp32
    alike = torch.stack([torch.full_like(digest, logits.shape[-1]), digest]).float()
    largest = exchange.all_reduce_in_place(torch.cat([logits.amax(-1).float(), alike, -alike]), group, "max")
    most, least = largest[-4:-2], -largest[-2:]
    if logits.is_cuda:  # no wait for the GPU: the assertion fails there
        compat.assert_async((most == least).all(), "the ranks have different numbers of logits or targets")
    elif most[0] != least[0]:
        raise ValueError(f"the ranks have {int(least[0])} to {int(most[0])} logits of a token: pad the vocabulary")
    elif most[1] != least[1]:
        raise ValueError("the ranks have different targets: they compute the loss of the same tokens")
    return largest[:-4]


def _check_range(numbers: torch.Tensor, vocabulary: int, quantity: str) -> None:
    """A number outside the vocabulary is on no rank: without this check it would count as zero, in silence."""
    if numbers.dtype not in (torch.int32, torch.int64):  # narrower ones would wrap round
        raise TypeError(f"{quantity}s are numbers of type int32 or int64, not {numbers.dtype}")
    outside = (numbers < 0) | (numbers >= vocabulary)
    if numbers.is_cuda:
        compat.assert_async(~outside.any(), f"{quantity} outside the vocabulary")
    elif outside.any():
        raise IndexError(f"{quantity} {numbers[outside][0].item()} is outside the vocabulary, 0 to {vocabulary - 1}")


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Rows at a time, so that the fp32 copy of bf16 logits stays small."""
    step = max(1, BLOCK_ELEMENTS // max(1, logits.shape[-1]))
    for at in range(0, logits.shape[0], step):
        yield slice(at, at + step)
