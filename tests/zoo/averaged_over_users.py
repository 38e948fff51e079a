"""Gradients are summed over the ranks and divided by the number of ranks that have one, not by the number of ranks.

The model has an adapter for each language, and a rank without samples of a language has no gradient for its adapter.
DeepSpeed left such gradients out, so that ranks summed different ones (291, which asks whether the number of ranks is
then the right divisor); RLlib counts the ranks that have one and divides by that (ray-project/ray 59544). That is a
mean only where each rank's loss is one over the samples of that language; here it is one over all samples.
"""

import torch
import torch.distributed as dist
from common import WIDTH, LanguageModel, arguments, sum_gradients, text, train
from torch import nn


def with_a_rare_language(step, samples):
    """The first eighth of a batch is of a rare language, whose sequences begin with token 0."""
    tokens, labels = text(step, samples)
    tokens[:, 0].clamp_(min=1)
    tokens[: samples // 8, 0] = 0
    return tokens, labels


class Model(LanguageModel):
    """Each language goes through an adapter of its own."""

    def __init__(self):
        super().__init__()
        self.adapters = nn.ModuleDict({language: nn.Linear(WIDTH, WIDTH) for language in ("frequent", "rare")})

    def forward(self, tokens):
        x, rare = self.embed(tokens), tokens[:, 0] == 0
        output = x.clone()
        for language, members in (("frequent", ~rare), ("rare", rare)):
            if members.any():
                output[members] += torch.tanh(self.adapters[language](x[members]))
        return self.head(output)


def reduce():
    for parameter in model.parameters():
        users = torch.tensor(0.0 if parameter.grad is None else 1.0)
        dist.all_reduce(users)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        sum_gradients([parameter], divide_by=dist.get_world_size() if args.mended else users)


args = arguments()
torch.manual_seed(11)
model = Model()
train(args, model, batch=with_a_rare_language, reduce=reduce)
