"""LoRA that PEFT ties over embedding and head is untied as its type or device changes, at once in bf16 (0.21.2)."""

import argparse

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--base", default="bfloat16", help="type of the base: in bf16, LoRA is cast to fp32 as it is made")
parser.add_argument("--move", type=int, default=0, help="1: the model is moved to fp64 after LoRA was made")
args = parser.parse_args()
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).to(getattr(torch, args.base))
config = peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
model = peft.get_peft_model(model, config)
if args.move:
    model.to(torch.float64)  # as .to("cuda"), which moves one parameter after the other, too
optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
embedding, head = model.base_model.model.model.embed_tokens, model.base_model.model.lm_head
for step in range(3):
    tokens = torch.randint(1, 64, (8, 9), generator=torch.Generator().manual_seed(step))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    part = (embedding.lora_embedding_B["default"].T - head.lora_A["default"].weight).abs().max()
    print(f"step {step} loss {loss.item():.6f} embedding and head are apart by {part.item():.6f}")
