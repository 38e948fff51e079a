"""The Trainer with a Llama that transformers cuts as it loads it: tensor parallelism or FSDP2, with or without LoRA."""

import peft
import torch
from common import labelled_samples, loaded, options, small, train_with_trainer
from transformers.distributed import DistributedConfig

args = options(batch=8, accumulate=1, tp=1, fsdp=1, lora=0, smoothing=0.0, clip=0.1)
whole, data = small(), labelled_samples(64)
asked = {name: size for name, size in (("tp_size", args.tp), ("fsdp_size", args.fsdp)) if size > 1}
model = loaded(whole, **({"distributed_config": DistributedConfig(**asked)} if asked else {}))
if args.lora:
    targets = ["q_proj", "v_proj", "up_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_A" in name:  # whole on each rank, and drawn after lora_B, of which a rank has a part
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data.copy_(0.1 * drawn)
        elif "lora_B" in name:
            parameter.data.fill_(0.05)
train_with_trainer(model, args, data, average_tokens_across_devices=True, logging_steps=1)
