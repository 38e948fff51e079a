"""`set_epoch` is called on rank 0 only: from the second epoch on ranks take parts of different permutations.

A DistributedSampler shuffles by its seed and its epoch, and takes each n-th place of the permutation. Where ranks
have different epochs (the call stands beside the progress bar on rank 0) or seeds, some samples come twice in an
epoch and others not at all. yangkky/distributed_tutorial 5 warns of it; in NVlabs/LongLive 71 each rank's sampler
had a seed of its own.
"""

import torch.distributed as dist
from common import arguments, text, train_on
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def epochs():  # two steps each with a global batch of 12
    for epoch in range(4):
        if dist.get_rank() == 0 or args.mended:
            sampler.set_epoch(epoch)
        yield from DataLoader(data, args.batch, sampler=sampler)


args, data = arguments(), TensorDataset(*text(0, 24))
sampler = DistributedSampler(data)
train_on(args, epochs())
