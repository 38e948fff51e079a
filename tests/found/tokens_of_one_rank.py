"""Without average_tokens_across_devices, the Trainer's gradients are times the tensor-parallel size (5.23.0)."""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--average", type=int, default=0)
args = parser.parse_args()
set_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(1, 64, (24, 9))]
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    dist.init_process_group("gloo")
    cut = {"distributed_config": DistributedConfig(tp_size=args.tp)} if args.tp > 1 else {}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **cut)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=3, logging_steps=1, learning_rate=0.01, optim="sgd",
        max_grad_norm=0, average_tokens_across_devices=bool(args.average), train_sampling_strategy="sequential",
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data).train()
