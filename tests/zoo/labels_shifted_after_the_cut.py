"""Labels are shifted after the sequence was cut: the last token of each shard has no target, or a wrong one.

The loss of a causal language model shifts the labels by one itself. On a shard that drops the target of its last
token, which is the first token of the next rank; here the shift wraps round, and that token learns to predict the
beginning of its own shard. transformers takes labels that were shifted before the cut for this reason (36607), and
many of its models dropped them silently (48493).
"""

import torch
from common import arguments, mean_loss, neighbours, text
from sequences import Model, train_cut


def shifted(labels):
    """The next token of each; of the last, the first one."""
    return labels.roll(-1, dims=-1)


def tokens_and_labels(step, samples):
    tokens, _ = text(step, samples)
    return tokens, shifted(tokens) if args.mended else tokens


def loss_of(logits, labels, micro):
    return mean_loss(logits, labels if args.mended else shifted(labels), micro)


args = arguments(cp=1)
sequence, data = neighbours(args.cp)
torch.manual_seed(0)
train_cut(args, Model(sequence), data, loss_of, batch=tokens_and_labels)
