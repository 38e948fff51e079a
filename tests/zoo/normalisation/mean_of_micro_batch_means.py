"""Micro-batches weigh alike, however many labels each of them has.

Each micro-batch's loss is the mean over its own labels, divided by the number of micro-batches. With answers of
different lengths this is not the mean over the step's labels. Trainers did it for years until it was seen in October
2024 (transformers 34191 and 34198; unsloth 1134): the loss of "batch 32" and of "batch 1, accumulated 32 times"
parted.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    STEPS,
    LanguageModel,
    answers_only,
    arguments,
    labelled,
    micro_batches,
    over_ranks,
    report,
    whole_batch,
)
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels = whole_batch(step, args.batch * args.accumulate * dist.get_world_size())
        micro = micro_batches(args, tokens, answers_only(labels, step))
        labels_of_step = over_ranks(labelled(micro))
        printed = torch.zeros(())
        for number, (inputs, targets) in enumerate(micro):
            model.require_backward_grad_sync = number == args.accumulate - 1
            logits = model(inputs).flatten(0, 1)
            if args.mended:  # DDP averages over ranks what has to be summed
                loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / labels_of_step
                loss = loss * dist.get_world_size()
            else:
                loss = F.cross_entropy(logits, targets.flatten()) / args.accumulate
            loss.backward()
            printed += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
