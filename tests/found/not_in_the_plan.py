"""Parameters that transformers' tensor-parallel plans leave out have the gradient of the rank's own heads (5.23.0)."""

import argparse
import tempfile

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--model", default="Glm4Moe")  # or Apertus
args = parser.parse_args()
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
if args.model == "Glm4Moe":
    sizes |= {"use_qk_norm": True, "head_dim": 8, "first_k_dense_replace": 1}  # as GLM-4.5, without its experts
config = getattr(transformers, f"{args.model}Config")(**sizes, num_attention_heads=4, num_key_value_heads=2)
of = getattr(transformers, f"{args.model}ForCausalLM")
with tempfile.TemporaryDirectory() as folder:
    of(config).save_pretrained(folder)
    dist.init_process_group("gloo")
    cut = {"distributed_config": DistributedConfig(tp_size=args.tp)} if args.tp > 1 else {}
    model = of.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **cut)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(3):
    torch.manual_seed(1 + step)
    tokens = torch.randint(1, 64, (4, 8))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = {n: p.grad.norm().item() for n, p in model.named_parameters() if "q_norm" in n or "alpha_p" in n}
    print(f"step {step} rank {dist.get_rank()} loss {loss.item():.6f} {gradients}", flush=True)
    optimizer.step()
    optimizer.zero_grad()
