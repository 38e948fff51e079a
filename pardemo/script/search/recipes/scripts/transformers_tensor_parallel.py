"""A small random language model of transformers, cut by its own tensor- and expert-parallel plans."""

import torch
from common import integers, loaded, options, show, small, update
from transformers.distributed import DistributedConfig

args = options(model="Llama", tp=1, ep=1, tied=0, accumulate=1)
cut = {"distributed_config": DistributedConfig(tp_size=args.tp, ep_size=args.ep)} if args.tp > 1 else {}
whole = small(args.model, tie_word_embeddings=bool(args.tied))
model = loaded(whole, experts_implementation="eager", **cut)  # which fp64 has kernels for
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(3):
    total = 0.0
    for part in integers(step, 64, 4, 8, low=1).chunk(args.accumulate):
        loss = model(input_ids=part, labels=part, use_cache=False).loss / args.accumulate
        loss.backward()
        total += loss.item()
    update(model, optimizer)
    show(step, total)
