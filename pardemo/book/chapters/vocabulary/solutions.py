"""One way to solve each exercise of this chapter."""

import torch
import torch.distributed as dist


def my_loss(logits, targets):
    words = logits.shape[1]
    largest = logits.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[:, None]  # changes no loss, and exp never sees more than 0

    local = targets - dist.get_rank() * words
    mine = (local >= 0) & (local < words)
    target = logits.gather(1, local.clamp(0, words - 1)[:, None])[:, 0]

    # Who does not have the target adds 0; the sums of exps are added in the same call.
    sums = torch.stack([logits.exp().sum(1), target * mine])
    dist.all_reduce(sums)
    return sums[0].log() - sums[1]


def my_bytes(words, hidden, tokens, ranks, tied):
    rows = -(-words // (128 * ranks)) * 128  # padded, then divided among the ranks
    weights = rows * hidden * (1 if tied else 2)
    return 16 * weights + 8 * tokens * rows  # fp32 logits, and their gradient
