"""PEFT's methods on a small random Llama: one process, DistributedDataParallel, or FSDP2 around each layer."""

import contextlib

import torch
from common import integers, options, small, start, update, with_peft
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

args = options(method="lora", wrap="none", accumulate=1)
model = with_peft(small(tie_word_embeddings=args.method in ("tied", "tokens")), args.method)
ranks, rank = start()
wrapped = model
if args.wrap == "ddp":
    wrapped = DistributedDataParallel(model)
elif args.wrap == "fsdp2":
    for layer in [part for part in model.modules() if type(part).__name__ == "LlamaDecoderLayer"]:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
for step in range(3):
    parts = integers(step, 64, 8, 9, low=1).chunk(ranks)[rank].chunk(args.accumulate)
    for number, part in enumerate(parts, 1):
        last = number == len(parts)
        if args.wrap == "fsdp2":
            model.set_requires_gradient_sync(last)
        waits = args.wrap == "ddp" and not last
        with wrapped.no_sync() if waits else contextlib.nullcontext():
            (wrapped(input_ids=part, labels=part).loss / len(parts)).backward()
    update(model, optimizer)
