"""Ranks weigh alike, however many labels each of them has: right under accumulation, wrong under data parallelism.

Each rank divides by the labels of all its own micro-batches, and DDP averages over the ranks. torchtune 1917 derives
why data parallelism needs the same care as accumulation; transformers 34242 asked for it after accumulation was
mended, and torchtitan 2206 mended it in January 2026.
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
        divisor = labelled(micro)
        if args.mended:  # DDP divides by the ranks once more
            divisor = over_ranks(divisor) / dist.get_world_size()
        printed = torch.zeros(())
        for number, (inputs, targets) in enumerate(micro):
            model.require_backward_grad_sync = number == args.accumulate - 1
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / divisor
            loss.backward()
            printed += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
