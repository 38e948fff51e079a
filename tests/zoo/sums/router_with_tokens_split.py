"""The router's gradient is a part of a sum and taken for the whole, where experts get the tokens split over the ranks.

Every rank routes all tokens, and each sends its own part of them through the experts; so what comes back to the
router on a rank is of that part. torchtitan took it for the whole (2387, 2388, 2416): routers of tensor-parallel
ranks were different after the first step. "I can't think of a worse class of bugs for MoEs", the report says.
"""

import common
from torch import nn

WIDTH, EXPERTS = 16, 4


class Mixture(nn.Module):
    """A router and experts that all ranks have; a rank computes them for its part of the sequence."""

    def __init__(self, tensor, mended):
        super().__init__()
        self.tensor, self.mended = tensor, mended
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = common.Experts(EXPERTS, WIDTH)

    def forward(self, x):
        part = common.split if self.mended else common.own_part  # which lets the gradients of a part go back
        weights = part(common.choose(self.router(x)), self.tensor, dim=1)  # [b, s/t, e]
        return common.join(self.experts(common.split(x, self.tensor), weights), self.tensor)


class Model(nn.Module):
    def __init__(self, tensor, mended):
        super().__init__()
        self.embed = nn.Embedding(common.VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixtures = nn.ModuleList(Mixture(tensor, mended) for _ in range(2))
        self.head = nn.Linear(WIDTH, common.VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.head(x)


def own_sums(model, tensor, args):
    for mixture in model.mixtures:
        common.sum_gradients(mixture.experts.parameters(), tensor)


if __name__ == "__main__":
    common.train_cut(4, lambda tensor, args: Model(tensor, args.mended), own_sums)
