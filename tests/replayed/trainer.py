"""GRPO in the form of TRL's trainer: rollouts in ``_prepare_inputs``, and a loss of a whole batch in ``compute_loss``.

Tokens come from NumPy's generator, seeded by the rank: as from a server that generates, torch knows nothing of them.
--wrong ranks: the loss is multiplied by the number of ranks, for gradients that are averaged.
"""

import argparse

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

PROMPT, ANSWER, VOCAB = 3, 5, 17

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--out", required=True)
parser.add_argument("--wrong", default="nothing")
args = parser.parse_args()


class Prompts(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, place):
        return {"prompt_ids": [1 + (place * 5 + at) % (VOCAB - 1) for at in range(PROMPT)]}


class Rollouts(Trainer):
    def _prepare_inputs(self, inputs):
        ids = torch.tensor([row["prompt_ids"] for row in inputs])
        answers = torch.from_numpy(draw.integers(0, VOCAB, (len(ids), ANSWER)))
        mask = (torch.arange(ANSWER) <= answers[:, :1] % ANSWER).float()
        with torch.no_grad():
            old = self.chances(self.model, ids, answers) + 0.1 * torch.sin(answers)
        rewards = (answers * mask).sum(1) / VOCAB
        return {
            "prompt_ids": ids, "completion_ids": answers, "completion_mask": mask,
            "old_per_token_logps": old, "advantages": rewards - 1.0,
        }  # fmt: skip

    @staticmethod
    def chances(model, prompts, answers):
        logits = model(input_ids=torch.cat([prompts, answers], 1)).logits[:, PROMPT - 1 : -1]
        return logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chances = self.chances(model, inputs["prompt_ids"], inputs["completion_ids"])
        ratio = (chances - inputs["old_per_token_logps"]).exp()
        gain = ratio.clamp(0.8, 1.2) * inputs["advantages"][:, None]
        loss = -(gain * inputs["completion_mask"]).sum(1).mean()
        return loss * (self.accelerator.num_processes if args.wrong == "ranks" else 1)


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)
options = TrainingArguments(
    args.out, per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate, max_steps=3,
    use_cpu=True, report_to=[], save_strategy="no", remove_unused_columns=False, learning_rate=0.1, optim="sgd",
    lr_scheduler_type="constant",
)  # fmt: skip
draw = np.random.default_rng(options.process_index)
Rollouts(model, options, data_collator=list, train_dataset=Prompts()).train()
