"""On a rank: a model's parameters, gradients and buffers, written down at moments of a step."""

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from pardemo import compat
from pardemo.measure.places import Places, without_wrappers
from pardemo.prove.record import pieces, sketch
from pardemo.prove.record.outputs import Outputs

#: Elements of a buffer up to which it is compared.
LARGEST_BUFFER = 65536


@dataclass(frozen=True)
class Wanted:
    """What to record: how many steps, into which folder, and how much.

    ``sketched``: parameters as sketches, but those of ``in_full``. ``forward``: outputs of modules. ``rounded``: what
    is in a short type is rounded otherwise, to see how far that moves gradients.
    """

    steps: int
    folder: str
    sketched: bool = False
    in_full: tuple[str, ...] = ()
    forward: bool = True
    rounded: bool = False


class Parameters(Outputs):
    """Writes down parameters before and after a step, gradients, buffers, and what changes where few look.

    Attributes: ``_kept`` (the models that were met, by their ids).
    """

    def __init__(self, places: Places, wanted: Wanted):
        super().__init__(places, wanted.forward)
        self._wanted = wanted
        self._accumulated_after = 0  # the backward passes after which gradients were last looked at within a step
        self._after: dict[str, tuple[tuple[int, ...], str]] = {}  # of parameters after the last step, shape and hash
        self._dtypes: dict[str, torch.dtype] = {}  # of parameters
        self._ran: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models that have run in this step
        self._all_optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._kept: dict[int, torch.nn.Module] = {}  # whose last step is over when the function that has them is, too

    def _optimized(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters of all optimizers, by their places there."""
        living = [optimizer for known in self._all_optimizers if (optimizer := known()) is not None]
        return [
            (f"optimizer.{number}.{group}.{place}" if len(living) > 1 else f"optimizer.{group}.{place}", parameter)
            for number, optimizer in enumerate(living)
            for group, one in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(one["params"])
        ]

    def _models(self) -> list[torch.nn.Module]:
        """The modules that are trained: those with a parameter of an optimizer's, in the order of their first calls.

        Of what the script calls besides, an average of the parameters or a teacher, nothing is compared. Engines, and
        models whose optimizer has shards of its own in place of parameters, are all models.
        """
        roots = pieces.outermost(self._places.roots)
        optimized = {id(parameter) for _, parameter in self._optimized()}
        trained = [
            root for root in roots
            if pieces.is_engine(root) or any(id(parameter) in optimized for parameter in root.parameters())
        ]  # fmt: skip
        return trained or roots

    def _in_no_module(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters of optimizers that no module has which the script calls.

        Not where no module has any: such an optimizer may have shards of its own, as an engine's has.
        """
        models = self._models()
        if any(pieces.is_engine(root) for root in models):
            return []
        own = {id(parameter) for root in models for parameter in root.parameters()}
        optimized = self._optimized()
        left = [(name, parameter) for name, parameter in optimized if id(parameter) not in own]
        return left if not models or len(left) < len(optimized) else []

    def _note_parameters(self, when: str) -> None:
        """Values and gradients before the step, values after it."""
        if len(self.steps) == 1 and not self.now.pieces and len(self._kept) > 1:
            self._forget_copies()
        with torch.no_grad():
            for one in pieces.held(self._models(), gradients=when == "before", beside=self._in_no_module()):
                name = one.piece.name
                self._tensors[f"{when}/{name}"] = self._taken(name, one.value)
                if when == "before":
                    self.now.pieces.append(one.piece)
                    self._dtypes[name] = one.value.dtype
                    if one.gradient is not None:
                        self._tensors[f"gradient/{name}"] = self._taken(name, one.gradient)
                    elif one.piece.trained:
                        self.now.no_gradient.append(name)

    def _taken(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter's tensor, or its sketch."""
        short = self._wanted.sketched and name not in self._wanted.in_full
        return (sketch.of_parameter if short else _copied)(tensor)

    def _forget_copies(self) -> None:
        """Modules that ran once, and that nobody holds any more: copies that our layers ask whether they mix tokens."""
        left = [weakref.ref(module) for module in self._kept.values()]
        self._kept.clear()
        gc.collect()
        self._kept |= {id(module): module for one in left if (module := one()) is not None}

    def _note_applied(self) -> None:
        """Gradients as the optimizer gets them, after they were clipped."""
        with torch.no_grad():
            for one in pieces.held(self._models(), beside=self._in_no_module()):
                if one.gradient is not None:
                    self._tensors[f"applied/{one.piece.name}"] = self._taken(one.piece.name, one.gradient)

    def _note_accumulated(self) -> None:
        """The sum, over micro-batches but the last, of the gradients that were there after each."""
        if self.now.backwards == self._accumulated_after:
            return
        self._accumulated_after = self.now.backwards
        for one in pieces.at_hand(self._models(), self._in_no_module()):
            if one.gradient is not None:
                key = f"accumulated/{one.piece.name}"
                before = self._tensors.get(key)
                self._tensors[key] = _copied(one.gradient) if before is None else before + one.gradient

    def _remember_after(self) -> None:
        """What parameters are behind the optimizer's step, to be held against what the next forward pass uses."""
        self._ran.clear()
        prefix = "after/"
        self._after = {
            key.removeprefix(prefix): (tuple(tensor.shape), sketch.digest(tensor))
            for key, tensor in self._tensors.items()
            if key.startswith(prefix)
        }

    def _ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        super()._ends(module, inputs, output)
        first = self._depth == 1 and self.now.micro_batches and not self.now.backwards and torch.is_grad_enabled()
        if first and self._after and module not in self._ran and threading.get_ident() == self._thread:
            self._ran.add(module)
            self._note_used()

    def _note_used(self) -> None:
        """Parameters with which a model has run, where they are others than behind the step before.

        Ranks that step shards of their own gather them behind the optimizer's step, or in the next forward pass.
        """
        with torch.no_grad():
            for one in pieces.at_hand(self._models()):
                name = one.piece.name
                value = self._taken(name, one.value)
                if one.value.dtype != self._dtypes.get(name, one.value.dtype):
                    continue  # FSDP2's policy computes with parameters that are rounded
                if self._after.get(name, ((), ""))[0] == tuple(value.shape) and self._after[name][1] != sketch.digest(
                    value
                ):
                    self._tensors[f"used/{name}"] = value

    def _note_buffers(self) -> None:
        for root in self._models():
            for prefix, part in root.named_modules():
                for name, buffer in compat.saved_buffers(part):
                    if buffer.numel() <= LARGEST_BUFFER:
                        full = without_wrappers(f"{prefix}.{name}" if prefix else name)
                        self._tensors[f"buffer/{full}"] = _copied(buffer)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().contiguous()
