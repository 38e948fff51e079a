"""A small random language model of transformers, cut by DeepSpeed's AutoTP, in fp32; tp 1 is plain torch."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Llama")
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--way", default="", help="words with +: tied, local, overlap, biased, …")
args = parser.parse_args()
way = set(args.way.split("+"))
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
dist.init_process_group("gloo")
ranks, rank = dist.get_world_size(), dist.get_rank()
replicas = ranks // args.tp
kind = getattr(transformers, f"{args.model}Config")
sizes = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "attention_dropout": 0.0, "dropout": 0.0,
    "tie_word_embeddings": "tied" in way, "attention_bias": "biased" in way, "mlp_bias": "biased" in way,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
known = {*kind.__dataclass_fields__, *kind.attribute_map}
torch.manual_seed(0)
config = kind(**{name: value for name, value in sizes.items() if name in known})
model = getattr(transformers, f"{args.model}ForCausalLM")._from_config(config, attn_implementation="eager").train()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
if args.tp > 1:
    parallel = {"autotp_size": args.tp, "tp_overlap_comm": "overlap" in way}
    if "local" in way:
        parallel["vocab_parallel_lm_head"] = True
    settings = {
        "train_micro_batch_size_per_gpu": 4 // replicas // args.accumulate,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": args.clip,
        "tensor_parallel": parallel,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 5000,
                              "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
for step in range(3):
    tokens = torch.randint(1, 64, (4, 8), generator=torch.Generator().manual_seed(step))
    total = torch.zeros(())
    for part in tokens.chunk(replicas)[rank // args.tp].chunk(args.accumulate):
        loss = model(input_ids=part, labels=part, use_cache=False).loss
        total += loss.detach() / args.accumulate
        if args.tp > 1:
            model.backward(loss)
            model.step()
        else:
            (loss / args.accumulate).backward()
    if args.tp == 1:
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {total.item() / ranks:.6f}", flush=True)
