"""Gradients are summed over the ranks in bfloat16: each loses all but 8 bits on the way.

A compression hook, or a ``reduce_dtype`` that does not reach every reduction, rounds the gradients before they are
added; the parameters keep their precision, so nothing shows it. FSDP2's ``reduce_dtype=float32`` did not reach the
all-reduce over the other mesh axis, and half of the reduction happened in bfloat16 (pytorch 190626); why Megatron-LM
insists on fp32 for this sum is asked in Megatron-LM 502.
"""

import torch
import torch.distributed as dist
from common import Block, LanguageModel, arguments, train
from torch.nn.parallel import DistributedDataParallel


def compressed(_, bucket):
    """A communication hook for DDP: the mean of the ranks' gradients, at half the bytes."""
    gradients = bucket.buffer()
    future = dist.all_reduce(gradients.bfloat16().div_(dist.get_world_size()), async_op=True).get_future()
    return future.then(lambda done: gradients.copy_(done.value()[0]))


args = arguments()
torch.manual_seed(0)
model = LanguageModel(Block())
if dist.get_world_size() > 1:
    model = DistributedDataParallel(model)
    if not args.mended:
        model.register_comm_hook(None, compressed)
train(args, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
