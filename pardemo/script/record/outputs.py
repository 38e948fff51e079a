"""On a rank: what a model is called with, as tensors whose first axis is that of the samples."""

import dataclasses
import hashlib
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch

from pardemo import compat
from pardemo.script.record import records
from pardemo.script.record.records import MicroBatch, ModuleCall, Step, Tensors
from pardemo.script.runtime.call_sites import ROOT, CallSites, Hooks, dtype_name

#: Arguments that are the samples, of whatever else a model is given.
_FIRST = ("input_ids", "inputs_embeds", "pixel_values", "tokens")
#: What says nothing of the samples.
_PLAIN = (torch.Tensor, np.ndarray, str, bool, int, float, type(None))


def input_tensors(inputs: Any, given: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """A model's inputs with a first axis, by name, the samples' first; within lists, dicts and dataclasses, too.

    Where there is none, lists of texts or numbers stand for it: a text as a hash of it.
    """
    named = [*((f"input {number}", value) for number, value in enumerate(inputs)), *given.items()]
    leaves = [leaf for name, value in named for leaf in _input_leaves(name, value)]
    found = [(name, tensor) for name, value in leaves if (tensor := _as_tensor(value)) is not None]
    found = found or [(name, tensor) for name, value in leaves if (tensor := _list_as_tensor(value)) is not None]
    return sorted(found, key=lambda item: _FIRST.index(item[0]) if item[0] in _FIRST else len(_FIRST))


def unseen_inputs(inputs: Any, given: Mapping[str, Any]) -> list[str]:
    """Kinds of objects among a model's inputs that nothing is known of."""
    leaves = [leaf for value in (*inputs, *given.values()) for _, leaf in _input_leaves("", value)]
    return sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN)})


def _input_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _input_leaves(str(key), inner)
    elif isinstance(value, (list, tuple)) and _list_as_tensor(value) is None:
        for number, inner in enumerate(value):
            yield from _input_leaves(f"{name}.{number}", inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _input_leaves(part.name, getattr(value, part.name))
    else:
        yield name, value


def _as_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor) or value.dim() < 1:
        return None
    return value.to_local() if hasattr(value, "to_local") else value


def _list_as_tensor(value: Any) -> torch.Tensor | None:
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if all(isinstance(item, str) for item in value):
        digests = [hashlib.blake2b(item.encode(errors="replace"), digest_size=8).digest() for item in value]
        return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
    if all(isinstance(item, (int, float)) for item in value):
        return torch.tensor(value)
    return None


#: Calls of one module in a micro-batch that are written down: a part that runs for each token says nothing new.
MOST_CALLS = 64


class Outputs(Hooks):
    """Writes down a step's micro-batches, and the outputs of modules in them.

    Attributes: ``steps`` (the last is the one that runs), ``_tensors`` (of that one, by kind and name).
    """

    def __init__(self, sites: CallSites):
        super().__init__()
        self.steps: list[Step] = [Step()]
        self._sites = sites
        self._tensors: Tensors = {}
        self._thread = threading.get_ident()
        self._numbers: dict[tuple[int, str], int] = {}  # of micro-batch and module, how often it ran
        self._depth = 0
        self._given: dict[str, Any] = {}
        self._aside = False  # a model runs for its shapes only
        self._inside = False  # a model runs for training: its parts may, without gradients (a frozen encoder)
        self.computed_in: set[str] = set()

    @property
    def now(self) -> Step:
        """The step that runs."""
        return self.steps[-1]

    def _on_model(self, module: torch.nn.Module) -> None:
        """A model is about to run for training."""

    def _called(self, called: Any) -> Any:
        """A module's call, noted with its keywords, of which torch tells no hook that sees all modules."""

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._given = kwargs
            self._depth += 1
            try:
                return called(module, *args, **kwargs)
            finally:
                self._depth -= 1
                self._inside &= self._depth > 0

        return call

    def _is_root(self, module: torch.nn.Module) -> bool:
        return module in self._sites.roots and next(module.parameters(), None) is not None

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if threading.get_ident() != self._thread or not torch.is_grad_enabled() or compat.graph_task() != -1:
            return
        if self._depth == 1:
            self._aside = is_shape_inference()
        if self._depth == 1 and self._is_root(module) and not self._aside:
            self._inside = True
            self._on_model(module)
            self._begin_micro_batch(inputs)

    def _begin_micro_batch(self, inputs: Any) -> None:
        number = len(self.now.micro_batches)
        found = input_tensors(inputs, self._given)
        if not found:
            self.now.micro_batches.append(MicroBatch([], [], unseen_inputs(inputs, self._given)))
            return
        name, batch = found[0]
        tokens = records.token_hashes(batch)
        key = f"input/{number}"
        self._tensors[f"{key}/{name}"] = tokens
        for other, tensor in found[1:]:
            self._tensors[f"{key}/{other}"] = records.project_rows(
                tensor.double() if tensor.dim() else tensor.reshape(1)
            )
        samples = [records.digest(row) for row in tokens]
        names = [other for other, _ in found]
        self.now.micro_batches.append(MicroBatch(samples, names, activations=batch.requires_grad))

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or compat.graph_task() != -1:
            return
        if not (torch.is_grad_enabled() or self._inside):
            return
        if not self.now.micro_batches or self._aside:
            return
        name = self._sites.name(module) if module in self._sites.roots or self._known(module) else ""
        first = next((t for t in _leaves(output) if t.is_floating_point()), None)
        if first is not None:
            self.computed_in.add(dtype_name(first.dtype))
        if first is None or (not name and module not in self._sites.roots):
            return
        if hasattr(first, "placements"):
            return  # a DTensor's part: what it is part of, its module's next says
        number = len(self.now.micro_batches) - 1
        times = self._numbers.get((number, name), 0)
        self._numbers[number, name] = times + 1
        if times > MOST_CALLS:
            return
        key = f"output/{number}/{name}/{times}"
        self._tensors[key] = records.project_rows(first)
        for tensor in _leaves(inputs):
            if not tensor.is_floating_point() and not hasattr(tensor, "placements"):
                self._tensors[key.replace("output/", "whole/", 1)] = tensor.detach().to(torch.int64).clone()
                break
        kind = type(module).__name__
        self.now.calls.append(ModuleCall(name or ROOT, kind, number, times, key, tuple(first.shape)))

    def _known(self, module: torch.nn.Module) -> bool:
        return self._sites.name(module) != type(module).__name__


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
