"""The vocabulary divided among the ranks: its embedding, and the loss over logits that no rank ever has whole."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import compat
from pardemo.collectives.decorators import first_derivative_only, not_compiled
from pardemo.groups import group_of
from pardemo.tensor_parallel import exchange
from pardemo.tensor_parallel.full_layers import check_plain, compare
from pardemo.tensor_parallel.gradients import show_parts
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

    cut = ("weight",)

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
        ranks = self.group.size()
        if self.num_embeddings % ranks:
            padded = -(-self.num_embeddings // ranks) * ranks
            raise ValueError(
                f"a vocabulary of {self.num_embeddings} does not divide by the {ranks} ranks of the group: "
                f"pad the embedding to {padded} rows"
            )
        settings = {"padding_idx": embedding.padding_idx, "sequence_parallel": sequence_parallel}
        compare("VocabParallelEmbedding", {"weight": embedding.weight}, self.group, **settings)
        rows = self.num_embeddings // ranks
        self.start = dist.get_rank(self.group) * rows
        own = embedding.weight.detach()[self.start : self.start + rows].clone()
        self.weight = nn.Parameter(own, requires_grad=embedding.weight.requires_grad)  # [V/t, h]
        show_parts(self)
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - self.start
        self.padding_idx = padding if 0 <= padding < rows else None

    @not_compiled
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _check_range(tokens, None, self.num_embeddings, "token")
        local = tokens - self.start  # [b, s]
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self.padding_idx)  # [b, s, h]
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)  # a summand: zero where another rank has the token
        reduce = reduce_scatter_sequence if self.sequence_parallel else reduce_from
        return reduce(rows, self.group, f"an embedding ({self.trained()})")

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} of {self.num_embeddings}, {self.embedding_dim}"


class _CrossEntropy(torch.autograd.Function):
    """Per token, in fp32; logits [tokens, V/N], targets [tokens], weights of the classes [V] or None.

    With p = softmax(logits), w the weights, W their sum, y the target and ε the smoothing:

    - loss = −(1−ε)·w_y·log p_y − ε/V·Σ_j w_j·log p_j, as in ``F.cross_entropy``
    - its gradient, for logit j = ((1−ε)·w_y + ε/V·W)·p_j − (1−ε)·w_y·[j = y] − ε/V·w_j
    """

    @staticmethod
    def forward(ctx, group, logits, targets, ignored, weight, smoothing):
        here, tokens = logits.shape[-1], len(targets)
        first, vocabulary = dist.get_rank(group) * here, here * group.size()
        local = targets - first
        mine = (local >= 0) & (local < here) & ~ignored
        local = local.masked_fill(~mine, 0)
        own = None if weight is None else weight[first : first + here]  # [V/N]
        peak = _largest(logits, targets, group, weight, smoothing)  # [tokens]
        parts = torch.zeros(3 if smoothing else 2, tokens, dtype=torch.float32, device=logits.device)
        for rows in _blocks(logits):
            shifted = logits[rows].float() - peak[rows, None]
            if smoothing:
                parts[2, rows] = shifted.sum(-1) if own is None else shifted @ own
            parts[0, rows] = shifted.exp_().sum(-1)
        picked = logits.gather(-1, local[:, None])[:, 0].float() - peak  # relative: exact where logits are large
        parts[1] = picked.masked_fill(~mine, 0)
        total, target_logit, *sums = exchange.all_reduce_in_place(parts, group)  # all in one message
        of_target = (1 - smoothing) * _of_targets(targets, ignored, weight)  # [tokens]
        of_all = smoothing * (peak.new_ones(()) if weight is None else weight.mean())
        loss = of_target * (total.log() - target_logit)
        if smoothing:
            loss += of_all * total.log() - smoothing / vocabulary * sums[0]
        ctx.save_for_backward(logits, peak, total, local, mine, ignored, of_target, of_all, own)
        ctx.each = smoothing / vocabulary
        return loss.masked_fill(ignored, 0)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient):
        logits, peak, total, local, mine, ignored, of_target, of_all, own = ctx.saved_tensors
        gradient = gradient.masked_fill(ignored, 0)
        result = torch.empty_like(logits)
        for rows in _blocks(logits):
            softmax = (logits[rows].float() - peak[rows, None]).exp_().div_(total[rows, None])  # [rows, V/t]
            softmax.mul_((of_target[rows] + of_all)[:, None])
            softmax.scatter_add_(-1, local[rows, None], -(of_target[rows] * mine[rows])[:, None])
            if ctx.each:
                softmax.sub_(ctx.each if own is None else ctx.each * own)
            result[rows] = softmax.mul_(gradient[rows, None]).to(result.dtype)
        return None, result, None, None, None, None


@not_compiled
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy over a vocabulary whose logits are divided among the ranks; they are never gathered.

    Three numbers per token travel (fp32), in two all-reduces: the largest logit; then Σexp and the target's logit, and
    with ``label_smoothing`` the sum of the logits. The backward pass sends nothing. Saved for it: the logits as they
    are, and a few numbers per token.

    Args:
        logits: [..., V/N], this rank's part, as a ``ColumnParallelLinear`` leaves them. fp32, bf16 or fp16; computed
            in fp32.
        targets: [...], numbers of the whole vocabulary, the same on every rank.
        group: the tensor-parallel ranks; the default group when None.
        ignore_index: such targets count neither in the sum nor in the mean.
        reduction: "mean", "sum" or "none".
        label_smoothing: the share of the target, 0 to 1, that is spread over all V classes, padded ones too.
        weight: [V] of the whole vocabulary, the same on every rank: a factor for each class; "mean" divides by the sum
            of the targets' factors, as in ``F.cross_entropy``. Gets no gradient.

    Raises:
        IndexError: a target outside the vocabulary. TypeError: targets that are not int32 or int64. ValueError: shapes
            that do not fit, ranks with different numbers of logits, targets, weights or smoothing, a smoothing that is
            no share, weights of a part of the vocabulary or with a gradient, an unknown reduction.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, "
                         f"not {tuple(targets.shape)}")  # fmt: skip
    group = group_of(group)
    ignored = targets == ignore_index
    _check_range(targets, ignored, logits.shape[-1] * group.size(), "target")
    rows = logits.reshape(-1, logits.shape[-1])  # [tokens, V/t]
    weight = _check_smoothing(label_smoothing, weight, rows, logits.shape[-1] * group.size())
    flat, ignored = targets.reshape(-1).long(), ignored.reshape(-1)
    losses = _CrossEntropy.apply(group, rows, flat, ignored, weight, label_smoothing)
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    if reduction == "sum":
        return total
    return total / ((~ignored).sum() if weight is None else _of_targets(flat, ignored, weight).sum())


def _check_smoothing(
    label_smoothing: float, weight: torch.Tensor | None, rows: torch.Tensor, vocabulary: int
) -> torch.Tensor | None:
    """The classes' weights in fp32; ValueError for those that are none, or for a smoothing that is no share."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
    if weight is None:
        return None
    if tuple(weight.shape) != (vocabulary,) or weight.requires_grad:
        trained = " that are trained" if weight.requires_grad else ""
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}{trained}: give the {vocabulary} factors of the whole vocabulary, "
            "without gradient, on every rank"
        )
    return weight.to(rows.device, torch.float32)


