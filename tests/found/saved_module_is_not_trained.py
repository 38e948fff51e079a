"""PEFT's modules_to_save over a layer of transformers' tensor-parallel plan train nothing (peft 0.21.2)."""

import argparse
import tempfile

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
tp = parser.parse_args().tp
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    dist.init_process_group("gloo")
    cut = {"distributed_config": DistributedConfig(tp_size=tp)} if tp > 1 else {}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **cut)
for parameter in model.parameters():
    parameter.data = parameter.data.clone()  # on a CPU it is the memory of the file, which rank 1 cannot copy
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default").weight.data.fill_(0.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(3):
    tokens = torch.randint(1, 64, (4, 8), generator=torch.Generator().manual_seed(1 + step))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    saved = {n: p.grad is not None for n, p in model.named_parameters() if "modules_to_save" in n}
    print(f"step {step} rank {dist.get_rank()} loss {loss.item():.6f} has a gradient: {saved}", flush=True)
    optimizer.step()
    optimizer.zero_grad()
