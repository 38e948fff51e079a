"""DeepSpeed's engine on layers of which one may be used twice: any stage of ZeRO, with or without bf16 or clipping.

``--batch`` rows are a micro-batch of each rank, ``--accumulate`` micro-batches a step; each step takes sixteen rows in
all, the same ones in every layout.
"""

import argparse

import deepspeed
import torch
from torch import nn

WIDTH, STEPS, ROWS = 32, 3, 16


class Model(nn.Module):
    """A layer (``--twice``: used twice), another one, and a head; with the mean squared error over a micro-batch."""

    def __init__(self, twice):
        super().__init__()
        self.twice = twice
        self.layer, self.other, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x, y):
        h = torch.tanh(self.layer(x))
        if self.twice:
            h = torch.tanh(self.layer(h))
        h = torch.tanh(self.other(h))
        return nn.functional.mse_loss(self.head(h), y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp32-sum", action="store_true", help="micro-batches' gradients are summed in fp32")
    parser.add_argument("--offload", action="store_true", help="the optimizer's states are in the host's memory")
    parser.add_argument("--twice", action="store_true")
    args = parser.parse_args()

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model(args.twice)
    zero = {"stage": args.stage, "overlap_comm": False}
    if args.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": 1000,
    }
    if args.bf16:
        config["bf16"] = {"enabled": True}
    if args.fp32_sum:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dtype = next(engine.parameters()).dtype
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 + step)
        x, y = torch.randn(ROWS, WIDTH, generator=generator), 3 * torch.randn(ROWS, 4, generator=generator)
        for part in range(args.accumulate):
            first = (part * engine.world_size + engine.global_rank) * args.batch
            rows = slice(first, first + args.batch)
            loss = engine(x[rows].to(dtype), y[rows].to(dtype))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        engine(x.to(dtype), y.to(dtype))


if __name__ == "__main__":
    main()
