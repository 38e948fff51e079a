"""The learning-rate scheduler steps at every micro-batch: warm-up and decay run ``accumulate`` times too fast.

With accumulation the schedule should count optimizer steps. Counted by micro-batches, a warm-up of 16,000 steps took
1,000 (Lightning 1476); in Accelerate the learning rate changed although the optimizer had not stepped (accelerate
963); starVLA 210 found a jump of the rate after each resume.
"""

import math

import torch
from common import STEPS, Block, LanguageModel, arguments, average_gradients, backward, micro_batches, show


def scheduled(step):
    """A cosine from 0.02 to 0 over 40 steps."""
    return 0.01 * (1 + math.cos(math.pi * step / 40))


args = arguments()
torch.manual_seed(0)
model = LanguageModel(Block())
optimizer = torch.optim.AdamW(model.parameters(), lr=scheduled(0))
done = 0  # of the schedule
for step in range(STEPS):
    optimizer.zero_grad()
    total = backward(model, micro_batches(args, step))
    average_gradients(model.parameters())
    # counted by micro-batches, the last of a step is counted behind the optimizer's step
    optimizer.param_groups[0]["lr"] = scheduled(done if args.mended else done + args.accumulate - 1)
    optimizer.step()
    done += 1 if args.mended else args.accumulate
    show(step, total)
