"""Intercepts what a rank trains on: the model's arguments, the loss's other inputs, random numbers, routers' choices.

A micro-batch begins with a call of a model for training, and ends with the backward pass. Each tensor in it has a name
that is the same in all layouts of a script, its **slot**: the number of the call and the argument, or the script's
line, the operation and how often that has run in this micro-batch.
"""

import contextlib
import copy
import dataclasses
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch.overrides import TorchFunctionMode

from pardemo import compat
from pardemo.script.record.numbers import draws_followed
from pardemo.script.record.outputs import is_shape_inference
from pardemo.script.record.recorder import Recorder
from pardemo.script.runtime.hooks import Hooks

#: Operations by whose numbers a loss may be normalised.
_SCALES = {
    "mul", "rmul", "imul", "multiply", "div", "rdiv", "idiv", "divide", "truediv", "rtruediv", "itruediv",
    "true_divide",
}  # fmt: skip

#: Operations that index, reshape, convert or describe a tensor: they compute no new values of the loss.
_VIEWS = {
    "getitem", "index_select", "narrow", "select", "split", "chunk", "unbind", "view", "reshape", "flatten", "squeeze",
    "unsqueeze", "expand", "expand_as", "transpose", "permute", "t", "contiguous", "clone", "detach", "to", "float",
    "double", "half", "bfloat16", "long", "int", "type", "type_as", "cpu", "cuda", "get", "dim", "size", "numel", "len",
    "is_floating_point", "stride", "is_contiguous",
}  # fmt: skip


class BatchPosition(NamedTuple):
    """A place in a run: the step and the micro-batch, from 0; ``text``: the line and the operation, for messages."""

    step: int
    micro: int
    text: str = ""