def _of_targets(targets: torch.Tensor, ignored: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Each token's weight, 0 where its target is ignored: [tokens]."""
    if weight is None:
        return (~ignored).float()
    return weight[targets.masked_fill(ignored, 0)].masked_fill(ignored, 0)


def _largest(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, weight: torch.Tensor | None, smoothing: float
) -> torch.Tensor:
    """Each token's largest logit on any rank.

    The ranks' widths travel along, since each derives its place from its own, and digests of the targets and of the
    weights: sums over ranks that mean different tokens would be of no token.
    """
    digest = _digest(targets)
    bits = digest.new_zeros(()) if weight is None else _digest(weight.view(torch.int32).long() % DIGEST)
    alike = torch.stack([torch.full_like(digest, logits.shape[-1]), digest, bits]).float()
    alike = torch.cat([alike, alike.new_tensor([smoothing])])
    largest = exchange.all_reduce_in_place(torch.cat([logits.amax(-1).float(), alike, -alike]), group, "max")
    most, least = largest[-8:-4], -largest[-4:]
    words = ("numbers of logits", "targets", "weights", "label_smoothing")
    if logits.is_cuda:
        compat.assert_async((most == least).all(), f"the ranks have different {' or '.join(words)}")
    elif most[0] != least[0]:
        raise ValueError(
            f"the ranks have different numbers of logits, {int(least[0])} to {int(most[0])}: pad the vocabulary"
        )
    elif differ := [word for word, a, b in zip(words, most, least, strict=True) if a != b]:
        raise ValueError(
            f"the ranks have different {differ[0]}: tensor-parallel ranks compute the loss of the same tokens"
        )
    return largest[:-8]


def _digest(numbers: torch.Tensor) -> torch.Tensor:
    """A number below 2²⁴, exact in fp32, that depends on all of ``numbers`` and on their order."""
    places = torch.arange(1, len(numbers) + 1, device=numbers.device)
    return ((numbers + 1) * (places * 2_654_435_761 % DIGEST)).sum() % DIGEST


def _check_range(numbers: torch.Tensor, ignored: torch.Tensor | None, vocabulary: int, what: str) -> None:
    """A number outside the vocabulary is on no rank: without this check it would count as zero, in silence."""
    if numbers.dtype not in (torch.int32, torch.int64):  # narrower ones would wrap round
        raise TypeError(f"{what}s are numbers of type int32 or int64, not {numbers.dtype}")
    outside = (numbers < 0) | (numbers >= vocabulary)
    outside = outside if ignored is None else outside & ~ignored
    if numbers.is_cuda:  # no wait for the GPU: the assertion fails there
        compat.assert_async(~outside.any(), f"{what} outside the vocabulary")
    elif outside.any():
        raise IndexError(f"{what} {numbers[outside][0].item()} is outside the vocabulary, 0 to {vocabulary - 1}")


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Rows at a time, so that the fp32 copy of bf16 logits stays small."""
    step = max(1, BLOCK_ELEMENTS // max(1, logits.shape[-1]))
    for at in range(0, logits.shape[0], step):
        yield slice(at, at + step)
