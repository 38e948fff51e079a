"""TRL's GRPO and DPO at their defaults, but for sizes, on a tiny model with a tokenizer of a few words."""

import argparse
import copy

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

parser = argparse.ArgumentParser()
parser.add_argument("--trainer", choices=("grpo", "dpo"))
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--out", required=True)
args = parser.parse_args()

text = "the a cat dog sees hears big small red green old new one two runs sleeps"
words = ["<pad>", "<eos>", *text.split()]
inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<eos>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=1, initializer_range=0.3,
    )
)  # fmt: skip
more = {
    "output_dir": args.out, "per_device_train_batch_size": args.batch, "gradient_accumulation_steps": args.accumulate,
    "max_steps": 2, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "learning_rate": 0.1,
    "lr_scheduler_type": "constant", "optim": "sgd", "gradient_checkpointing": False,
}  # fmt: skip
rows = [{"prompt": f"{words[2 + at % 5]} {words[7 + at % 7]} {words[4 + at % 3]}"} for at in range(24)]
if args.trainer == "grpo":
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, **_):
        return [float(len(set(text.split()))) for text in completions]

    options = GRPOConfig(**more, num_generations=4, max_completion_length=6)
    GRPOTrainer(model, reward, options, Dataset.from_list(rows), processing_class=tokenizer).train()
else:
    from trl import DPOConfig, DPOTrainer

    pairs = [row | {"chosen": f" {words[3 + at % 9]} runs", "rejected": " sleeps"} for at, row in enumerate(rows)]
    DPOTrainer(
        model,
        copy.deepcopy(model),
        DPOConfig(**more),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    ).train()
