"""A small random language model of transformers, cut by its own tensor- and expert-parallel plans."""

import argparse
import tempfile

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Llama")
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--ep", type=int, default=1)
parser.add_argument("--tied", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)
kind = getattr(transformers, f"{args.model}Config")
sizes = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "attention_dropout": 0.0, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "tie_word_embeddings": bool(args.tied),
}  # fmt: skip
known = {*kind.__dataclass_fields__, *kind.attribute_map}
of = getattr(transformers, f"{args.model}ForCausalLM")
with tempfile.TemporaryDirectory() as folder:
    of(kind(**{name: value for name, value in sizes.items() if name in known})).save_pretrained(folder)
    dist.init_process_group("gloo")  # only now: else rank 0 alone saves
    cut = {"distributed_config": DistributedConfig(tp_size=args.tp, ep_size=args.ep)} if args.tp > 1 else {}
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # which fp64 has kernels for
    model = of.from_pretrained(folder, dtype=torch.float32, **plain, **cut).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(3):
    tokens = torch.randint(1, 64, (4, 8), generator=torch.Generator().manual_seed(step))
    total = 0.0
    for part in tokens.chunk(args.accumulate):
        loss = model(input_ids=part, labels=part, use_cache=False).loss / args.accumulate
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {total:.6f}", flush=True)
