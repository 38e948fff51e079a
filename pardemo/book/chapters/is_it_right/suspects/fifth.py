"""Samples are dealt out to the ranks, in another order in each epoch of three steps."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16, help="samples of a step on a rank")
batch = parser.parse_args().batch
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
dataset = TensorDataset(torch.randn(3 * batch * ranks, 8, generator=torch.Generator().manual_seed(1)))
sampler = DistributedSampler(dataset, shuffle=True)
for epoch in range(2):
    if rank == 0:
        sampler.set_epoch(epoch)
    for (x,) in DataLoader(dataset, batch, sampler=sampler):
        loss = mse_loss(model(x), x.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(epoch, f"{loss.item():.4f}", flush=True)
dist.destroy_process_group()
