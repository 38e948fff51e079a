"""Megatron-core's own functions for a sequence that several ranks share, on GPU or CPU ranks.

Its attention over such a sequence is Transformer Engine's, which runs on GPUs alone (:func:`refusal`). What it does in
Python runs here as it is: which tokens a rank takes, and the all-to-alls from tokens to features and back.
"""

import inspect
import warnings

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.groups import group_of
from pardemo.peers import megatron  # first: it says what Megatron-core lacks here, and hides its warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.utils import get_batch_on_this_cp_rank


def own_tokens(tokens: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's of the whole sequences' tokens [b, S]: [b, S/N], as its training loop cuts a batch."""
    # a hybrid has groups of several sizes; up to 0.16 there were none, and no such argument
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    options = {"is_hybrid_cp": False} if "is_hybrid_cp" in known else {}
    return get_batch_on_this_cp_rank({"tokens": tokens}, cp_group=group_of(group), **options)["tokens"]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup | None = None, *, causal: bool = True
) -> torch.Tensor:
    """:func:`pardemo.context_parallel.ulysses_attention` by its all-to-alls: [1, h, S/N, d], tokens in plain order."""
    group = group_of(group)

    def of_some_heads(tensor: torch.Tensor) -> torch.Tensor:  # [1, h, S/N, d] -> [1, h/N, S, d]
        width = tensor.shape[-1]
        features = all_to_all_sp2hp(tensor[0].transpose(0, 1).flatten(1), group)  # [S, h/N·d]
        return features.unflatten(1, (-1, width)).transpose(0, 1)[None]

    q, k, v = (of_some_heads(whole_tensor) for whole_tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    features = all_to_all_hp2sp(out[0].transpose(0, 1).flatten(1), group)  # [S/N, h·d]
    return features.unflatten(1, (-1, v.shape[-1])).transpose(0, 1)[None]


def refusal(hidden: int, heads: int) -> str:
    """Returns the error of Megatron-core's own attention layer when two ranks are to share a sequence. Collective."""
    with megatron.megatron():
        settings = megatron.config(hidden, heads)
        settings.context_parallel_size = 2
        try:
            DotProductAttention(settings, 1, AttnMaskType.causal, "self")
        except AssertionError as error:
            return str(error)
    return ""
