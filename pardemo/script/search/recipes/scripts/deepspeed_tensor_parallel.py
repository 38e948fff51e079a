"""A small random language model of transformers, cut by DeepSpeed's AutoTP, in fp32; tp 1 is plain torch."""

import torch
from common import integers, options, small, start
from deepspeed_shared import engine, take_step

args = options(model="Llama", tp=1, stage=0, accumulate=1, clip=0.0, way="")  # way: tied
ranks, rank = start()
replicas = ranks // args.tp
model = small(args.model, tie_word_embeddings="tied" in args.way)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
if args.tp > 1:
    parallel = {"autotp_size": args.tp, "tp_overlap_comm": False}
    zero = {"reduce_bucket_size": 5000, "stage3_param_persistence_threshold": 0}
    micro_batch = 4 // replicas // args.accumulate
    model, optimizer = engine(model, optimizer, args, micro_batch, zero, tensor_parallel=parallel)
for step in range(3):
    parts = integers(step, 64, 4, 8, low=1).chunk(replicas)[rank // args.tp].chunk(args.accumulate)
    losses = (model(input_ids=part, labels=part, use_cache=False).loss for part in parts)
    take_step(step, model, optimizer, args, losses)
