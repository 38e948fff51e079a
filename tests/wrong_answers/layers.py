"""Wrong answers about layers that are cut, experts, long sequences and pipelines."""

import math

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.book.chapters.experts.exercises import my_splits
from pardemo.book.chapters.long_sequences.exercises import my_merge, my_positions
from pardemo.book.chapters.megatron_attention.exercises import my_rows, my_shared_sum
from pardemo.book.chapters.megatron_mlp.exercises import SumBackward
from pardemo.book.chapters.pipelines_without_bubbles.exercises import idle_of, my_late
from pardemo.book.chapters.sequence_parallel.exercises import my_kept
from pardemo.book.chapters.vocabulary.exercises import my_loss
from pardemo.collectives import ring_all_reduce
from pardemo.groups import ParallelDims
from pardemo.pipeline_parallel import Backward, Forward, gpipe, one_f_one_b, zb_h1
from pardemo.tensor_parallel import copy_to, exchange, reduce_from
from wrong_answers.common import divides_by_zero, gathered, raises_at_length


def merged_without_largest(first, second):
    sums = [math.exp(block[0]) * block[1] for block in (first, second)]
    largest = max(first[0], second[0])
    out = (sums[0] * first[2] + sums[1] * second[2]) / sum(sums)
    return largest, sum(sums) / math.exp(largest), out


class InPlace(SumBackward):
    @staticmethod
    def backward(ctx, gradient):
        return ring_all_reduce(gradient)


def sends(x):
    return ring_all_reduce(torch.ones(1 << 12)).sum() + x.detach()[0, 0]


def sums_by_hook(x):
    y = x.view_as(x)
    x.register_hook(lambda g: ring_all_reduce(g.clone()))
    return y


def tokens_divided(x, a, b):
    rank, n = dist.get_rank(), dist.get_world_size()
    return exchange.all_gather(F.gelu(x.chunk(n, 1)[rank] @ a) @ b, dist.group.WORLD, 1)


def parts(a, b):
    rank, n = dist.get_rank(), dist.get_world_size()
    return a.chunk(n, 1)[rank], b.chunk(n, 0)[rank]


def never_added(x, a, b):
    a, b = parts(a, b)
    return F.gelu(x @ a) @ b


def rows_first(x, a, b):
    rank, n = dist.get_rank(), dist.get_world_size()
    inner = F.gelu(ring_all_reduce(x.chunk(n, -1)[rank] @ a.chunk(n, 0)[rank]))
    return ring_all_reduce(inner.chunk(n, -1)[rank] @ b.chunk(n, 0)[rank])


def gelus_added(x, a, b):
    rank, n = dist.get_rank(), dist.get_world_size()
    return ring_all_reduce(F.gelu(x.chunk(n, -1)[rank] @ a.chunk(n, 0)[rank])) @ b


def sent_but_not_shared(x, a, b):
    ring_all_reduce(torch.zeros_like(x))
    return F.gelu(x @ a) @ b


def mean_of_copies(gradient, kv_heads):
    return my_shared_sum(gradient, kv_heads) * kv_heads / dist.get_world_size()


def sum_of_every_other(gradient, kv_heads):
    groups = [dist.new_group(list(range(at, dist.get_world_size(), kv_heads))) for at in range(kv_heads)]
    return ring_all_reduce(gradient, groups[dist.get_rank() % kv_heads])


def loss_with_gather(logits, targets):
    return F.cross_entropy(torch.cat(gathered(logits), 1), targets, reduction="none")


def loss_in_three(logits, targets):
    largest, words = logits.amax(1), logits.shape[1]
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    total = (logits - largest[:, None]).exp().sum(1)
    dist.all_reduce(total)
    local = targets - dist.get_rank() * words
    mine = (local >= 0) & (local < words)
    label = logits.gather(1, local.clamp(0, words - 1)[:, None])[:, 0] * mine
    dist.all_reduce(label)
    return largest + total.log() - label


