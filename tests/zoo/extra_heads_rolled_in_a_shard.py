"""Labels of multi-token prediction are moved on inside each rank's part of the sequence.

The extra heads predict the second and the third next token; their labels are the labels, rolled. The sequence is cut
over ranks, and where a part ends the roll brings its own beginning in place of the neighbour's: wrong labels at each
cut, which nothing masks because the sequence goes on. mbridge 138 (parts "wrap within themselves"); Megatron-LM 1795
asks how the roll is meant to cross the cut, 4495 and 6205 mend it for packed sequences.
"""

import torch
from common import IGNORED, LENGTH, VOCAB, WIDTH, arguments, average_gradients, cross_entropy, neighbours, text, train
from cut_layers import own_part
from sequences import Model
from torch import nn

EXTRA = 2


class MultiToken(Model):
    """Predicts each token's next one and those after it (arXiv 2404.19737); of each sequence a rank has its part."""

    def __init__(self):
        super().__init__(sequence)
        self.extra = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(EXTRA))

    def forward(self, tokens):
        hidden = self.hidden(tokens)
        return [self.head(hidden), *(head(hidden) for head in self.extra)]


def parts(step, samples):
    tokens, labels = text(step, samples)
    moved_labels = []
    for ahead in range(EXTRA + 1):
        if args.mended:
            moved = own_part(labels.roll(-ahead, 1), sequence, 1)
        else:
            moved = own_part(labels, sequence, 1).roll(-ahead, 1)
        moved_labels.append(moved.masked_fill(model.positions >= LENGTH - ahead, IGNORED))  # the end of the sequence
    return own_part(tokens, sequence, 1), *moved_labels


def loss_of(outputs, *labels_and_micro):
    *labels, micro = labels_and_micro
    loss = sum(
        cross_entropy(logits, moved, reduction="sum") * args.cp / (len(moved) * (LENGTH - ahead) * (EXTRA + 1))
        for ahead, (logits, moved) in enumerate(zip(outputs, labels, strict=True))
    )
    return loss / len(micro), loss / len(micro)


args = arguments(cp=1)
sequence, data = neighbours(args.cp)
torch.manual_seed(0)
model = MultiToken()
train(args, model, loss_of, batch=parts, group=data, reduce=lambda: average_gradients(model.parameters()))
