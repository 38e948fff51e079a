"""Megatron-core's layer with experts (``MoELayer``) with a plain one's weights (:mod:`pardemo.small_models.mixture`).

Its router, its token dispatcher and its experts run unchanged, on GPU and on CPU ranks. What CPU ranks need is in
:func:`expert_groups`: streams and events that do nothing, and row counts as lists, which it makes of CUDA tensors only.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import compat, extras
from pardemo.world.imports import compile_at_first_call

with warnings.catch_warnings(), compile_at_first_call(), extras.needed_by(__name__):
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

from pardemo.peers import megatron
from pardemo.small_models.mixture import Mixture
from pardemo.world.rank import device


class _NoStream:
    """A stream and its events, of which a CPU has none: every call returns the stream itself."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def _as_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Row counts, which torch wants as a list, are made one of CUDA tensors alone; the CPU's go this way."""
    return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor


@contextlib.contextmanager
def expert_groups(ep: int) -> Iterator[None]:
    """Megatron-core's groups for the block's duration, ``ep`` ranks to a layer's experts, without tensor parallelism.

    Collective.
    """
    replaced: list[tuple[Any, str, Any]] = [(moe_utils, "te_general_gemm", None)]  # without Transformer Engine no name
    if device().type == "cpu":
        replaced += [
            (torch.cuda, "Stream", lambda *_, **__: _NoStream()),
            (torch.cuda, "current_stream", lambda *_, **__: _NoStream()),
            (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
            (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
            (token_dispatcher, "maybe_move_tensor_to_cpu", _as_list),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(compat.replaced(owner, name, value))
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        stack.callback(setattr, dispatcher, "cuda_dtoh_stream", None)
        stack.enter_context(megatron.megatron(ep=ep))
        yield


class MegatronMixture(nn.Module):
    """Its ``MoELayer`` with the dispatcher ``alltoall`` and the plain layer's weights; input [T, hidden]."""

    def __init__(self, plain: Mixture):
        super().__init__()
        ranks, router = parallel_state.get_expert_model_parallel_world_size(), plain.router
        width, hidden = plain.shared.out.in_features, plain.shared.out.out_features
        settings = megatron.config(
            hidden, 1, width=width, moe_ffn_hidden_size=width, num_moe_experts=router.num_experts,
            moe_router_topk=router.top_k, moe_token_dispatcher_type="alltoall", moe_grouped_gemm=False,
            moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_shared_expert_intermediate_size=width,
            gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, expert_model_parallel_size=ranks,
            expert_tensor_parallel_size=1,
        )  # fmt: skip
        with warnings.catch_warnings():  # about kernels for GPUs, which are not asked for
            warnings.simplefilter("ignore")
            specification = get_moe_module_spec(use_te=False, num_experts=router.num_experts, moe_grouped_gemm=False)
            self.layer = specification(settings, layer_number=1)
        self.layer.set_layer_number(1)
        self.first = dist.get_rank(parallel_state.get_expert_model_parallel_group()) * self.layer.num_local_experts
        ours = dict(plain.named_parameters())
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                parameter.copy_(ours[self._plain_name(name)])

    def _plain_name(self, name: str) -> str:
        """The plain layer's name of one of its parameters; it numbers the experts of each rank from 0 on."""
        if name == "router.weight":
            return "router.gate.weight"
        kind = "into.weight" if "linear_fc1" in name else "out.weight"
        if name.startswith("shared_experts."):
            return f"shared.{kind}"
        number = int(name.split("local_experts.")[1].split(".")[0])
        return f"experts.{self.first + number}.{kind}"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(tokens.unsqueeze(1))[0].squeeze(1)  # it wants [sequence, batch, hidden]

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """This rank's gradients, by the plain layer's names."""
        return {self._plain_name(name): parameter.grad for name, parameter in self.layer.named_parameters()}
