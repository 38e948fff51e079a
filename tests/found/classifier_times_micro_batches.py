"""Gradients of a BERT classifier under the Trainer are times its micro-batches and ranks (transformers 5.23.0)."""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--problem", default="single_label_classification", help="or regression, or multi_label_…")
args = parser.parse_args()
set_seed(0)
labels = {"regression": 1, "multi_label_classification": 3, "single_label_classification": 3}[args.problem]
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 30}
config = BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0, problem_type=args.problem)
config.num_labels = labels
data = []
for _ in range(24):
    tokens = torch.randint(30, (6,))
    label = {1: tokens.float().mean() / 10, 3: torch.nn.functional.one_hot(tokens[0] % 3, 3).float()}[labels]
    data.append({"input_ids": tokens, "labels": tokens[0] % 3 if args.problem.startswith("single") else label})
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate, max_steps=3,
        logging_steps=1, max_grad_norm=1e9, learning_rate=0.01, optim="sgd", use_cpu=True, report_to="none",
        save_strategy="no", train_sampling_strategy="sequential", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)
    trainer.train()
print([round(entry["grad_norm"], 4) for entry in trainer.state.log_history if "grad_norm" in entry])
