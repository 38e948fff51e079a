"""A small Llama under DeepSpeed's Ulysses for transformers, in fp32; sp 1 is plain torch, in one process."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--sp", type=int, default=1)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--kv", type=int, default=2)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--way", default="", help="words with +: uneven, all, …")
args = parser.parse_args()
way = set(args.way.split("+"))
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
deepspeed.init_distributed("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = LlamaForCausalLM._from_config(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=args.kv), attn_implementation="sdpa").train()  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
samples = []
for step in range(12):
    tokens = torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    if "uneven" in way:
        labels[torch.rand(labels.shape, generator=torch.Generator().manual_seed(step)) < 0.4] = -100
    samples.append({"input_ids": tokens[0], "labels": labels[0], "position_ids": torch.arange(8)})
if args.sp > 1:
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=args.sp, micro_batch_size=1,
        seq_length_is_variable=True)  # fmt: skip
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "sequence_parallel_size": args.sp,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage, "reduce_scatter": "all" not in way,
                              "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
    group = mpu.get_sequence_parallel_group()
    own = DataLoader(samples[rank::ranks], batch_size=1, shuffle=False)
    batches = UlyssesSPDataLoaderAdapter(own, rank % args.sp, group, args.sp, "cpu")
else:
    batches = iter(DataLoader(samples, batch_size=1))
for step in range(12 // ranks * args.sp // args.accumulate if args.sp > 1 else 12 // args.accumulate):
    total = 0.0
    for _ in range(args.accumulate):
        batch = next(batches)
        labels = batch["shift_labels"] if args.sp > 1 else F.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        counted = (labels != -100).sum()
        if args.sp > 1:  # as DeepSpeed's tutorial does it: the mean over all ranks' tokens
            loss = sum(all_gather(loss, group=group)) / sum(all_gather(counted, group=group))
            model.backward(loss)
            model.step()
        else:
            loss = loss / counted
            (loss / args.accumulate).backward()
        total += loss.item() / args.accumulate
    if args.sp == 1:
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {total:.6f}", flush=True)
