"""A stream of samples is read from its beginning in each worker of the loader: each sample comes once a worker.

Each worker process has a copy of the IterableDataset, and the loader takes a batch of each in turn. A dataset that
does not ask `get_worker_info()` which worker it is in gives them all the same: with two workers each batch comes
twice, one step after the other. Streams of Hugging Face's datasets did (datasets 3423); PyTorch's page on
IterableDataset warns of it.
"""

import torch.distributed as dist
from common import STEPS, arguments, text, train_on
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    """Samples made from their numbers: a rank takes its own, and of `count` workers each takes every count-th batch."""

    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        worker = get_worker_info()
        first, count = (worker.id, worker.num_workers) if worker and self.args.mended else (0, 1)
        for step in range(first, STEPS, count):
            for i in range(self.args.batch):
                number = (step * self.world + self.rank) * self.args.batch + i
                yield tuple(part[0] for part in text(number, 1))


if __name__ == "__main__":
    args = arguments(workers=0)
    train_on(args, DataLoader(Stream(args), args.batch, num_workers=args.workers))
