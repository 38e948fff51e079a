import sys
import torch
import torch.distributed as dist
from model import Model, text
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

vocabulary, width, layers, length = map(int, sys.argv[1:])
dist.init_process_group("nccl")
rank, ranks, accumulate = dist.get_rank(), dist.get_world_size(), 2
torch.manual_seed(0)
model = DistributedDataParallel(Model(vocabulary, width, layers).cuda(rank))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = text(16 // ranks, length, vocabulary, seed=rank)
for step in range(100):
    accuracy = 0
    for number in range(accumulate):
        tokens, targets = (x.cuda(rank) for x in next(batches))
        model.require_backward_grad_sync = number == accumulate - 1
        logits = model(tokens)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss / accumulate).backward()
        all_logits = logits.new_empty(16, length, vocabulary)
        all_targets = targets.new_empty(16, length)
        dist.all_gather_into_tensor(all_logits, logits.detach())
        dist.all_gather_into_tensor(all_targets, targets)
        accuracy += (all_logits.argmax(-1) == all_targets).float().mean() / accumulate
    optimizer.step(), optimizer.zero_grad()
    if rank == 0:
        print(step, loss.item(), accuracy.item(), file=open("log.txt", "a"))
