"""The first and the last stage of a pipeline share a table of embeddings, and neither gets the other's gradient.

The first stage has the gradient of the embedding, the last that of the head; the table's own is their sum. Without it
the two are different tables after one step. Cornstarch's pipelines began so (cornstarch-org/Cornstarch 16), and
Piper's (uw-syfi/piper 13); in Megatron-LM the sum was taken of parts that did not belong together (844).
"""

import torch
import torch.distributed as dist
from common import arguments, average_gradients, neighbours, sum_gradients, train
from stages import Stage, backward


def reduce():
    if args.mended:
        sum_gradients(stage.tied, pipeline)
    average_gradients(stage.parameters(), data)


args = arguments(pp=1)
pipeline, data = neighbours(args.pp)
torch.manual_seed(7)
stage = Stage(dist.get_rank(pipeline), args.pp)
train(args, stage, group=data, reduce=reduce, backward=backward)
