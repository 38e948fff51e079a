"""The Trainer of transformers, resumed by resume_from_checkpoint."""

import torch
import torch.distributed as dist
from common import GLOBAL, SAMPLES, options
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

given = options().parse_args()
dist.init_process_group("gloo")
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=16))
numbers = torch.Generator().manual_seed(1)
samples = [
    {"input_ids": (tokens := torch.randint(64, (9,), generator=numbers)), "labels": tokens} for _ in range(SAMPLES)
]
arguments = TrainingArguments(
    str(given.out), per_device_train_batch_size=GLOBAL // dist.get_world_size(), max_steps=9, learning_rate=0.01,
    lr_scheduler_type="cosine", save_steps=given.every, report_to="none", use_cpu=True, ddp_backend="gloo",
    disable_tqdm=True, logging_steps=1,
)  # fmt: skip
last = get_last_checkpoint(str(given.out))
Trainer(model, arguments, train_dataset=samples).train(resume_from_checkpoint=last)
