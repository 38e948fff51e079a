"""Accelerate's own loaders and accumulation: each rank reads its part, or rank 0 reads for all; split batches."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from common import options
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

args = options(batch=2, accumulate=1, dispatch=0, split=0)  # batch: samples of a micro-batch on a rank
loading = DataLoaderConfiguration(dispatch_batches=bool(args.dispatch), split_batches=bool(args.split))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate, dataloader_config=loading)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.LayerNorm(31), nn.Linear(31, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.9**number)
samples = torch.randn(48, 9, generator=torch.Generator().manual_seed(1))
batch = args.batch * (accelerator.num_processes if args.split else 1)
loader = DataLoader(TensorDataset(samples, samples[:, :5].tanh()), batch_size=batch)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for inputs, targets in loader:
    with accelerator.accumulate(model):
        accelerator.backward(F.mse_loss(model(inputs), targets))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
