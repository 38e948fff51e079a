"""The loss is a sum over samples, and DDP averages its gradient over ranks.

DDP divides by the number of ranks, which is right for a loss that is a mean over a rank's samples. A loss that sums
has to undo it. fairseq multiplies the gradients by the number of ranks for this reason, to the surprise of its
readers (fairseq 494), and verl does the same to a sum that is divided by a constant (verl 5366).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import STEPS, LanguageModel, answers_only, arguments, micro_batches, report, whole_batch
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels = whole_batch(step, args.batch * args.accumulate * dist.get_world_size())
        printed = torch.zeros(())
        for number, (inputs, targets) in enumerate(micro_batches(args, tokens, answers_only(labels, step))):
            model.require_backward_grad_sync = number == args.accumulate - 1
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
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
