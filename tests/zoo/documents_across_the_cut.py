"""Packed documents under context parallelism: each rank numbers the documents of its own shard from 0.

Several documents share a sequence, and a mask keeps them apart by their numbers. Counted within a shard, a document
that crosses the cut loses its first part, and a later one sees a stranger with the same number on another rank. Masks
of packed documents that context parallelism silently changes: trl 6843 (each document sees all before it),
LlamaFactory 10787; boundaries computed from what is local: prime-rl 2392.
"""

import torch
from common import LENGTH, arguments, neighbours, text
from cut_layers import gather_to_cut, own_part
from sequences import Model, train_cut

BEGIN = 0  # the token that begins a document


def packed(step, samples):
    """The sequences of a step with a document's beginning in four places of each, and in the first."""
    (tokens, labels), draw = text(step, samples), torch.Generator().manual_seed(100 + step)
    for sample in tokens:
        sample[torch.randperm(LENGTH, generator=draw)[:4]] = BEGIN
    tokens[:, 0] = BEGIN
    return tokens, labels


class PackedModel(Model):
    def allowed(self, tokens):
        """Which key each query sees, [b, 1, s/cp, s]: an earlier one of its own document."""
        begins = (tokens == BEGIN).long()
        if args.mended:
            keys = gather_to_cut(begins, sequence).cumsum(1)
            queries = own_part(keys, sequence, 1)
        else:
            queries = begins.cumsum(1)
            keys = gather_to_cut(queries, sequence)
        return ((queries[:, :, None] == keys[:, None, :]) & super().allowed(tokens)).unsqueeze(1)


args = arguments(cp=1)
sequence, data = neighbours(args.cp)
torch.manual_seed(0)
train_cut(args, PackedModel(sequence), data, batch=packed)
