"""The Trainer with a Llama: samples with different numbers of labels over micro-batches and ranks, label smoothing."""

from common import labelled_samples, options, train_with_trainer
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

args = options(batch=2, accumulate=1, smoothing=0.0, clip=1.0)
set_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 30}
data = labelled_samples(30)
train_with_trainer(LlamaForCausalLM(LlamaConfig(**sizes)), args, data, use_cpu=True)
