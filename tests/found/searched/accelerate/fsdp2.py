"""Accelerate's FSDP2 over a small Llama: layers wrapped by its policy, replicas, accumulation, clipping, PEFT."""

import argparse

import peft
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--replicate", type=int, default=1)
parser.add_argument("--shard", type=int, default=1)
parser.add_argument("--plugin", type=int, default=0)
parser.add_argument("--tied", type=int, default=0)
parser.add_argument("--efficient", type=int, default=0)
parser.add_argument("--checkpointing", type=int, default=0)
parser.add_argument("--method", default="none")
args = parser.parse_args()
some, to = ["q_proj", "o_proj", "down_proj"], {"task_type": "CAUSAL_LM"}
CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=some, **to),
    "embed": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj", "lm_head"], **to),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=some, use_dora=True, **to),
    "saved": lambda: peft.LoraConfig(r=4, target_modules=some, modules_to_save=["lm_head", "norm"], **to),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=some, trainable_token_indices=[1, 5, 7], **to),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **to),
    "ia3": lambda: peft.IA3Config(target_modules=some, feedforward_modules=["down_proj"], **to),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], **to),
    "parameters": lambda: peft.LoraConfig(r=4, target_parameters=["q_proj.weight"], target_modules=["o_proj"], **to),
}
settings = {"gradient_accumulation_steps": args.accumulate}
if args.plugin:
    settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=bool(args.efficient), activation_checkpointing=bool(args.checkpointing),
    )  # fmt: skip
if args.replicate * args.shard > 1:
    settings["parallelism_config"] = ParallelismConfig(dp_replicate_size=args.replicate, dp_shard_size=args.shard)
accelerator = Accelerator(**settings)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False, "tie_word_embeddings": bool(args.tied)}
model = LlamaForCausalLM(LlamaConfig(**sizes))
if args.method != "none":
    model = peft.get_peft_model(model, CONFIGS[args.method]())
    for parameter in filter(lambda one: one.requires_grad, model.parameters()):
        parameter.data += 0.05 * torch.randn(parameter.shape)  # what begins with zeros gives others no gradient
optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
tokens = torch.randint(1, 64, (24, 9), generator=torch.Generator().manual_seed(1))
loader = DataLoader(tokens, batch_size=args.batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for part in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=part, labels=part).loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
