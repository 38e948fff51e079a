"""Labels are shifted after the sequence was cut: the last token of each shard has no target, or a wrong one.

The loss of a causal language model shifts the labels by one itself. On a shard that drops the target of its last
token, which is the first token of the next rank; here the shift wraps round, and that token learns to predict the
beginning of its own shard. transformers takes labels that were shifted before the cut for this reason (36607), and
many of its models dropped them silently (48493).
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
        positions = common.part(self.args, torch.arange(common.LENGTH))
        x = self.token(tokens) + self.position(positions).expand(len(tokens), -1, -1)
        allowed = common.causal(self.args, positions)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def shifted(labels):
    """The next token of each; of the last, the first one."""
    return labels.roll(-1, dims=-1)


def main():
    args = common.arguments()
    torch.manual_seed(0)
    model = Model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        whole, total = common.sequences(step)[:, :-1], torch.zeros(())
        optimizer.zero_grad()
        for sequence in common.micro_batches(args, whole):
            tokens = common.part(args, sequence)
            targets = common.part(args, shifted(sequence)) if args.mended else shifted(tokens)
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss / whole.numel()
            loss.backward()
            total += loss.detach()
        common.finish(model, total, step)
        optimizer.step()


if __name__ == "__main__":
    main()
