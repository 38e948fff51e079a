"""A small Llama under DeepSpeed's Ulysses for transformers, in fp32; sp 1 is plain torch, in one process."""

import deepspeed
import torch
import torch.distributed as dist
from common import integers, options
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed_shared import engine, take_step
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

args = options(sp=1, stage=2, accumulate=1, kv=2, clip=0.0, way="")  # way: uneven
deepspeed.init_distributed("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=args.kv), attn_implementation="sdpa").train()  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
samples = []
for step in range(12):
    tokens = integers(step, 64, 8)
    labels = tokens.clone()
    if "uneven" in args.way:
        labels[torch.rand(labels.shape, generator=torch.Generator().manual_seed(step)) < 0.4] = -100
    samples.append({"input_ids": tokens, "labels": labels, "position_ids": torch.arange(8)})
if args.sp > 1:
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=args.sp, micro_batch_size=1,
        seq_length_is_variable=True)  # fmt: skip
    zero = {"reduce_scatter": True, "stage3_param_persistence_threshold": 0}
    model, optimizer = engine(model, optimizer, args, 1, zero, mpu, sequence_parallel_size=args.sp)
    group = mpu.get_sequence_parallel_group()
    loader = DataLoader(samples[rank::ranks], batch_size=1, shuffle=False)
    batches = UlyssesSPDataLoaderAdapter(loader, rank % args.sp, group, args.sp, "cpu")
else:
    batches = iter(DataLoader(samples, batch_size=1))


def loss_of(batch):
    labels = batch["shift_labels"] if args.sp > 1 else F.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    counted = (labels != -100).sum()
    if args.sp > 1:  # as DeepSpeed's tutorial does it: the mean over all ranks' tokens
        return sum(all_gather(loss, group=group)) / sum(all_gather(counted, group=group))
    return loss / counted


for step in range(12 // ranks * args.sp // args.accumulate):
    take_step(step, model, optimizer, args, (loss_of(next(batches)) for _ in range(args.accumulate)))
