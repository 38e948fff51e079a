"""Records a step's micro-batches on a rank, and the outputs of modules in them."""

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

import torch

from pardemo import compat
from pardemo.compat import dtype_name
from pardemo.script.record.rank_record import (
    FORWARD,
    CurrentStep,
    MicroBatch,
    ModuleCall,
    called,
    digest,
    input_tensors,
    project_rows,
    token_hashes,
    unseen_inputs,
)
from pardemo.script.runtime.call_sites import CallSites
from pardemo.script.runtime.hooks import Hooks

#: Calls of one module in a micro-batch that are written down: a part that runs for each token says nothing new.
MOST_CALLS = 64


class Outputs(Hooks):
    """Records micro-batches and modules' outputs.

    Args:
        current: of the step that runs. on_model: is told a model that is about to run for training.
    """

    def __init__(self, sites: CallSites, current: CurrentStep, on_model: Callable[[torch.nn.Module], None]):
        super().__init__()
        self.computed_in: set[str] = set()  # types of what modules returned
        self.depth = 0  # of the modules that run within each other
        self._sites, self._current, self._on_model = sites, current, on_model
        self._thread = threading.get_ident()
        self._given: dict[str, Any] = {}
        self._infers_shapes = False  # a model runs for its shapes only
        self._inside = False  # a model runs for training: its parts may, without gradients (a frozen encoder)

    def __enter__(self) -> Self:
        super().__enter__()
        module = torch.nn.Module
        self.following.enter_context(compat.replaced(module, "__call__", self._with_keywords(module.__call__)))
        return self

    def _with_keywords(self, call_module: Any) -> Any:
        """A module's call, noted with its keywords, of which torch tells no hook that sees all modules."""

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._given = kwargs
            self.depth += 1
            try:
                return call_module(module, *args, **kwargs)
            finally:
                self.depth -= 1
                self._inside &= self.depth > 0

        return call

    def _here(self) -> bool:
        """Whether a forward pass runs on the script's thread, and not again within a backward pass."""
        return threading.get_ident() == self._thread and compat.graph_task() == -1

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if self.depth != 1 or not torch.is_grad_enabled() or not self._here():
            return
        self._infers_shapes = is_shape_inference()
        if not self._infers_shapes and module in self._sites.roots and next(module.parameters(), None) is not None:
            self._inside = True
            self._on_model(module)
            self._begin_micro_batch(inputs)

    def _begin_micro_batch(self, inputs: Any) -> None:
        step = self._current.step
        self._current.note_line(FORWARD, self._sites.file_and_line)
        named = input_tensors(inputs, self._given)
        if not named:
            step.micro_batches.append(MicroBatch([], [], unseen_inputs(inputs, self._given)))
            return
        (name, batch), *others = named
        tokens = token_hashes(batch)
        key = f"input/{len(step.micro_batches)}"
        self._current.tensors[f"{key}/{name}"] = tokens
        for other, tensor in others:
            self._current.tensors[f"{key}/{other}"] = project_rows(tensor)
        samples = [digest(row) for row in tokens]
        step.micro_batches.append(MicroBatch(samples, [name for name, _ in named], activations=batch.requires_grad))

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        current = self._current
        if not self._here() or not (torch.is_grad_enabled() or self._inside):
            return
        if not current.step.micro_batches or self._infers_shapes:
            return
        returned = next((tensor for tensor in _leaves(output) if tensor.is_floating_point()), None)
        if returned is None:
            return
        self.computed_in.add(dtype_name(returned.dtype))
        kind, name, is_root = type(module).__name__, self._sites.name(module), module in self._sites.roots
        # called by its class it is part of no model; of a DTensor's part its module's next says what it is a part of
        if (name == kind and not is_root) or hasattr(returned, "placements"):
            return
        number = len(current.step.micro_batches) - 1
        times = current.runs[number, name]
        current.runs[number, name] += 1
        if times > MOST_CALLS:
            return
        current.note_line(called(name), self._sites.file_and_line)
        key = f"output/{number}/{name}/{times}"
        current.tensors[key] = project_rows(returned)
        for tensor in _leaves(inputs):
            if not tensor.is_floating_point() and not hasattr(tensor, "placements"):
                current.tensors[key.replace("output/", "whole/", 1)] = tensor.detach().to(torch.int64).clone()
                break
        current.step.calls.append(ModuleCall(name, kind, number, times, key, tuple(returned.shape)))


def is_shape_inference() -> bool:
    """Whether torch's pipelining runs a model only to learn the shapes that it sends."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name.endswith("metadata_inference") or frame.f_code.co_name == "_shape_inference":
            return True
        frame = frame.f_back
    return False


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    for leaf in compat.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
    if hasattr(value, "items") and not isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
