"""With label smoothing, the Trainer does not shift the labels of a model that FSDP2 shards (transformers 5.23.0)."""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", type=int, default=2)
parser.add_argument("--batch", type=int, default=4, help="samples of a rank")
parser.add_argument("--smoothing", type=float, default=0.1)
args = parser.parse_args()
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(1, 64, (24, 9))]
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    dist.init_process_group("gloo")
    cut = {"distributed_config": DistributedConfig(fsdp_size=args.fsdp)} if args.fsdp > 1 else {}
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **cut)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=args.batch, max_steps=3, logging_steps=1, learning_rate=0.1, optim="sgd",
        label_smoothing_factor=args.smoothing, train_sampling_strategy="sequential", use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
if dist.get_rank() == 0:
    print(type(trainer.model).__name__, [round(entry["loss"], 4) for entry in trainer.state.log_history[:3]])
