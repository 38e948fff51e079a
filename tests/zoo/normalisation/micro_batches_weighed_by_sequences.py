"""A token's weight depends on the micro-batch that it fell into: means over tokens, weighed by numbers of sequences.

Reinforcement learning with DAPO's loss (arXiv 2503.14476) wants a mean over all tokens of the step. Micro-batches
took the mean over their own tokens and were weighed by their share of the sequences, so that micro-batches of one
sequence make it a mean over sequences: trl 3938 (only one rank without accumulation was DAPO before it), verl 7200
and 7321.
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
        sequences = args.batch * args.accumulate * dist.get_world_size()
        tokens, labels = whole_batch(step, sequences)
        labels = answers_only(labels, step)
        advantages = 0.5 + torch.rand(sequences, 1, generator=torch.Generator().manual_seed(2000 + step))
        tokens_of_step = over_ranks(labelled(micro_batches(args, tokens, labels)))
        printed = torch.zeros(())
        for number, (inputs, targets, good) in enumerate(micro_batches(args, tokens, labels, advantages)):
            model.require_backward_grad_sync = number == args.accumulate - 1
            surprise = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")  # [b, s], 0 if ignored
            loss = (surprise * good).sum()
            if args.mended:
                loss = loss / tokens_of_step
            else:
                loss = loss / labelled([(inputs, targets)]) * len(inputs) / sequences
            printed += loss.detach()
            (loss * dist.get_world_size()).backward()  # DDP takes the mean, the sum is meant
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed * dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
