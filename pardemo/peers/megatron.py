"""Builds Megatron-core's own layers on the plain GPT's weights, on GPU or CPU ranks.

Megatron-core keeps its groups in module globals and lays activations out as [sequence, batch, hidden]; both stay in
here. What CPU ranks need is in :func:`megatron`: the real code then runs unchanged.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pardemo import compat, extras
from pardemo.world.imports import compile_at_first_call

with warnings.catch_warnings(), compile_at_first_call(), extras.needed_by(__name__):
    warnings.simplefilter("ignore")  # it takes its own implementations for Apex's and Transformer Engine's, and says so
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

from pardemo.small_models import gpt as plain
from pardemo.world.rank import device


@contextlib.contextmanager
def megatron(tp: int = 1, pp: int = 1, ep: int = 1) -> Iterator[None]:
    """Megatron-core's groups for the block's duration; tp × pp has to divide the number of ranks.

    ``ep`` ranks share the experts of a layer.

    On CPU ranks two things are answered in CUDA's place: the current device is the CPU, and the random-state tracker
    is Megatron-core's own for inference, which keeps no CUDA states (there is no dropout here). Collective.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # its overlap on GPUs relies on it; else it warns
    with contextlib.ExitStack() as stack:
        if device().type == "cpu":
            stack.enter_context(compat.replaced(torch.cuda, "current_device", device))
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        options = {"expert_model_parallel_size": ep, "create_gloo_process_groups": False}
        parallel_state.initialize_model_parallel(tp, pp, **options)
        stack.callback(parallel_state.destroy_model_parallel)
        stack.enter_context(warnings.catch_warnings())  # torch has new names for two collectives
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*is deprecated")
        yield


def config(
    hidden: int, heads: int, kv_heads: int | None = None, layers: int = 1, width: int | None = None, **options: Any
) -> TransformerConfig:
    """A configuration of the plain GPT's kind: GeLU, biases, LayerNorm, no dropout, no fused CUDA kernels.

    Args:
        width: of the MLP within, by default 4·hidden.
    """
    with warnings.catch_warnings():  # about CUDA graphs and kernels for GPUs, which are not asked for
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=layers, hidden_size=hidden, ffn_hidden_size=width or 4 * hidden, num_attention_heads=heads,
            num_query_groups=kv_heads or heads, hidden_dropout=0.0, attention_dropout=0.0,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            use_cpu_initialization=device().type == "cpu", bias_dropout_fusion=False, masked_softmax_fusion=False,
            gradient_accumulation_fusion=False, **options,
        )  # fmt: skip


