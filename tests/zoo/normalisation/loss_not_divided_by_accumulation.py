"""The loss of each micro-batch is a mean of its own, and nobody divides by their number.

transformers 4.47.0 counted the labels of one micro-batch where it meant those of the step, so that with two
micro-batches loss and gradient were twice what they should be (transformers 35438). LlamaFactory 7443 has a table of
first losses of one training, from 6.4 to 138, that grow with the number of micro-batches; verl 3332 mended the same
in a trainer of its own.
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
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            if args.mended:
                loss = loss / args.accumulate
            loss.backward()
            printed += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