def summed_one_by_one(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def loss_that_overflows(logits, targets):
    local = targets - dist.get_rank() * logits.shape[1]
    mine = (local >= 0) & (local < logits.shape[1])
    picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * mine
    both = torch.stack([logits.exp().sum(1), picked])
    dist.all_reduce(both)
    return both[0].log() - both[1]


def local_loss(logits, targets):
    targets = (targets - dist.get_rank() * logits.shape[1]).clamp(0, logits.shape[1] - 1)
    return F.cross_entropy(logits, targets, reduction="none")


def no_warm_up(rank, ranks, micro_batches):
    for k in range(micro_batches):
        yield Forward(rank, k)
        yield Backward(rank, k)


def bounded(rank, most, micro_batches):
    """As far ahead as the memory goes, also where nobody needs it."""
    ahead = min(most - 1, micro_batches)
    for k in range(ahead):
        yield Forward(rank, k)
    for k in range(ahead, micro_batches):
        yield Forward(rank, k)
        yield Backward(rank, k - ahead)
    for k in range(micro_batches - ahead, micro_batches):
        yield Backward(rank, k)


#: Of each exercise the answers that are wrong, and what is said to each.
WRONG = {
    "pipeline_parallel.bubble": [
        (lambda p, share: round((p - 1) / share), "this share of the ideal time; of the total time it is smaller"),
        (lambda p, share: 0, "at least one micro-batch"),
        (lambda p, share: 5, "and more than this share of the total time is idle"),
        (lambda p, share: 500, "too many, fewer are enough"),
        (lambda stages, share: float("nan"), "should be 27 micro-batches, not nan"),
    ],
    "pipelines_without_bubbles.late": [
        (lambda *sizes: one_f_one_b(*sizes[:3]), "a whole Backward puts nothing off"),
        (lambda *sizes: zb_h1(*sizes[:3]), "4 ranks, 8 micro-batches, at most 2 put off: rank 3 has put 3"),
        (lambda rank, ranks, m, late: my_late(rank, ranks, m, min(late, 1)), "are enough: put more off"),
        (lambda *sizes: list(zb_h1(*sizes[:3]))[:-1], "is never told W"),
        (lambda *sizes: ["W"], "yielded 'W'"),
    ],
    "pipelines_without_bubbles.idle": [
        (lambda spans: 6.0, "it returned 6; it should return a list with a number for each rank"),
        (lambda spans: idle_of(spans)[:-1], "there are 2 ranks"),
        (lambda spans: [float("nan")] * len(idle_of(spans)), "it should be [1.0, 4.0], not [nan, nan]"),
    ],
    "pipeline_parallel.order": [
        (lambda rank, ranks, m, most: ["F"] * m, "yielded 'F'"),
        (lambda *sizes: iter(divides_by_zero, None), "Your generator raised ZeroDivisionError"),
        (lambda *sizes: gpipe(*sizes[:3]), "memory for 2: rank 0 holds 4 micro-batches."),
        (lambda *sizes: one_f_one_b(*sizes[:3]), "4 ranks, 8 micro-batches, memory for 2: rank 0 holds 4"),
        (lambda rank, ranks, m, most: bounded(rank, most, m), "micro-batches, and 1 are enough"),
        (lambda *sizes: no_warm_up(*sizes[:3]), "it takes"),
        (lambda *sizes: reversed(list(one_f_one_b(*sizes[:3]))), "rank 0 is told B 0.3 before F 0.3"),
        (lambda *sizes: list(one_f_one_b(*sizes[:3]))[:-1], "rank 0 is never told B 0.3"),
    ],
    "megatron_mlp.f": [
        (lambda x: x, "this rank's gradient alone: backward needs the all-reduce"),
        (lambda x: x.detach(), "carries no gradient"),
        (reduce_from, "forward it should return x as it is"),
        (InPlace.apply, "changed in place"),
        (lambda x: copy_to(x / 4) + x.detach() * 0.75, "is not the sum of the ranks' gradients"),
        (lambda x: copy_to(x) + 0 * dist.get_rank() * sends(x), "it should send nothing"),
        (sums_by_hook, "the residual's gradient was summed"),
        (torch.ones(2), 'Hand over the function itself, without calling it: check("f", my_f).'),
        (raises_at_length, "Your function raised on rank 0: ValueError: what is wrong"),
    ],
    "megatron_mlp.split": [
        (tokens_divided, "with 1.0φ the tokens were divided, not the layer"),
        (lambda x, a, b: x @ a, "it should return a tensor of shape (2, 512, 256), not (2, 512, 1024)"),
        (lambda x, a, b: F.gelu(x @ a) @ b, "nothing was sent"),
        (never_added, "this rank's part of the sum alone"),
        (gelus_added, "GeLU(x + y) is not GeLU(x) + GeLU(y)"),
        (rows_first, "sends 10.0φ, and 2φ is enough: that is the all-reduce of the inner"),
        (sent_but_not_shared, "a rank does 100% of the arithmetic"),
        (lambda x, a, b: x * 0, "the result is not gelu(x @ w_1) @ w_2"),
        (lambda x, a, b: x.double(), "the result is not gelu(x @ w_1) @ w_2"),
    ],
    "megatron_attention.qkv_rows": [
        (lambda w, heads, r, n: w.chunk(n, 0)[r], "the matrix in 2 equal pieces"),
        (lambda w, heads, r, n: my_rows(w, heads, r, n).flip(0), "in another order"),
        (lambda w, heads, r, n: w[:1], "rows [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19] are needed, not [0]"),
        (lambda w, heads, r, n: w[99999], "Your function raised IndexError"),
        (lambda *a: torch.tensor(0.0), "It returned shape ()"),
    ],
    "megatron_attention.shared_heads": [
        (lambda g, kv: g, "this rank's own gradient: others hold the same head (with 2"),
        (lambda g, kv: ring_all_reduce(g), "the sum over all ranks: different heads were added"),
        (mean_of_copies, "that is the mean; each replica needs the sum"),
        (sum_of_every_other, "every other rank was added; neighbours hold the same head"),
        (lambda g, kv: 3 * g, "not the sum over the ranks that hold the same head"),
    ],
    "vocabulary.vocabulary_loss": [
        (loss_with_gather, "the logits themselves travel"),
        (local_loss, "this rank's part of the vocabulary alone"),
        (lambda x, t: -my_loss(x, t), "the sign is turned round"),
        (loss_that_overflows, "overflow exp: subtract the largest logit"),
        (lambda x, t: my_loss(x, t) * 0, "not those of the whole vocabulary"),
        (loss_in_three, "in 3 collectives; 2 are enough"),
    ],
    "sequence_parallel.norm_gradients": [
        (lambda g: g, "the parts of this rank's own tokens"),
        (lambda g: [one / 2 for one in summed_one_by_one(g)], "these are means"),
        (summed_one_by_one, "Right, in 3 messages"),
        (lambda g: [one.flatten() for one in g], "as they came, not [(48,), (48,), (48,)]"),
    ],
    "sequence_parallel.activations": [
        (lambda *a: my_kept(*a[:-1], False), "FlashAttention keeps no scores"),
    ],
    "long_sequences.positions": [
        (
            lambda r, n, s: [k + s // (2 * n) for k in my_positions(r, n, s)],
            "For rank = 0, ranks = 2, tokens = 16 it should be [0, 1, 2, 3, 12, 13, 14, 15], not [4, 5",
        ),
    ],
    "long_sequences.merge": [
        (lambda a, b: (a[0], *my_merge(a, b)[1:]), "the largest score of both blocks is"),
        (
            lambda a, b: (max(a[0], b[0]), a[1] + b[1], my_merge(a, b)[2]),
            "relative to different largest scores, and have to be brought to one",
        ),
        (merged_without_largest, "Your function raised OverflowError"),
    ],
    "experts.splits": [
        (lambda c, e: (1, 2), "it should return two lists of 2 numbers, not (1, 2)"),
        (lambda c, e: (c.flatten().bincount(minlength=e),) * 2, "counts of the 6 experts"),
        (lambda c, e: c.flatten().bincount().view(2, -1).sum(1), "shape '[2, -1]' is invalid"),
        (lambda c, e: (my_splits(c, e)[0],) * 2, "it expects to receive what it sends"),
        (lambda c, e: my_splits(c, e)[::-1], "first comes what is sent, then what is received"),
        (lambda c, e: ([1, 2], my_splits(c, e)[1]), "it would send [1, 2], and the router chose"),
        (lambda c, e: (my_splits(c, e)[0], [1, 2]), "it expects to receive [1, 2], and the other"),
    ],
    "experts.bias": [
        (lambda b, load: b + 1, "it should be tensor([ 0.4990, -0.2490, 0.0000, 0.1260]), not tensor([1.5000"),
    ],
    "hybrid_parallel.groups": [
        (lambda *a: [["x"]], "It returned [['x']]"),
        (lambda axis, tp, dp, pp: ParallelDims(tp=tp, dp=dp, pp=pp).groups(axis)[:-1], "there are 4 groups, not 3"),
        (
            lambda axis, tp, dp, pp: ParallelDims(tp=tp, dp=dp, pp=pp, order="pp-dp-tp").groups(axis),
            "the groups of the order pp-dp-tp",
        ),
        (lambda axis, *s: [[0, 7], [1, 2], [3, 4], [5, 6]], "[0, 7] is no group; rank 0's is [0, 1]"),
        (lambda axis, tp, dp, pp: [], "there are 4 groups, not 0"),
    ],
    "hybrid_parallel.order": [
        (lambda: "pp-dp-tp", "spans 4 nodes: let tp run fastest"),
        (lambda: "tp-pp-dp", "spans 4 nodes, 2 are enough"),
    ],
}