class InputFollower(Hooks):
    """Calls a method for each input of training; a subclass overrides these to record the inputs or to replace them.

    Operations on tensors between a model's call and the backward pass are the loss's. Their inputs that come neither
    from the model nor from another such operation are the loss's other inputs: labels, masks, advantages, old
    log-probabilities.
    """

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder
        self._thread = threading.get_ident()
        self._inside = 0  # calls of modules with parameters within each other
        self._in_trainer = False  # whether a Trainer computes its loss, all of whose inputs are known
        self._busy = False  # whether operations are our own
        self._in_loss = False  # whether a model was called for training, and no backward pass has run since
        self._derived: dict[int, torch.Tensor] = {}  # what the loss's own operations have made
        self._counts: Counter[str] = Counter()
        self._counted = (-1, -1, False)  # the step and the micro-batch of the counts
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()  # that are trained
        self._any_called = False  # whether any model has been called: what is drawn before makes weights

    # --- what a subclass does

    def called(self, position: BatchPosition, call: str, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments for a model's call for training, by name: the script's, or replacements.

        ``call``: how many calls of this model came before in the micro-batch, as ``0`` or ``1``; behind the model's
        number for models other than the first that was trained, as ``1.0``.
        """
        return given

    def begins(self, position: BatchPosition, call: str, model: torch.nn.Module) -> None:
        """Is called when a model's call for training begins."""

    def returned(self, given: dict[str, Any], output: Any, again: Callable[[], Any]) -> None:
        """Is called with what a model's call for training has returned; ``again`` repeats the call."""

    def batch(self, position: BatchPosition, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments for a Trainer's ``compute_loss``, by name: the script's, or replacements."""
        return given

    def loss_input(self, position: BatchPosition, slot: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that the loss reads beside the model's output, or its replacement."""
        return tensor

    def before_view(self, tensor: Any) -> Any:
        """Returns a tensor that the loss is about to index or reshape, or its replacement."""
        return tensor

    def after_view(self, args: Any, result: Any) -> Any:
        """Returns the result of indexing or reshaping another tensor than the model's output, or its replacement."""
        return result

    def output_split(self, position: BatchPosition, given: dict[str, Any], result: Any) -> None:
        """Is called with the part, or all parts, into which the loss splits what the model returned."""

    def number(self, position: BatchPosition, slot: str, value: float) -> None:
        """Is called with a number by which the loss is multiplied or divided."""

    def drawn(
        self, position: BatchPosition, slot: str, result: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the random numbers of a draw, or replacements; ``weights``: of each row, as for ``multinomial``."""
        return result

    def routed(self, position: BatchPosition, slot: str, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Returns the indices that a router chose by its scores, or others: [rows, experts], [rows, k] → [rows, k]."""
        return chosen

    # --- hooks

    def __enter__(self) -> Self:
        super().__enter__()
        module, optimizer = torch.nn.Module, torch.optim.Optimizer
        enter = self.following.enter_context
        enter(compat.replaced(module, "__call__", self._around_call(module.__call__)))
        enter(compat.replaced(optimizer, "__init__", self._around_optimizer(optimizer.__init__)))
        enter(draws_followed(self._draw))
        for owner in (torch, torch.Tensor):
            for name in ("topk", "argmax"):
                enter(compat.replaced(owner, name, self._around_choice(getattr(owner, name), name)))
        enter(_Operations(self._operation))
        return self

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if compat.graph_task() == -1:
            self._end_micro_batch()
        return run(*args, **kwargs)

    def _end_micro_batch(self) -> None:
        self._in_loss = False
        self._derived.clear()

    def _place(self, text: str = "") -> BatchPosition:
        recorder = self.recorder
        pending = recorder.current.pending  # a step is over, and is written down when the model runs again
        return BatchPosition(len(recorder.steps) + pending, 0 if pending else recorder.current.step.backwards, text)

    def _count(self, key: str) -> int:
        """Counts how often something with this key has run in the micro-batch before."""
        now = (*self._place()[:2], compat.graph_task() != -1)  # a forward pass that runs again counts for itself
        if now != self._counted:
            self._counted = now
            self._counts.clear()
        self._counts[key] += 1
        return self._counts[key] - 1

    @contextlib.contextmanager
    def _our_own(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _trains(self, module: torch.nn.Module) -> bool:
        here = threading.get_ident() == self._thread and compat.graph_task() == -1 and torch.is_grad_enabled()
        return here and self.recorder.sites.is_root(module) and not is_shape_inference()

    def _around_call(self, call_module: Callable[..., Any]) -> Callable[..., Any]:
        def call_followed(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            ours = self._busy or threading.get_ident() != self._thread
            if ours or next(module.parameters(), None) is None:
                return call_module(module, *args, **kwargs)
            outermost, given = self._inside == 0, {}
            trains = outermost and self._trains(module)
            self._any_called = True
            if trains:
                position, model = self._place(), self._models.setdefault(module, len(self._models))
                call = f"{model}." * (model > 0) + str(self._count(f"call of {model}"))
                given = dict(leaves_of((args, kwargs)))
                with self._our_own():
                    given = given if self._in_trainer else self.called(position, call, given)
                    self.begins(position, call, module)
                args, kwargs = with_leaves((args, kwargs), given)
                self._in_loss = True
            elif outermost and self._in_loss and not self._in_trainer:  # a model that is asked without gradients
                args, kwargs = self._replace_loss_inputs(args, kwargs, "a model's call")
            self._inside += 1
            try:
                output = call_module(module, *args, **kwargs)
            finally:
                self._inside -= 1
            if trains:
                with self._our_own():
                    self.returned(given, output, lambda: call_module(module, *args, **kwargs))
            if outermost and self._in_loss:
                self._note_derived(output, ())
            return output

        return call_followed

    def _around_optimizer(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``Optimizer.__init__`` to intercept a Trainer's loss: by then the script has imported the Trainer."""

        def begin_and_look(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
            if trainer is not None and not hasattr(trainer.training_step, "followed"):
                step = trainer.training_step

                def training_step(owner: Any, *args: Any, **kwargs: Any) -> Any:
                    if not hasattr(owner.compute_loss, "followed"):
                        owner.compute_loss = self._around_loss(owner.compute_loss)
                    return step(owner, *args, **kwargs)

                training_step.followed = True  # type: ignore[attr-defined]
                self.following.enter_context(compat.replaced(trainer, "training_step", training_step))

        return begin_and_look

    def _around_loss(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return compute(model, inputs, *args, **kwargs)
            with self._our_own():
                given = self.batch(self._place(), dict(leaves_of((inputs, kwargs))))
            inputs, kwargs = with_leaves((inputs, kwargs), given)
            self._in_trainer = True
            try:
                return compute(model, inputs, *args, **kwargs)
            finally:
                self._in_trainer = False

        compute_loss.followed = True  # type: ignore[attr-defined]
        return compute_loss

    # --- the loss

    def _operation(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        closed = not self._in_loss or self._inside or self._in_trainer or self._busy
        if closed or threading.get_ident() != self._thread:
            return function(*args, **kwargs)
        name = getattr(getattr(function, "func", function), "__name__", "").strip("_")  # others may follow it, too
        if name in _VIEWS:
            leaves = dict(leaves_of((args, kwargs)))
            if any(isinstance(leaf, torch.Tensor) and id(leaf) in self._derived for leaf in leaves.values()):
                result = function(*args, **kwargs)
                if name in ("chunk", "split", "tensor_split", "getitem"):
                    self.output_split(self._place(self.recorder.sites.here().line), leaves, result)
                self._note_derived(result, (args, kwargs))
                return result
            args, kwargs = with_leaves((args, kwargs), {key: self.before_view(leaf) for key, leaf in leaves.items()})
            return self.after_view(args, function(*args, **kwargs))
        args, kwargs = self._replace_loss_inputs(args, kwargs, name)
        result = function(*args, **kwargs)
        self._note_derived(result, (args, kwargs))
        return result

    def _replace_loss_inputs(self, args: Any, kwargs: dict[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
        """Returns the arguments of an operation of the loss, with the loss's other inputs among them replaced."""
        leaves = dict(leaves_of((args, kwargs)))
        text = f"{self.recorder.sites.here().line} ({name})"
        position, times = self._place(text), self._count(text)
        for key, leaf in leaves.items():
            slot = f"{text}/{times}/{key}"
            if type(leaf) in (int, float) and name in _SCALES:
                self.number(position, slot, float(leaf))
            elif self._from_elsewhere(leaf) and leaf.dim():
                leaves[key] = self.loss_input(position, slot, leaf)
            elif self._from_elsewhere(leaf) and leaf.dtype != torch.bool:
                self.number(position, slot, float(leaf))
        return with_leaves((args, kwargs), leaves)

    def _from_elsewhere(self, leaf: Any) -> bool:
        plain = type(leaf) is torch.Tensor and not leaf.requires_grad and not leaf.is_sparse
        return plain and leaf.device.type == "cpu" and id(leaf) not in self._derived

    def _note_derived(self, result: Any, args: Any) -> None:
        given = {id(leaf) for _, leaf in leaves_of(args)}
        for _, leaf in leaves_of(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given:  # an operation may return what it was given
                self._derived[id(leaf)] = leaf

    # --- draws, and routers' choices

    def _draw(self, name: str, args: Any, result: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != self._thread or not self._any_called or self._busy:
            return result
        line = self.recorder.sites.here().line
        if not line:
            return result
        text = f"{line} ({name})"
        weighted = name in ("multinomial", "bernoulli") and args and isinstance(args[0], torch.Tensor)
        weights = args[0] if weighted else None
        with self._our_own():
            return self.drawn(self._place(text), f"{text}/{self._count(text)}", result, weights)

    def _around_choice(self, choose: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = choose(*args, **kwargs)
            scores: Any = args[0] if args else kwargs.get("input")
            indices = result if name == "argmax" else result[1]
            routes = self._inside and type(scores) is torch.Tensor and threading.get_ident() == self._thread
            trains = torch.is_grad_enabled() or compat.graph_task() != -1
            if self._busy or not routes or not trains or scores.dim() < 2:
                return result
            if scores.shape[:-1] != indices.shape[: scores.dim() - 1]:
                return result
            text = f"{self.recorder.sites.here().module} ({name})"
            with self._our_own():
                rows, chosen = scores.detach().flatten(0, -2), indices.reshape(scores[..., 0].numel(), -1)
                changed = self.routed(self._place(text), f"{text}/{self._count(text)}", rows, chosen)
            if changed is chosen:
                return result
            changed = changed.reshape(indices.shape)
            return changed if name == "argmax" else torch.return_types.topk((scores.gather(-1, changed), changed))

        return call


class _Operations(TorchFunctionMode):
    """Passes each operation on tensors to a function, which runs it."""

    def __init__(self, around: Callable[[Any, Any, dict[str, Any]], Any]):
        super().__init__()
        self._around = around

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._around(func, args, kwargs or {})


# --- what is within an argument


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Lists the values within nested lists, mappings and dataclasses, with their names, as ``1.input_ids``."""
    for key, inner in _parts(value):
        if _parts(inner) or isinstance(inner, (list, tuple, dict)):
            yield from leaves_of(inner, f"{name}{key}.")
        else:
            yield f"{name}{key}", inner
    if not name and not _parts(value) and not isinstance(value, (list, tuple, dict)):
        yield "", value


def with_leaves(value: Any, leaves: dict[str, Any], name: str = "") -> Any:
    """Returns a copy of a value with other leaves, by the names of :func:`leaves_of`; itself if none is another."""
    parts = _parts(value)
    changed = {key: with_leaves(inner, leaves, f"{name}{key}.") for key, inner in parts}
    if not parts:
        return leaves.get(name.removesuffix("."), value)
    if all(changed[key] is inner for key, inner in parts):
        return value
    if isinstance(value, tuple):
        return type(value)(*changed.values()) if hasattr(value, "_fields") else tuple(changed.values())
    if isinstance(value, list):
        return list(changed.values())
    result = copy.copy(value)
    for key, inner in changed.items():
        if dataclasses.is_dataclass(result):
            object.__setattr__(result, key, inner)
        else:
            result[key] = inner
    return result


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if hasattr(value, "keys") and hasattr(value, "__getitem__") and not isinstance(value, torch.nn.Module):
        return [(key, value[key]) for key in value.keys() if isinstance(key, str)]  # noqa: SIM118
    return []
