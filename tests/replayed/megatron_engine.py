"""Megatron-core's GPTModel with the weights of gpt2.py. --wrong gelu: the exact function, and not its approximation."""

import argparse
from functools import partial

import torch
from gpt2 import HEADS, LAYERS, LENGTH, VOCAB, WIDTH, trained
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("samples")
parser.add_argument("--wrong", default="nothing")
args = parser.parse_args()
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(0)
config = TransformerConfig(
    num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0,
    masked_softmax_fusion=False, gradient_accumulation_fusion=False, bias_activation_fusion=False,
    activation_func=F.gelu if args.wrong == "gelu" else partial(F.gelu, approximate="tanh"),
)  # fmt: skip
model = GPTModel(
    config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=LENGTH,
    position_embedding_type="learned_absolute", share_embeddings_and_output_weights=True,
)  # fmt: skip
weights = trained().transformer
by_head = torch.arange(3 * WIDTH).view(3, HEADS, -1).transpose(0, 1).reshape(-1)  # q, k, v of each head in turn
pairs = [
    (model.embedding.word_embeddings.weight, weights.wte.weight),
    (model.embedding.position_embeddings.weight, weights.wpe.weight),
    (model.decoder.final_layernorm.weight, weights.ln_f.weight),
    (model.decoder.final_layernorm.bias, weights.ln_f.bias),
]  # fmt: skip
for here, there in zip(model.decoder.layers, weights.h, strict=True):
    attention, mlp = here.self_attention, here.mlp
    pairs += [
        (attention.linear_qkv.weight, there.attn.c_attn.weight.T[by_head]),
        (attention.linear_qkv.bias, there.attn.c_attn.bias[by_head]),
        (attention.linear_proj.weight, there.attn.c_proj.weight.T),
        (attention.linear_proj.bias, there.attn.c_proj.bias),
        (mlp.linear_fc1.weight, there.mlp.c_fc.weight.T), (mlp.linear_fc1.bias, there.mlp.c_fc.bias),
        (mlp.linear_fc2.weight, there.mlp.c_proj.weight.T), (mlp.linear_fc2.bias, there.mlp.c_proj.bias),
        (here.input_layernorm.weight, there.ln_1.weight), (here.input_layernorm.bias, there.ln_1.bias),
        (here.pre_mlp_layernorm.weight, there.ln_2.weight), (here.pre_mlp_layernorm.bias, there.ln_2.bias),
    ]  # fmt: skip
with torch.no_grad():
    for parameter, value in pairs:
        parameter.copy_(value)
    tokens = load_file(args.samples)["input_ids"]
    positions = torch.arange(LENGTH).repeat(len(tokens), 1)
    model(tokens, positions, torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1))
