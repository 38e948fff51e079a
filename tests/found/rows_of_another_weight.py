"""HRM-Text, loaded with transformers' tensor-parallel plan, has rows of other weights in its projections (5.23.0)."""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import HrmTextConfig, HrmTextForCausalLM
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
tp = parser.parse_args().tp
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
config = HrmTextConfig(**sizes, num_attention_heads=4, head_dim=8, pad_token_id=0)
with tempfile.TemporaryDirectory() as folder:
    whole = HrmTextForCausalLM(config)
    whole.save_pretrained(folder)
    dist.init_process_group("gloo")
    cut = {"distributed_config": DistributedConfig(tp_size=tp)} if tp > 1 else {}
    model = HrmTextForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **cut)
for name, saved in whole.named_parameters():
    loaded = model.get_parameter(name).data
    loaded = loaded.full_tensor() if hasattr(loaded, "full_tensor") else loaded
    if dist.get_rank() == 0 and not torch.equal(saved, loaded):
        print(f"{name}: {(saved != loaded).any(-1).sum().item()} of {len(saved)} rows are others")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(3):
    tokens = torch.randint(1, 64, (4, 8), generator=torch.Generator().manual_seed(1 + step))
    loss = model(input_ids=tokens, labels=tokens).loss
    print(f"step {step} loss {loss.item():.6f}", flush=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
