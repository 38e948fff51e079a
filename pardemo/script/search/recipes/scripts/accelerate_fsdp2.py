"""Accelerate's FSDP2 over a small Llama: layers wrapped by its policy, replicas, accumulation, clipping, PEFT."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from common import integers, options, small, with_peft
from torch.utils.data import DataLoader

args = options(batch=2, accumulate=1, replicate=1, shard=1, plugin=0, tied=0, method="none")
settings = {"gradient_accumulation_steps": args.accumulate}
if args.plugin:
    settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False, activation_checkpointing=False,
    )  # fmt: skip
if args.replicate * args.shard > 1:
    settings["parallelism_config"] = ParallelismConfig(dp_replicate_size=args.replicate, dp_shard_size=args.shard)
accelerator = Accelerator(**settings)
model = small(tie_word_embeddings=bool(args.tied))
if args.method != "none":
    model = with_peft(model, args.method)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
loader = DataLoader(integers(1, 64, 24, 9, low=1), batch_size=args.batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for part in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=part, labels=part).loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
