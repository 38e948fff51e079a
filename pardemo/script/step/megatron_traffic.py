"""Derives what Megatron-core's cut layers and its layers of experts send from their shapes."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from pardemo.script.step.shapes import (
    GATHERED,
    GRADIENTS,
    LOSS,
    REGATHERED,
    REPLICATED,
    SUMMED,
    Passage,
    Ranks,
    Reader,
    Shapes,
    Term,
    ranks_of,
    sent_by,
)

AGAIN = "inputs of column-cut layers, gathered again: sequence parallelism keeps only its shard"
TOKENS = "tokens to experts of other ranks, and back"


class Megatron(Reader):
    """Reads Megatron-core's tensor-parallel layers, its language models' losses, and its layers of experts."""

    def __init__(self, shapes: Shapes):
        super().__init__(shapes)
        self._roles: dict[type, Callable | None] = {}

    def ends(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        kind = type(passage.module)
        if kind not in self._roles:
            self._roles[kind] = self._role(kind)
        role = self._roles[kind]
        if role is not None and output is not None:
            role(passage, args, output)
        for outer in self._shapes.outer():  # experts are any class: they are a layer's, by name
            if passage.module is getattr(outer.module, "experts", None) and args and isinstance(outer.ended, dict):
                outer.ended["received"] = args[0].shape[0]
            break

    def _role(self, kind: type) -> Callable | None:
        layers = sys.modules.get("megatron.core.tensor_parallel.layers")
        if layers is None or not any(base.__module__.startswith("megatron.core.") for base in kind.__mro__):
            return None
        roles = {
            "ColumnParallelLinear": self._column, "RowParallelLinear": self._row,
            "VocabParallelEmbedding": self._vocabulary, "LanguageModelEmbedding": self._embedding,
            "GPTModel": self._loss, "TopKRouter": self._routed, "MoELayer": self._experts,
        }  # fmt: skip
        return next((roles[base.__name__] for base in kind.__mro__ if base.__name__ in roles), None)

    def _tp(
        self, passage: Passage, ranks: Ranks, kind: str, phase: str, elements: int, tensor: torch.Tensor, carried: str
    ) -> None:  # fmt: skip
        if phase == "forward" or tensor.requires_grad:
            self._shapes.add(passage, Term("TP", ranks, kind, phase, elements, carried), tensor.element_size())

    def _column(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        layer: Any = passage.module
        taken, made = args[0], output[0]
        ranks = ranks_of(layer.tp_group)
        if layer.explicit_expert_comm:
            return
        if layer.sequence_parallel:
            elements, frozen = taken.numel() * len(ranks), layer.weight is not None and not layer.weight.requires_grad
            self._tp(passage, ranks, "all-gather", "forward", elements, taken, GATHERED)
            if made.requires_grad:
                if not frozen:
                    self._tp(passage, ranks, "all-gather", "backward", elements, made, AGAIN)
                self._tp(passage, ranks, "reduce-scatter", "backward", elements, made, GRADIENTS)
        elif layer.allreduce_dgrad:
            self._tp(passage, ranks, "all-reduce", "backward", taken.numel(), made, GRADIENTS)
        if layer.gather_output:
            carried = f"outputs of {self._shapes.name(layer)}, gathered whole"
            self._tp(passage, ranks, "all-gather", "forward", made.numel(), made, carried)

    def _row(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        layer: Any = passage.module
        made = output[0]
        ranks = ranks_of(layer.tp_group)
        if layer.explicit_expert_comm:
            return
        if not layer.input_is_parallel:
            carried = "gradients of row-cut layers' inputs, gathered"
            self._tp(passage, ranks, "all-gather", "backward", args[0].numel(), made, carried)
        self._summed(passage, ranks, made, layer.sequence_parallel)

    def _vocabulary(self, passage: Passage, args: tuple[Any, ...], output: torch.Tensor) -> None:
        layer: Any = passage.module
        self._summed(passage, ranks_of(layer.tp_group), output, layer.reduce_scatter_embeddings)

    def _summed(self, passage: Passage, ranks: Ranks, made: torch.Tensor, scattered: bool) -> None:
        if scattered:
            self._tp(passage, ranks, "reduce-scatter", "forward", made.numel() * len(ranks), made, SUMMED)
            self._tp(passage, ranks, "all-gather", "backward", made.numel() * len(ranks), made, REGATHERED)
        else:
            self._tp(passage, ranks, "all-reduce", "forward", made.numel(), made, SUMMED)

    def _embedding(self, passage: Passage, args: tuple[Any, ...], output: torch.Tensor) -> None:
        layer: Any = passage.module
        scattered = layer.scatter_to_sequence_parallel and not layer.reduce_scatter_embeddings
        if layer.config.sequence_parallel and scattered:
            ranks = ranks_of(layer.word_embeddings.tp_group)
            carried = "gradients of the embedding's output, gathered"
            self._tp(passage, ranks, "all-gather", "backward", output.numel() * len(ranks), output, carried)

    def _loss(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        model: Any = passage.module
        ranks = ranks_of(model.pg_collection.tp)
        if isinstance(output, torch.Tensor) and output.dim() == 2 and model.post_process:
            if not model.config.cross_entropy_loss_fusion:  # the fused one sends the same by other calls
                term = Term("TP", ranks, "all-reduce", "forward", output.numel(), LOSS)
                self._shapes.add(passage, term, 4, times=3)
            if model.config.sequence_parallel:
                self._norms(model, ranks)

    def _norms(self, model: torch.nn.Module, ranks: Ranks) -> None:
        """Parameters that each rank has, of layers between the cut ones, which see a shard of the sequence."""
        norms: list[Any] = [p for p in model.parameters() if getattr(p, "sequence_parallel", False) and p.requires_grad]
        elements = sum(p.numel() for p in norms)
        size = norms[0].main_grad.element_size() if norms and hasattr(norms[0], "main_grad") else 4
        term = Term("TP", ranks, "all-reduce", "", elements, REPLICATED)
        self._shapes.once(term, sent_by("all-reduce", elements * size, len(ranks)))

    def _routed(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        """Notes which tokens go to which experts: a router returns probabilities and a map of tokens × experts."""
        for outer in self._shapes.outer():
            if self._roles.get(type(outer.module), self._role(type(outer.module))) == self._experts:
                outer.ended = {"counts": output[1].sum(dim=0), "probability_bytes": output[0].element_size()}
            break

    def _experts(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        layer: Any = passage.module
        routed = passage.ended
        dispatcher, hidden = layer.token_dispatcher, args[0]
        if not isinstance(routed, dict) or "received" not in routed or dispatcher.tp_size > 1:
            return  # with tensor-parallel experts tokens are gathered as well
        if layer.config.moe_expert_capacity_factor is not None:
            return  # some tokens are dropped, others padded
        ranks, size = ranks_of(dispatcher.ep_group), hidden.element_size()
        width, probability = hidden.shape[-1], routed["probability_bytes"]

        def add(kind: str, phase: str, elements: int, itemsize: int, carried: str, sent: float | None = None) -> None:
            self._shapes.add(passage, Term("EP", ranks, kind, phase, elements, carried), itemsize, sent=sent)

        if type(dispatcher).__name__ == "MoEAlltoAllTokenDispatcher":
            kept = int(routed["counts"][layer.local_expert_indices].sum())
            leave, come = int(routed["counts"].sum()) - kept, routed["received"] - kept
            add("all-to-all", "forward", 0, size, TOKENS, leave * (width * size + probability) + come * width * size)
            add("all-to-all", "backward", 0, size, TOKENS, come * (width * size + probability) + leave * width * size)
        elif type(dispatcher).__name__ == "MoEAllGatherTokenDispatcher":
            numel = hidden.numel() * len(ranks)
            chances = numel // width * layer.config.num_moe_experts
            for kind, reverse in (("all-gather", "reduce-scatter"), ("reduce-scatter", "all-gather")):
                add(kind, "forward", numel, size, TOKENS)
                add(reverse, "backward", numel, size, TOKENS)
            carried = "each token's probabilities, to all ranks"
            add("all-gather", "forward", chances, probability, carried)
            add("reduce-scatter", "backward", chances, probability, carried)
            add("all-gather", "forward", chances, 1, "each token's experts")
