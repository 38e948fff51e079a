"""Has what scripts of Megatron-core have in common: CPUs in place of GPUs, a latent attention, values, and steps."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from common import show
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.dot_product_attention import DotProductAttention

#: Of each model, as TransformerConfig has it; and what a latent attention has more.
BASE = {
    "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "use_cpu_initialization": True, "perform_initialization": True, "bias_dropout_fusion": False,
    "masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False,
    "pipeline_dtype": torch.float32,
}  # fmt: skip
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def on_cpu() -> None:
    """Replaces what only names or waits for a device: GPUs are not there, and nothing else is computed."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    plain_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *to, **how: plain_type(self, *to, **how) if to else "torch.cuda.FloatTensor"
    for name in ("zeros", "ones", "empty", "tensor"):  # device="cuda" is the CPU
        made = getattr(torch, name)
        setattr(torch, name, lambda *a, _f=made, **k: _f(*a, **{**k, "device": "cpu"} if "device" in k else k))


class Core(DotProductAttention):
    """Attention with keys and values of two widths: the library's for latent attention needs Transformer Engine."""

    def __init__(self, *given, k_channels=None, v_channels=None, **named):
        super().__init__(*given, **named)

    def forward(self, query, key, value, *_, **__):
        """Attends, with tensors of [places, samples, heads, width], under a causal mask."""
        scores = torch.einsum("ibhk,jbhk->bhij", query, key) * self.softmax_scale
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        return torch.einsum("bhij,jbhv->ibhv", scores.softmax(-1), value).flatten(2)


def whole_name(part: torch.nn.Module, name: str, tied: bool) -> str:
    """Returns a parameter's name in the whole model: each stage numbers its layers from 0 on."""
    if tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    if name.startswith("decoder.layers."):
        _, _, number, rest = name.split(".", 3)
        return f"decoder.layers.{part.decoder.layers[int(number)].layer_number - 1}.{rest}"
    return name


def rows_of(name: str, rows: int, gated: bool) -> list[int]:
    """Returns the rows of each of the matrices that a parameter consists of."""
    if gated and "linear_fc1" in name:  # gates and others
        return [rows // 2] * 2
    if "self_attention.in_proj" in name:  # of a gated delta net: queries, keys, values, gates, beta, alpha
        return [rows * 2 // 9] * 4 + [rows // 18] * 2
    return [rows // 3] * 3 if "conv1d" in name else [rows]


@torch.no_grad()
def fill(name: str, parameter: torch.nn.Parameter, cut: int, size: int, part: int, gated: bool) -> None:
    """Gives a parameter its part of values that depend on the name and on the whole shape alone.

    Args:
        cut: the axis along which it is one of ``size`` parts, the ``part``-th; below 0 where it is whole.
    """
    shape = list(parameter.shape)
    if cut >= 0:
        shape[cut] *= size
    generator = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(name, 1)))
    around, wide = 1.0 if "norm" in name and "weight" in name else 0.0, 0.5 if "router" in name else 0.1
    full = torch.randn(shape, generator=generator) * wide + around
    if cut == 0:  # of several matrices in one parameter each rank has its part of each
        matrices = [matrix.chunk(size) for matrix in full.split(rows_of(name, len(full), gated))]
        full = torch.cat([part for parts in zip(*matrices, strict=True) for part in parts])
    parameter.copy_(full.chunk(size, cut)[part] if cut >= 0 else full)


def cut_of(parameter: torch.nn.Parameter) -> int:
    """The axis along which a parameter is cut over tensor-parallel ranks, −1 where it is whole."""
    return getattr(parameter, "partition_dim", 0) if getattr(parameter, "tensor_model_parallel", False) else -1


def loss_of(way: set[str], mask, losses):
    """The loss of a micro-batch: a sum and its tokens, or a mean over all places."""
    total = (losses * mask).sum()
    if "tokens" in way:
        return total, mask.sum().to(torch.int), total.detach()
    value = total / mask.numel()
    return value, value.detach().clone()


def forward(way: set[str], batches, chunk):
    """One micro-batch through one part of the model."""
    tokens, mask = next(batches)
    length = tokens.shape[1] - 1
    positions = torch.arange(length).expand(len(tokens), length).contiguous()
    triangle = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    labels = tokens[:, 1:].contiguous()
    losses = chunk(tokens[:, :-1].contiguous(), positions, triangle, labels=None if "smoothed" in way else labels,
                   **({"loss_mask": mask.clone()} if "mtp" in way else {}),
                   **({"padding_mask": mask == 0} if "padded" in way else {}))  # fmt: skip
    if "smoothed" in way and chunk.module.post_process:  # the model gave logits
        losses = vocab_parallel_cross_entropy(losses, labels, label_smoothing=0.1)
    return losses, partial(loss_of, way, mask)


def train(args, model: list, optimizer, length: int, masked: bool, stepped: Callable[[], object]) -> None:
    """Three steps under the library's schedules, of one batch each that is cut over replicas and micro-batches.

    Args:
        model: this rank's parts of it. masked: whether some tokens do not count. stepped: called after each step.
    """
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    several = len(model) > 1
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(32, (8, length + 1), generator=generator)
        mask = (torch.rand(8, length, generator=generator) < 0.7).float() if masked else torch.ones(8, length)
        mine = [whole.chunk(replicas)[replica].chunk(args.accumulate) for whole in (tokens, mask)]
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [iter(list(zip(*mine, strict=True))) for _ in model]
        losses = get_forward_backward_func()(
            forward_step_func=partial(forward, args.way),
            data_iterator=batches if several else batches[0],
            model=model if several else model[0],
            num_microbatches=args.accumulate, seq_length=length, micro_batch_size=8 // replicas // args.accumulate,
        )  # fmt: skip
        if args.optimizer == "plain":
            for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
                parameter.grad = getattr(parameter, "main_grad", None)
            optimizer.step()
        else:
            optimizer.step()
            stepped()
        total = torch.stack(list(losses)).sum() if losses else torch.zeros(())
        if losses:
            total /= mask.sum() if "tokens" in args.way else args.accumulate * replicas
        dist.all_reduce(total)
        show(step, total / args.tp)
