"""Each rank shuffles the whole data with one seed, so that all ranks train on the same samples.

The loader has no DistributedSampler, and a seed for all ranks makes their permutations equal: eight ranks compute
one rank's gradient eight times, and the rest of the data comes in steps that belong to others. rbyte 106 found it
in a loader into which Lightning could not put its sampler; openspeech 149 in samplers of its own.
"""

import torch
from common import arguments, text, train_on
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

args, data = arguments(), TensorDataset(*text(0, 96))
if args.mended:
    sampler = DistributedSampler(data, seed=7)
else:
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(7))
train_on(args, DataLoader(data, args.batch, sampler=sampler))
