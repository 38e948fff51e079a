"""The Trainer with a Llama that transformers cuts as it loads it: tensor parallelism or FSDP2, with or without LoRA."""

import argparse
import tempfile

import peft
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--fsdp", type=int, default=1)
parser.add_argument("--replicas", type=int, default=1)
parser.add_argument("--average", type=int, default=1)
parser.add_argument("--lora", type=int, default=0)
parser.add_argument("--smoothing", type=float, default=0.0)
parser.add_argument("--clip", type=float, default=0.1)
args = parser.parse_args()
set_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
config = LlamaConfig(**sizes, vocab_size=64, intermediate_size=48, pad_token_id=0, use_cache=False)
data = []
for number in range(24):
    tokens = torch.randint(64, (9,))
    labels = tokens.clone()
    labels[: number % 7] = -100  # samples weigh by their labels
    data.append({"input_ids": tokens, "labels": labels})
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    dist.init_process_group("gloo")  # only now: else rank 0 alone saves
    parallel = {"tp_size": args.tp, "fsdp_size": args.fsdp, "dp_replicate_size": args.replicas}
    asked = {name: size for name, size in parallel.items() if size > 1}
    cut = {"distributed_config": DistributedConfig(**asked)} if asked else {}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **cut)
    if args.lora:
        targets = ["q_proj", "v_proj", "up_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_A" in name:  # whole on each rank, and drawn after lora_B, of which a rank has a part
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.data.copy_(0.1 * drawn)
            elif "lora_B" in name:
                parameter.data.fill_(0.05)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate, max_steps=3,
        max_grad_norm=args.clip, learning_rate=0.01, optim="sgd", report_to="none", save_strategy="no",
        train_sampling_strategy="sequential", disable_tqdm=True, average_tokens_across_devices=bool(args.average),
        label_smoothing_factor=args.smoothing, logging_steps=1,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data).train()