class MLP(nn.Module):
    """Its two parallel linear layers as Megatron's MLP puts them together; input [sequence, batch, hidden]."""

    def __init__(self, mlp: plain.MLP, sequence_parallel: bool = False):
        super().__init__()
        hidden = mlp.first.in_features
        tp = parallel_state.get_tensor_model_parallel_world_size()
        settings = config(hidden, tp, sequence_parallel=sequence_parallel)  # heads: any number that divides
        shared = {"config": settings, "init_method": settings.init_method, "bias": True, "skip_bias_add": False}
        self.first = ColumnParallelLinear(hidden, 4 * hidden, gather_output=False, **shared)
        self.second = RowParallelLinear(4 * hidden, hidden, input_is_parallel=True, **shared)
        self.load_state_dict(plain.parallel_mlp(mlp, parallel_state.get_tensor_model_parallel_group()).state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, _ = self.first(x)
        return self.second(nn.functional.gelu(inner))[0]


class Block(nn.Module):
    """Its TransformerLayer from the local specification; input [sequence, batch, hidden]."""

    def __init__(self, block: plain.Block):
        super().__init__()
        attention = block.attention
        self.layer = _layer(attention.out.in_features, attention.heads, attention.kv_heads)
        _load_layer(self.layer, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence = x.shape[0]
        later = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=x.device).triu(1)
        return self.layer(x, attention_mask=later)[0]


def _layer(hidden: int, heads: int, kv_heads: int) -> TransformerLayer:
    specification = get_gpt_layer_local_spec()
    return TransformerLayer(config(hidden, heads, kv_heads), specification.submodules, layer_number=1)


class GPT(nn.Module):
    """Its GPTModel with the plain GPT's weights; :meth:`loss` as the plain one's."""

    def __init__(self, gpt: plain.GPT):
        super().__init__()
        first = gpt.blocks[0].attention
        hidden = first.out.in_features
        self.model = GPTModel(
            config(hidden, first.heads, first.kv_heads, layers=len(gpt.blocks)),
            get_gpt_layer_local_spec(),
            vocab_size=gpt.embedding.num_embeddings,
            max_sequence_length=gpt.positions.num_embeddings,
            share_embeddings_and_output_weights=True,
        )
        group = parallel_state.get_tensor_model_parallel_group()
        embedding = plain.ParallelGPT(gpt, group).embedding.weight
        with torch.no_grad():
            self.model.embedding.word_embeddings.weight.copy_(embedding)
            self.model.embedding.position_embeddings.weight.copy_(gpt.positions.weight)
            for layer, block in zip(self.model.decoder.layers, gpt.blocks, strict=True):
                _load_layer(layer, block)
            self.model.decoder.final_layernorm.load_state_dict(gpt.norm.state_dict())

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        samples, length = tokens.shape[0], tokens.shape[1] - 1
        positions = torch.arange(length, device=tokens.device).expand(samples, -1)
        later = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
        return self.model(tokens[:, :-1], positions, later, labels=tokens[:, 1:].contiguous()).mean()


def groups() -> SimpleNamespace:
    """Megatron-core's tensor- and data-parallel groups, as ``tp`` and ``dp``."""
    return SimpleNamespace(
        tp=parallel_state.get_tensor_model_parallel_group(), dp=parallel_state.get_data_parallel_group()
    )


def gradients(module: MLP | Block) -> dict[str, torch.Tensor | None]:
    """This rank's gradients by the names, and in the order of rows, of pardemo's ParallelMLP or ParallelBlock."""
    if isinstance(module, MLP):
        return {name: p.grad for name, p in module.named_parameters()}
    layer = module.layer
    return {
        name: _to_thirds(p.grad, layer) if "qkv" in name else p.grad for name, p in _parameters_of_layer(layer).items()
    }


def _parameters_of_layer(layer: TransformerLayer) -> dict[str, Any]:
    """The layer's parameters by the names of pardemo's ParallelBlock."""
    parts = {
        "norm_1": layer.input_layernorm,
        "attention.qkv": layer.self_attention.linear_qkv,
        "attention.out": layer.self_attention.linear_proj,
        "norm_2": layer.pre_mlp_layernorm,
        "mlp.first": layer.mlp.linear_fc1,
        "mlp.second": layer.mlp.linear_fc2,
    }
    return {f"{name}.{kind}": getattr(part, kind) for name, part in parts.items() for kind in ("weight", "bias")}


@torch.no_grad()
def _load_layer(layer: TransformerLayer, block: plain.Block) -> None:
    source = plain.parallel_block(block, parallel_state.get_tensor_model_parallel_group())
    parameters = _parameters_of_layer(layer)
    for name, value in source.named_parameters():
        parameters[name].copy_(_by_group(value, layer) if "qkv" in name else value)


def _heads(layer: TransformerLayer) -> tuple[int, int, int]:
    attention = layer.self_attention
    groups = attention.num_query_groups_per_partition
    return groups, attention.num_attention_heads_per_partition // groups, attention.hidden_size_per_attention_head


def _by_group(rows: torch.Tensor, layer: TransformerLayer) -> torch.Tensor:
    """Rows query, key, value to Megatron's order: each key/value head with its query heads, [q … q k v] by turns."""
    groups, queries, head = _heads(layer)
    parts = rows.split([groups * queries * head, groups * head, groups * head])
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def _to_thirds(rows: torch.Tensor, layer: TransformerLayer) -> torch.Tensor:
    """The way back from :func:`_by_group`."""
    groups, queries, head = _heads(layer)
    parts = rows.unflatten(0, (groups, -1)).split([queries * head, head, head], 1)
    return torch.cat([part.flatten(0, 1) for part in parts])
