"""Packed documents under context parallelism: each rank numbers the documents of its own shard from 0.

Several documents share a sequence, and a mask keeps them apart by their numbers. Counted within a shard, a document
that crosses the cut loses its first part, and a later one sees a stranger with the same number on another rank. Masks
of packed documents that context parallelism silently changes: trl 6843 (each document sees all before it),
LlamaFactory 10787; boundaries computed from what is local: prime-rl 2392.
"""

import common
import torch

BEGIN = 0  # the token that begins a document


def packed(step):
    """The sequences of a step with a document's beginning in four places of each."""
    whole, draw = common.sequences(step), torch.Generator().manual_seed(100 + step)
    for sequence in whole:
        sequence[torch.randperm(common.LENGTH, generator=draw)[:4]] = BEGIN
    whole[:, 0] = BEGIN
    return whole


class Model(common.Model):
    def allowed(self, tokens, positions):
        """Which key each query sees, [b, 1, s/cp, s]: an earlier one of its own document."""
        begins = (tokens == BEGIN).long()
        if self.args.mended:
            keys = common.Gathered.apply(begins, self.args.cp_group).cumsum(1)
            queries = common.part(self.args, keys)
        else:
            queries = begins.cumsum(1)
            keys = common.Gathered.apply(queries, self.args.cp_group)
        same = queries[:, :, None] == keys[:, None, :]
        return (same & common.causal(self.args, positions)).unsqueeze(1)


if __name__ == "__main__":
    common.train(common.arguments(), Model, packed)
