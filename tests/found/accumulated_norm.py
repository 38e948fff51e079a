"""Under transformers' tensor-parallel plan each micro-batch sums the gradient of Qwen3's q_norm again (5.23.0)."""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=2)
args = parser.parse_args()
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0)
with tempfile.TemporaryDirectory() as folder:
    Qwen3ForCausalLM(config).save_pretrained(folder)
    dist.init_process_group("gloo")
    cut = {"distributed_config": DistributedConfig(tp_size=args.tp)} if args.tp > 1 else {}
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **cut)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(3):
    torch.manual_seed(1 + step)
    total = 0.0
    for tokens in torch.randint(1, 64, (4, 8)).chunk(args.accumulate):
        loss = model(input_ids=tokens, labels=tokens).loss / args.accumulate
        loss.backward()
        total += loss.item()
    if dist.get_rank() == 0:
        norm = model.model.layers[0].self_attn.q_norm.weight.grad.norm().item()
        print(f"step {step} loss {total:.6f} gradient of q_norm {norm:.6f}", flush=True)
    optimizer.step()
    optimizer.zero_grad()
