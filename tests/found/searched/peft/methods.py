"""PEFT's methods on a small random Llama: one process, DistributedDataParallel, or FSDP2 around each layer."""

import argparse
import contextlib

import peft
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--method", default="lora")
parser.add_argument("--wrap", default="none")
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
some, to = ["q_proj", "o_proj", "down_proj"], {"task_type": "CAUSAL_LM"}
CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=some, **to),
    "all": lambda: peft.LoraConfig(r=4, target_modules="all-linear", use_rslora=True, lora_bias=True, **to),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=[*some, "embed_tokens"], use_dora=True, **to),
    "saved": lambda: peft.LoraConfig(r=4, target_modules=some, modules_to_save=["lm_head", "norm"], **to),
    "tied": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True, **to),
    "tokens": lambda: peft.LoraConfig(r=4, target_modules=some, trainable_token_indices=[1, 5, 7], **to),
    "parameters": lambda: peft.LoraConfig(r=4, target_parameters=["q_proj.weight"], target_modules=["o_proj"], **to),
    "only_tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 5, 7], **to),
    "ia3": lambda: peft.IA3Config(target_modules=[*some], feedforward_modules=["down_proj"], **to),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], **to),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=some, **to),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=some, **to),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=some, **to),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=some, **to),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=["q_proj"], **to),
    "ln": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"], **to),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **to),
    "p_tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, encoder_dropout=0, **to),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **to),
    "prefix_projected": lambda: peft.PrefixTuningConfig(
        num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=16, **to
    ),
}
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
tied = {"tie_word_embeddings": args.method in ("tied", "tokens", "only_tokens")}
model = LlamaForCausalLM(LlamaConfig(**sizes, **tied, num_key_value_heads=2, pad_token_id=0, use_cache=False))
model = peft.get_peft_model(model, CONFIGS[args.method]())
for parameter in filter(lambda one: one.requires_grad, model.parameters()):
    parameter.data += 0.05 * torch.randn(parameter.shape)  # what begins with zeros has no gradient, or gives none
dist.init_process_group("gloo")
wrapped = model
if args.wrap == "ddp":
    wrapped = DistributedDataParallel(model)
elif args.wrap == "fsdp2":
    for layer in [one for one in model.modules() if type(one).__name__ == "LlamaDecoderLayer"]:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
for step in range(3):
    tokens = torch.randint(1, 64, (8, 9), generator=torch.Generator().manual_seed(step))
    parts = tokens.chunk(dist.get_world_size())[dist.get_rank()].chunk(args.accumulate)
    for number, part in enumerate(parts, 1):
        last = number == len(parts)
        if args.wrap == "fsdp2":
            model.set_requires_gradient_sync(last)
        waits = args.wrap == "ddp" and not last
        with wrapped.no_sync() if waits else contextlib.nullcontext():
            loss = wrapped(input_ids=part, labels=part).loss / len(parts)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
