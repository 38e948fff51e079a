"""DeepSpeed's own loss in tiles, ``TiledFusedLogitsLoss`` (ALST, arXiv 2506.13996, 3.1), with our shapes."""

import torch
from torch.nn import functional as F

from pardemo.peers.deepspeed.engine import deepspeed, prepare  # noqa: F401 - before anything else of DeepSpeed's


def loss(x: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, tiles: int) -> torch.Tensor:
    """The mean cross-entropy of x·headᵀ and labels, ``tiles`` tokens' parts one after the other.

    Args:
        x: [tokens, hidden]. head: [vocabulary, hidden], a leaf. labels: [tokens]. tiles: divides the tokens.
    """
    prepare()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    def of_a_tile(head: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ head.T, labels)

    return TiledFusedLogitsLoss.apply(of_a_tile, head, x[None], labels[None], None, tiles, [head], "mean")
