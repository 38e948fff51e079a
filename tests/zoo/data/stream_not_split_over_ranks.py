"""A stream of samples is read from its beginning on each rank, so that all ranks train on the same samples.

An IterableDataset has no sampler: nobody divides it but itself. DistributedDataParallel does not, and a loader
takes what comes. Streams of Hugging Face's datasets came whole on each rank until `split_dataset_by_node` was there
(datasets 5360), and 7868 has them again when splitting and interleaving meet.
"""

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from common import WIDTH, arguments, train
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Samples without an end, each made from its number; of every `step` of them the one at `start`."""

    def __init__(self, start: int, step: int) -> None:
        self.start, self.step = start, step

    def __iter__(self) -> Iterator[torch.Tensor]:
        number = self.start
        while True:
            yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
            number += self.step


if __name__ == "__main__":
    args = arguments()
    stream = Stream(dist.get_rank(), dist.get_world_size()) if args.mended else Stream(0, 1)
    train(args, islice(DataLoader(stream, args.batch), 6 * args.accumulate))
