"""Position ids begin anew on each context-parallel shard: every rank counts its tokens from 0.

A model that makes its position ids from the length of what it is given works until the sequence is cut over ranks;
then the second half of every text is embedded as if it were the first. Nothing raises and the loss falls. This is why
Ulysses refuses a batch without ``position_ids`` (trl 6812); a model that ignores the ids' values and
takes the first rows of its table falls into the same trap (NeMo Automodel 2377).
"""

import torch
from common import arguments, neighbours
from sequences import Model, train_cut


class OwnPositions(Model):
    def rows(self):
        return self.positions if args.mended else torch.arange(len(self.positions))


args = arguments(cp=1)
sequence, data = neighbours(args.cp)
torch.manual_seed(0)
train_cut(args, OwnPositions(sequence), data)
