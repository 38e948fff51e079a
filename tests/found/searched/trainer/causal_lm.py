"""The Trainer with a Llama: samples with different numbers of labels over micro-batches and ranks, label smoothing."""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--smoothing", type=float, default=0.0)
parser.add_argument("--clip", type=float, default=1.0)
args = parser.parse_args()
set_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 30}
data = []
for number in range(24):
    tokens = torch.randint(30, (9,))
    labels = tokens.clone()
    labels[: number % 7] = -100  # samples weigh by their labels
    data.append({"input_ids": tokens, "labels": labels})
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate, max_steps=3,
        max_grad_norm=args.clip, learning_rate=0.01, optim="sgd", use_cpu=True, report_to="none", save_strategy="no",
        train_sampling_strategy="sequential", disable_tqdm=True, label_smoothing_factor=args.smoothing,
    )  # fmt: skip
    Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments, train_dataset=data).train()
