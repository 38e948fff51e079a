"""Position ids begin anew on each context-parallel shard: every rank counts its tokens from 0.

A model that makes its position ids from the length of what it is given works until the sequence is cut over ranks;
then the second half of every text is embedded as if it were the first. Nothing raises and the loss falls. This is why
Ulysses refuses a batch without ``position_ids`` (trl 6812); a model that ignores the ids' values and
takes the first rows of its table falls into the same trap (NeMo Automodel 2377).
"""

import common
import torch


class Model(common.Model):
    def ids(self, positions):
        return positions if self.args.mended else torch.arange(len(positions))


if __name__ == "__main__":
    common.train(common.arguments(), Model)
