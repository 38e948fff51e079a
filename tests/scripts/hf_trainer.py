"""transformers.Trainer on a tiny Llama or GPT-2: accumulated gradients, rows of uneven length, packed or padded.

torchrun --nproc-per-node 2 hf_trainer.py --model llama --max_steps 6
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

VOCABULARY, PAD = 1280, 0


class Texts(Dataset):
    """Rows of several made-up texts each: as many tokens as the texts have."""

    def __init__(self, rows, longest):
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(longest // 4, longest // 2, (rows, 2), generator=generator).tolist()
        self.rows = [[torch.randint(1, VOCABULARY, (n,), generator=generator) for n in pair] for pair in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        texts = self.rows[index]
        return {"input_ids": torch.cat(texts), "position_ids": torch.cat([torch.arange(len(text)) for text in texts])}


def collate(rows):
    """Pads a batch to its longest row; what is padded is no label."""

    def padded(name, value):
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)

    tokens = padded("input_ids", PAD)
    mask = padded("position_ids", -1) >= 0
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def build(name):
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=96, n_embd=64, n_layer=2, n_head=4))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["llama", "gpt2"], default="llama")
    parser.add_argument("--max_steps", "--steps", type=int, default=6)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    args = parser.parse_args()

    set_seed(42)
    with tempfile.TemporaryDirectory() as folder:
        training_args = TrainingArguments(
            output_dir=folder,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            gradient_checkpointing=args.gradient_checkpointing,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=1,
            bf16=args.bf16,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=build(args.model), args=training_args, train_dataset=Texts(256, 80), data_collator=collate
        )
        result = trainer.train()
    print(f"{training_args.device}: mean loss {result.training_loss:.4f} of {result.global_step} steps")


if __name__ == "__main__":
    main()
