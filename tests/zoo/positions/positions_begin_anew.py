"""Position ids begin anew on each context-parallel shard: every rank counts its tokens from 0.

A model that makes its position ids from the length of what it is given works until the sequence is cut over ranks;
then the second half of every text is embedded as if it were the first. Nothing raises and the loss falls. This is why
Ulysses refuses a batch without ``position_ids`` (trl 6812); a model that ignores the ids' values and
takes the first rows of its table falls into the same trap (NeMo Automodel 2377).
"""

import common
import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.token = nn.Embedding(common.VOCABULARY, common.WIDTH)
        self.position = nn.Embedding(common.LENGTH, common.WIDTH)
        self.blocks = nn.ModuleList(common.Block(args.cp_group) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(common.WIDTH), nn.Linear(common.WIDTH, common.VOCABULARY)

    def forward(self, tokens):  # [b, s/cp]
        true = common.part(self.args, torch.arange(common.LENGTH))
        ids = true if self.args.mended else torch.arange(tokens.shape[1])
        x = self.token(tokens) + self.position(ids).expand(len(tokens), -1, -1)
        allowed = common.causal(self.args, true)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def main():
    args = common.arguments()
    torch.manual_seed(0)
    model = Model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        whole, total = common.sequences(step), torch.zeros(())
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
