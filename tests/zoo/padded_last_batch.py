"""The last batch of an epoch is filled up with samples of its beginning, which are counted twice.

A DistributedSampler gives each rank the same number of samples, and repeats some if their number cannot be divided;
it says so on its page only. In validation it makes the result depend on the number of ranks (pytorch 25162 and
22584), in training a few samples weigh double in each epoch's last step. `drop_last` of the sampler and of the
loader leave the rest out instead.
"""

from common import arguments, text, train_on
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def epochs():  # of 8, 8 and 6 samples
    for epoch in range(3):
        sampler.set_epoch(epoch)
        yield from loader


args, data = arguments(), TensorDataset(*text(0, 22))
sampler = DistributedSampler(data, drop_last=args.mended)
loader = DataLoader(data, args.batch, sampler=sampler, drop_last=args.mended)
train_on(args, epochs())
