"""Records a rank's parameters before and after a step, gradients, buffers, and changes that are easily missed."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pardemo import compat
from pardemo.script.record import rank_record
from pardemo.script.record.pieces import HeldPiece, held_pieces, is_engine
from pardemo.script.record.rank_record import CurrentStep
from pardemo.script.runtime.call_sites import CallSites, without_wrappers
from pardemo.script.runtime.hooks import outermost

#: Elements of a buffer up to which it is recorded as it is, and above which its sketch is.
LARGEST_BUFFER = 65536


class Multiplied(NamedTuple):
    """Parameters, by their places in optimizers, that are multiplied by a number when a step begins, counted from 0."""

    step: int
    names: tuple[str, ...]
    number: int


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a recording: how many steps, into which folder, and how much.

    ``sketched``: parameters as sketches, but those of ``in_full``. ``rounded``: what is in a short type is rounded
    otherwise, to see how far that moves gradients. ``multiplied``: what is changed on purpose.
    """

    steps: int
    folder: str
    sketched: bool = False
    in_full: tuple[str, ...] = ()
    rounded: bool = False
    multiplied: Multiplied | None = None


class Parameters:
    """Records parameters of the models that are trained.

    Attributes:
        optimizers: all that the script has made. met: models that have run, by their ids.
    """

    def __init__(self, sites: CallSites, current: CurrentStep, settings: RecordSettings):
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.met: dict[int, torch.nn.Module] = {}  # whose last step is over when the function that has them is, too
        self._sites, self._current, self._settings = sites, current, settings
        self._after: dict[str, tuple[tuple[int, ...], str]] = {}  # behind the last step: shape and hash
        self._dtypes: dict[str, torch.dtype] = {}
        self._multiplied = settings.multiplied
        self._ran: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models that have run in this step

    def models(self) -> list[torch.nn.Module]:
        """Returns the modules that are trained, which have an optimizer's parameter, in the order of their first calls.

        Of what the script calls besides, an average of the parameters or a teacher, nothing is compared. Engines, and
        models whose optimizer has shards of its own in place of parameters, are all models.
        """
        roots = outermost(self._sites.roots)
        optimized = {id(parameter) for _, parameter in self._optimized()}
        trained = [
            root for root in roots
            if is_engine(root) or any(id(parameter) in optimized for parameter in root.parameters())
        ]  # fmt: skip
        return trained or roots

    def in_no_module(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Returns parameters of optimizers that no called module has, by their places in the optimizers.

        Not where modules are trained and an optimizer has nothing of theirs: it may have shards of its own, as an
        engine's has.
        """
        models = self.models()
        if any(is_engine(root) for root in models):
            return []
        held = {id(parameter) for root in models for parameter in root.parameters()}
        optimized = self._optimized()
        left = [(name, parameter) for name, parameter in optimized if id(parameter) not in held]
        trained = any(parameter.requires_grad for root in models for parameter in root.parameters())
        return left if not trained or len(left) < len(optimized) else []

    def _optimized(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters of all optimizers, by their places there."""
        optimizers = living_optimizers(self.optimizers)
        return [
            (f"optimizer.{number}.{group}.{index}" if len(optimizers) > 1 else f"optimizer.{group}.{index}", parameter)
            for number, optimizer in enumerate(optimizers)
            for group, settings in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(settings["params"])
        ]

    def _pieces(self, *, gradients: bool = True, at_hand: bool = False) -> list[HeldPiece]:
        with torch.no_grad():
            return held_pieces(self.models(), self.in_no_module(), gradients=gradients, at_hand=at_hand)

    def recorded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a parameter's tensor, or its sketch."""
        if self._settings.sketched and name not in self._settings.in_full:
            return rank_record.sketch_of(tensor)
        return _copied(tensor)

    def multiply(self, step: int) -> None:
        """Multiplies what is to be changed in this step, once."""
        if (multiplied := self._multiplied) is not None and multiplied.step == step:
            self._multiplied = None
            for name, parameter in self._optimized():
                if name in multiplied.names:
                    parameter.data.mul_(multiplied.number)

    def note(self, when: str) -> None:
        """Records values and gradients ``before`` the step, values ``after`` it."""
        step, tensors, before = self._current.step, self._current.tensors, when == "before"
        if not self._after and not step.pieces and len(self.met) > 1:
            self._forget_copies()
        for held in self._pieces(gradients=before):
            name = held.piece.name
            tensors[f"{when}/{name}"] = self.recorded(name, held.value)
            if before:
                step.pieces.append(held.piece)
                self._dtypes[name] = held.value.dtype
                if held.gradient is not None:
                    tensors[f"gradient/{name}"] = self.recorded(name, held.gradient)

    def _forget_copies(self) -> None:
        """Modules that ran once, and that nobody holds any more: copies that our layers ask whether they mix tokens."""
        left = [weakref.ref(module) for module in self.met.values()]
        self.met.clear()
        gc.collect()
        self.met |= {id(module): module for known in left if (module := known()) is not None}

    def note_applied(self) -> None:
        """Records gradients as the optimizer gets them, after they were clipped."""
        for held in self._pieces():
            if held.gradient is not None:
                self._current.tensors[f"applied/{held.piece.name}"] = self.recorded(held.piece.name, held.gradient)

    def note_accumulated(self) -> None:
        """Records the sum of the gradients that were there after each micro-batch but the last."""
        current = self._current
        if current.step.backwards == current.accumulated_after:
            return
        current.accumulated_after = current.step.backwards
        for held in self._pieces(at_hand=True):
            if held.gradient is not None:
                key = f"accumulated/{held.piece.name}"
                before = current.tensors.get(key)
                current.tensors[key] = _copied(held.gradient) if before is None else before + held.gradient

    def remember_after(self) -> None:
        """Keeps the parameters after the step, to compare them with those that the next forward pass uses."""
        self._ran.clear()
        prefix = "after/"
        self._after = {
            key.removeprefix(prefix): (tuple(tensor.shape), rank_record.digest(tensor))
            for key, tensor in self._current.tensors.items()
            if key.startswith(prefix)
        }

    def note_used(self, model: torch.nn.Module) -> None:
        """Records the parameters that a model has run with, if they differ from those after the step before.

        Ranks that step shards of their own gather them behind the optimizer's step, or in the next forward pass.
        """
        if not self._after or model in self._ran:
            return
        self._ran.add(model)
        with torch.no_grad():
            for held in held_pieces(self.models(), at_hand=True):
                name = held.piece.name
                if held.value.dtype != self._dtypes.get(name, held.value.dtype):
                    continue  # FSDP2's policy computes with parameters that are rounded
                value = self.recorded(name, held.value)
                shape, digest = self._after.get(name, ((), ""))
                if shape == tuple(value.shape) and digest != rank_record.digest(value):
                    self._current.tensors[f"used/{name}"] = value

    def note_buffers(self) -> None:
        """Records buffers that the models' state dicts have."""
        for root in self.models():
            for prefix, part in root.named_modules():
                for name, buffer in compat.saved_buffers(part):
                    full = without_wrappers(f"{prefix}.{name}" if prefix else name)
                    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                    small = buffer.numel() <= LARGEST_BUFFER
                    self._current.tensors[f"buffer/{full}"] = _copied(buffer) if small else rank_record.sketch_of(real)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().contiguous()


def noting_optimizers(
    begin: Callable[..., None], noted: list[weakref.ref[torch.optim.Optimizer]]
) -> Callable[..., None]:
    """Returns ``Optimizer.__init__`` or ``__setstate__`` as a function that also notes its optimizer, each once."""

    def begin_and_note(optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        begin(optimizer, *args, **kwargs)
        if not any(known() is optimizer for known in noted):
            noted.append(weakref.ref(optimizer))

    return begin_and_note


def living_optimizers(noted: list[weakref.ref[torch.optim.Optimizer]]) -> list[torch.optim.Optimizer]:
    """Returns the noted optimizers that still exist, in the order in which they were made."""
    return [optimizer for known in noted if (optimizer := known()) is not None]
