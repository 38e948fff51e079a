"""Keys and values at the attention operation: what torch's context parallelism has to bring from other ranks."""

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pardemo import compat
from pardemo.measure.shapes import Passage, Shapes, ranks_of, sent_by

KEYS = "keys and values of the other parts of the sequence"
HOPS = "gradients of keys and values, which visit each rank and come home"
#: The axis of a sequence in queries, keys and values: samples, heads, tokens, features of a head.
SEQUENCE = 2


class Rings:
    """Looks at what attention is called with, below torch's context parallelism, which has made DTensors of it."""

    def __init__(self, shapes: Shapes):
        self._shapes = shapes
        self._attention: Any = None

    def begin(self) -> None:
        """Attention is looked at from here on."""
        self._attention = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._seen

    def end(self) -> None:
        """Attention is torch's own again."""
        if functional.scaled_dot_product_attention is self._seen:
            functional.scaled_dot_product_attention = self._attention

    @functools.cached_property
    def _seen(self) -> Any:
        attention = self._attention

        @functools.wraps(attention)
        def seen(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(key, DTensor) and key.device_mesh.ndim == 1 and key.placements[0].is_shard(SEQUENCE):
                self._note(key, value)
            return attention(query, key, value, *args, **kwargs)

        return seen

    def _note(self, key: DTensor, value: DTensor) -> None:
        ranks, grad = ranks_of(key.device_mesh.get_group()), torch.is_grad_enabled()
        passage = self._shapes.passage or Passage(torch.nn.Identity(), True, compat.graph_task() != -1, grad)
        elements, size = key.numel() + value.numel(), key.element_size()
        gathers, in_float32 = compat.context_parallel_options()
        kind, n = "all-gather" if gathers else "all-to-all", len(ranks)
        once = sent_by("all-gather", elements * size, n)
        for phase in ("forward", "backward"):
            again = " again" if phase == "backward" else ""
            self._shapes.add(
                "CP", ranks, kind, phase, elements, size, KEYS + again, passage=passage, sent=once,
                times=1,
            )  # fmt: skip
        hop = elements // n * (4 if in_float32 else size)
        self._shapes.add(
            "CP", ranks, "all-to-all", "backward", elements // n, size, HOPS, passage=passage, sent=hop, times=n
        )
