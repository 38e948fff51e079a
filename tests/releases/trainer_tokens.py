"""transformers.Trainer on a model of one layer, whose rows hold labels of uneven number.

An epoch of eight rows is a step, so that all layouts see the same rows in a step, whatever their order is. ``--batch``
rows are a micro-batch of each rank, ``--accumulate`` micro-batches a step. ``--model custom`` is a model of our own,
whose ``forward`` takes no keyword that it does not name.
"""

import argparse
import tempfile

import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

VOCABULARY, LENGTH, STEPS, ROWS = 96, 24, 3, 8


class Plain(nn.Module):
    """An embedding, a layer and a head; the loss is the mean over a micro-batch's labels."""

    def __init__(self):
        super().__init__()
        self.tokens, self.layer, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.layer(self.tokens(input_ids))))
        return {
            "loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            "logits": logits,
        }


def build(name):
    if name == "custom":
        return Plain()
    large = {"vocab_size": VOCABULARY, "initializer_range": 0.3}  # rows' losses differ, as those of a trained model do
    if name == "gpt2":
        sizes = large | {"n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    sizes = large | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def rows(even):
    """The first tokens of a row are its labels, from 2 to 23 of them; all of them where the rows are even."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for row in range(ROWS):
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        labels = LENGTH if even else 2 + 3 * row
        found.append({"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH) >= labels, -100)})
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--model", choices=["gpt2", "llama", "custom"], default="gpt2")
    parser.add_argument("--even", action="store_true", help="rows have labels of one number")
    args = parser.parse_args()

    set_seed(1)
    model = build(args.model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate,
            max_steps=STEPS, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows(args.even)).train()


if __name__ == "__main__":
    main()
