"""A stream of samples is read from its beginning on each rank, so that all ranks train on the same samples.

An IterableDataset has no sampler: nobody divides it but itself. DistributedDataParallel does not, and a loader
takes what comes. Streams of Hugging Face's datasets came whole on each rank until `split_dataset_by_node` was there
(datasets 5360), and 7868 has them again when splitting and interleaving meet.
"""

from itertools import islice

import torch.distributed as dist
from common import arguments, text, train_on
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Samples without an end, each made from its number; of every `step` of them the one at `start`."""

    def __init__(self, start, step):
        self.start, self.step = start, step

    def __iter__(self):
        number = self.start
        while True:
            yield tuple(part[0] for part in text(number, 1))
            number += self.step


args = arguments()
stream = Stream(dist.get_rank(), dist.get_world_size()) if args.mended else Stream(0, 1)
train_on(args, islice(DataLoader(stream, args.batch), 6 * args.accumulate))
