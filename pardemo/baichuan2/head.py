"""NormHead, and the loss with logits only where there is a label."""

import torch
import torch.nn.functional as F
from torch import nn


class NormHead(nn.Linear):
    """Logits of hidden states against the rows of ``weight`` [v, h], each divided by its length.

    A linear layer without bias for those who ask: Transformers resizes no other head.

    The checkpoint holds the rows as they are. The official code overwrites them at the first inference, which is lost
    under ZeRO-3; here the logits are divided instead, so that nothing is written and no second copy of the weight made.
    """

    def __init__(self, hidden: int, vocabulary: int, normalize: bool = True):
        super().__init__(hidden, vocabulary, bias=False)
        self.normalize = normalize

    def reset_parameters(self) -> None:
        """Nothing: the model's own initialisation comes after, or a checkpoint."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, h] → logits […, v] in the weight's type."""
        logits = F.linear(hidden, self.weight)
        if not self.normalize:
            return logits
        length = torch.linalg.vector_norm(self.weight, dim=1, dtype=torch.float32).clamp_min(1e-12)
        return (logits.float() / length).to(logits.dtype)


def label_loss(
    head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Cross-entropy of the next token, in fp32, with logits made only for positions that have a label.

    Equal to the loss over all logits to rounding, gradients too; a headline's labels are a tenth of its tokens, and the
    logits are the largest tensor of the step (batch 8 × 1024 × 125,696 in fp32: 4.1 GB).

    Args:
        hidden: [b, s, h]. labels: [b, s], −100 where there is none; position i predicts label i + 1.
        items: divide the sum by this (labels of all micro-batches) instead of by the number of labels here.
    """
    before, after = hidden[:, :-1].reshape(-1, hidden.shape[-1]), labels[:, 1:].reshape(-1)
    chosen = (after != -100).nonzero().squeeze(-1)
    return cross_entropy(head(before[chosen]), after[chosen], items)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | int | None = None) -> torch.Tensor:
    """:func:`label_loss` of logits [..., v] that predict ``labels`` [...], position by position."""
    logits, labels = logits.flatten(0, -2).float(), labels.flatten()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    count = (labels != -100).sum() if items is None else items
    if isinstance(count, torch.Tensor):
        count = count.to(total.device).clamp_min(1)  # no label at all: 0, not 0/0
    return total / count
