"""Accelerate's loop on two layers: its shuffled data loader, its ``accumulate`` and its ``backward``.

An epoch of sixteen rows is a step, so that all layouts see the same rows in a step, whatever their order is.
``--batch`` rows are a micro-batch of each rank, ``--accumulate`` micro-batches a step; ``--each`` asks for gradients
that are reduced with each micro-batch (``sync_each_batch``), which costs traffic and must change no result.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, EPOCHS, ROWS = 32, 3, 16


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--each", action="store_true")
    args = parser.parse_args()

    plugin = GradientAccumulationPlugin(num_steps=args.accumulate, sync_each_batch=args.each)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(ROWS, WIDTH), 3 * torch.randn(ROWS, 4))
    torch.manual_seed(100 + accelerator.process_index)  # as scripts do, whose ranks have to drop out differently
    loader = DataLoader(rows, batch_size=args.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"step {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
