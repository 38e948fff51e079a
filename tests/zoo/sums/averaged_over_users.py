"""Gradients are summed over the ranks and divided by the number of ranks that have one, not by the number of ranks.

The model has an adapter for each language, and a rank without samples of a language has no gradient for its adapter.
DeepSpeed left such gradients out, so that ranks summed different ones (291, which asks whether the number of ranks is
then the right divisor); RLlib counts the ranks that have one and divides by that (ray-project/ray 59544). That is a
mean only where each rank's loss is one over the samples of that language; here it is one over all samples.
"""

import common
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 32


def rare_first(tokens):
    """Makes the first eighth of a batch sequences of a rare language, which begin with token 0."""
    tokens[:, 0].clamp_(min=1)
    tokens[: len(tokens) // 8, 0] = 0


class Model(nn.Module):
    """Each language goes through an adapter of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(common.VOCAB, WIDTH)
        self.adapters = nn.ModuleDict({language: nn.Linear(WIDTH, WIDTH) for language in ("frequent", "rare")})
        self.head = nn.Linear(WIDTH, common.VOCAB)

    def forward(self, tokens):
        x, rare = self.embed(tokens), tokens[:, 0] == 0
        output = x.clone()
        for language, members in (("frequent", ~rare), ("rare", rare)):
            if members.any():
                output[members] += torch.tanh(self.adapters[language](x[members]))
        return self.head(output)


if __name__ == "__main__":
    args = common.arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = Model()

    def reduce():
        for parameter in model.parameters():
            users = torch.tensor(0.0 if parameter.grad is None else 1.0)
            dist.all_reduce(users)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            common.sum_gradients([parameter], divide_by=dist.get_world_size() if args.mended else users)

    common.train(args, model, model.parameters(), reduce, mark=rare_first)
