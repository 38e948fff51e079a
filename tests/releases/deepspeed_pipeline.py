"""DeepSpeed's pipeline of four layers over ``--pp`` stages, whose micro-batches are accumulated.

``--batch`` rows are a micro-batch, ``--accumulate`` micro-batches a step; each step takes sixteen rows in all, the same
ones in every layout.
"""

import argparse

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

WIDTH, STEPS, ROWS = 32, 4, 16


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    args = parser.parse_args()

    deepspeed.init_distributed("gloo")
    layers = []
    for seed in range(4):  # a stage makes its own layers only: each from a seed of its own, so that all layouts agree
        torch.manual_seed(seed)
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model = PipelineModule(layers, num_stages=args.pp, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 0.0,
        "steps_per_print": 1000,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(10)
    for step in range(STEPS):
        x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)
        loss = engine.train_batch(iter(zip(x.split(args.batch), y.split(args.batch), strict=True)))
        if engine.global_rank == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
