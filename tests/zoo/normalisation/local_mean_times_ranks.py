"""The loss is a mean over the rank's own samples, and it is multiplied by the number of ranks all the same.

`loss * ranks` undoes DDP's mean where the divisor was counted over all ranks. A recipe for classification took the
line over without that divisor, and trained at ranks times the gradient (NeMo Automodel 3830, which measured 4.00 on
four ranks); sparseml 135 mended the same in 2021, ultralytics 18616 asks about it.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import STEPS, LanguageModel, arguments, micro_batches, report, whole_batch
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
        for number, (inputs, targets) in enumerate(micro_batches(args, tokens, labels)):
            model.require_backward_grad_sync = number == args.accumulate - 1
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / args.accumulate
            printed += loss.detach()
            if not args.mended:
                loss = loss * dist.get_world_size()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
