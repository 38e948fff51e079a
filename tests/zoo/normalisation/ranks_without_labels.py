"""A rank whose labels are all ignored adds nothing, and yet the mean over ranks counts it.

With prompts longer than the sequence some ranks have no label left in a step. The mean over no labels is NaN, so the
divisor is kept at 1 or more, as OLMo-core 657 does: NaN is gone, and every other rank's gradient is too small.
transformers 39392 has the like: one label on one rank, a full row on the other, and both weigh one half.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import IGNORED, STEPS, LanguageModel, arguments, labelled, micro_batches, over_ranks, report, whole_batch
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels = whole_batch(step, args.batch * args.accumulate * dist.get_world_size())
        labels.chunk(4)[step % 4].fill_(IGNORED)  # a quarter of the samples is all prompt
        micro = micro_batches(args, tokens, labels)
        divisor = labelled(micro).clamp(min=1)
        if args.mended:  # DDP divides by the ranks once more
            divisor = over_ranks(labelled(micro)) / dist.get_world_size()
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
