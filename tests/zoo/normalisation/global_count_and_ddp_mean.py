"""The loss is divided by the labels of all ranks, and DDP divides by the number of ranks once more.

The number of labels is summed over the ranks, as it should be; the mean that DDP takes of the gradients is forgotten.
With W ranks one trains at 1/W of the gradient, which clipping and Adam hide for a long time: verl-SpeCo 29 (July
2026). transformers has a line of its own against it, `loss *= world_size` (transformers 34373).
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
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / labels_of_step
            printed += loss.detach()
            if args.mended:
                loss = loss * dist.get_world_size()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed * dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
