"""With label smoothing the Trainer does not shift the labels of a vision-language model (transformers 5.23.0)."""

import argparse
import tempfile

import torch
from transformers import LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="llava", help="or llama, the language model alone")
parser.add_argument("--smoothing", type=float, default=1e-12, help="0: the model's own loss, without smoothing")
args = parser.parse_args()
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
config = LlavaConfig(
    text_config={"model_type": "llama", "vocab_size": 30, **sizes},
    vision_config={"model_type": "clip_vision_model", "image_size": 4, "patch_size": 2, **sizes},
    image_token_index=29,
)  # fmt: skip
model = LlavaForConditionalGeneration(config) if args.model == "llava" else LlamaForCausalLM(config.text_config)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(29, (24, 9))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=3, logging_steps=1, learning_rate=0.1, optim="sgd",
        label_smoothing_factor=args.smoothing, use_cpu=True, report_to="none", save_strategy="no",
        train_sampling_strategy="sequential", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
print([round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry])
