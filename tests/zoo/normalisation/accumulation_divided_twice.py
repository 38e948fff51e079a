"""The library divides the loss by the number of micro-batches, and so does the script.

Accelerate's `backward` divides by `gradient_accumulation_steps`. Scripts that come from plain PyTorch divide before
they call it, and train at 1/n of the gradient. accelerate 3533 found both divisions in a trainer; transformers 26312
asks which of the two is meant to do it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import STEPS, LanguageModel, arguments, micro_batches, report, whole_batch
from torch.nn.parallel import DistributedDataParallel


class Engine:
    """What a library does for a script: divides the loss before the backward pass, and sends with the last one only."""

    def __init__(self, model: DistributedDataParallel, accumulate: int) -> None:
        self.model, self.accumulate, self.number = model, accumulate, 0

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.model.require_backward_grad_sync = self.number % self.accumulate == 0
        return self.model(inputs)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulate).backward()


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LanguageModel()
    engine = Engine(DistributedDataParallel(model), args.accumulate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels = whole_batch(step, args.batch * args.accumulate * dist.get_world_size())
        printed = torch.zeros(())
        for inputs, targets in micro_batches(args, tokens, labels):
            loss = F.cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())
            printed += loss.detach() / args.accumulate
            if not args.mended:
                loss = loss / args.accumulate
            engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
