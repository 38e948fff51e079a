"""Packed documents under context parallelism: each rank numbers the documents of its own shard from 0.

Several documents share a sequence, and a mask keeps them apart by their numbers. Counted within a shard, a document
that crosses the cut loses its first part, and a later one sees a stranger with the same number on another rank. Masks
of packed documents that context parallelism silently changes: trl 6843 (each document sees all before it),
LlamaFactory 10787; boundaries computed from what is local: prime-rl 2392.
"""

import common
import torch
from torch import nn
from torch.nn import functional

BEGIN = 0  # the token that begins a document


def packed(step):
    """The sequences of a step with a document's beginning in four places of each."""
    whole, draw = common.sequences(step), torch.Generator().manual_seed(100 + step)
    for sequence in whole:
        sequence[torch.randperm(common.LENGTH, generator=draw)[:4]] = BEGIN
    whole[:, 0] = BEGIN
    return whole


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.token = nn.Embedding(common.VOCABULARY, common.WIDTH)
        self.position = nn.Embedding(common.LENGTH, common.WIDTH)
        self.blocks = nn.ModuleList(common.Block(args.cp_group) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(common.WIDTH), nn.Linear(common.WIDTH, common.VOCABULARY)

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

    def forward(self, tokens):  # [b, s/cp]
        positions = common.part(self.args, torch.arange(common.LENGTH))
        x = self.token(tokens) + self.position(positions).expand(len(tokens), -1, -1)
        allowed = self.allowed(tokens, positions)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def main():
    args = common.arguments()
    torch.manual_seed(0)
    model = Model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        whole, total = packed(step), torch.zeros(())
        optimizer.zero_grad()
        for sequence in common.micro_batches(args, whole):
            tokens, targets = common.part(args, sequence[:, :-1]), common.part(args, sequence[:, 1:])
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss / whole[:, 1:].numel()
            loss.backward()
            total += loss.detach()
        common.finish(model, total, step)
        optimizer.step()


if __name__ == "__main__":
    main()
