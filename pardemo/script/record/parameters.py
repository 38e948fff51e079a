"""On a rank: ZeRO's engines of ours, which sum and step in a method of their own, and keep gradients in shards."""

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pardemo import compat
from pardemo.script.record import records
from pardemo.script.record.records import Outputs, Piece
from pardemo.script.runtime.call_sites import CallSites, is_deepspeed, outermost, without_wrappers


def is_pardemo_engine(module: torch.nn.Module) -> bool:
    """Whether a module is one of :mod:`pardemo.zero`'s engines."""
    zero = sys.modules.get("pardemo.zero.engine")
    return zero is not None and isinstance(module, zero.Engine)


def whole_of_engine(
    engine: Any, gradients: bool
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor | None]]:
    """Each parameter that an engine keeps flat, its values and its gradient, the ranks' mean, in whole. Collective.

    Stage 3's are DTensors, as FSDP2's, and none of these.
    """
    for unit in engine.units if engine.stage < 3 else ():
        flat = torch.zeros_like(unit.flat)  # of this rank's part, or chunk, of the sum
        with torch.no_grad(), compat.without_functions():
            if engine.stage == 1:
                for parameter, view in zip(unit.parameters, unit.views(flat), strict=True):
                    if parameter.grad is not None:
                        view.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            elif unit.gradient is not None:
                flat[unit.rank * unit.chunk :][: unit.chunk] = unit.gradient
        if gradients:
            exchange = engine.channel.submit(
                engine.channel.all_reduce, flat, f"{unit.name}, gradients that are written down, {engine.now}"
            )
            flat = exchange.result() / engine.size
        for parameter, view in zip(unit.parameters, unit.views(flat), strict=True):
            yield parameter, parameter.detach().clone(), view if gradients else None


def around_engine_steps(
    engine: type, before: Callable[[], None], after: Callable[[list[float], list[float]], None]
) -> AbstractContextManager[None]:
    """Within the block ``before`` is called before each step of an engine's, and ``after`` behind it.

    ``after`` gets the learning rates, and the norm by which the engine clipped.
    """
    step = engine.step  # type: ignore[attr-defined]

    def recorded(self: Any) -> Any:
        before()
        norm = step(self)
        clips = [float(norm)] if norm is not None else []
        after([float(group["lr"]) for group in self.optimizer.param_groups], clips)
        return norm

    return compat.replaced(engine, "step", recorded)


class HeldPiece(NamedTuple):
    """A piece, with what it is on this rank: values, and its gradient or None. Both as plain tensors."""

    piece: Piece
    value: torch.Tensor
    gradient: torch.Tensor | None


def held_pieces(
    roots: Iterable[torch.nn.Module], gradients: bool = True, beside: Iterable[tuple[str, torch.nn.Parameter]] = ()
) -> list[HeldPiece]:
    """All parameters of this rank's models: DTensor's, FSDP's, DeepSpeed's, Megatron's, or plain ones.

    DeepSpeed's and those of ZeRO of ours are gathered, for which all ranks have to come here. ``gradients``: False
    after a step, when DeepSpeed has none any more. ``beside``: parameters that no model has, with their names.
    """
    found = _unique_names(roots, lambda root: _pieces_of(root, gradients))
    return [*found, *(_plain_piece(parameter, (name,)) for name, parameter in beside)]


def pieces_at_hand(
    roots: Iterable[torch.nn.Module], beside: Iterable[tuple[str, torch.nn.Parameter]] = ()
) -> list[HeldPiece]:
    """What is there in the middle of a step, as far as it needs no collective: nothing of engines that keep shards."""
    return [
        *_unique_names(roots, _pieces_at_hand_of),
        *(_plain_piece(parameter, (name,)) for name, parameter in beside),
    ]


def _unique_names(
    roots: Iterable[torch.nn.Module], of_root: Callable[[torch.nn.Module], Iterable[HeldPiece]]
) -> list[HeldPiece]:
    """The parameters of several models, each with a name of its own."""
    pieces: dict[str, HeldPiece] = {}
    of_class: Counter[str] = Counter()
    for root in roots:
        kind = type(root).__name__
        of_class[kind] += 1
        prefix = f"{kind}." if of_class[kind] == 1 else f"{kind}.{of_class[kind]}."
        for held in of_root(root):
            name = held.piece.name if held.piece.name not in pieces else prefix + held.piece.name
            pieces[name] = held._replace(piece=replace(held.piece, name=name))
    return list(pieces.values())


def _pieces_at_hand_of(root: torch.nn.Module) -> Iterator[HeldPiece]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if is_pardemo_engine(root) or is_deepspeed(root):
        return
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in root.modules()):
        return  # gradients are whole, or none, until the last micro-batch
    for parameter, names in names_of(root).values():
        gradient: Any = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
        if _is_dtensor(gradient):
            same = _is_dtensor(parameter) and gradient.placements == parameter.placements  # type: ignore[attr-defined]
            gradient = compat.local_tensor(gradient) if same else None
        if gradient is not None and gradient.is_sparse:
            gradient = None
        value = (compat.local_tensor(parameter) if _is_dtensor(parameter) else parameter).detach()
        piece = Piece(names[0], tuple(value.shape), tied=names[1:])
        yield HeldPiece(piece, value, None if gradient is None else gradient.detach())


def is_engine(module: torch.nn.Module) -> bool:
    """Whether a module sums and steps in methods of its own: DeepSpeed's engine, or ZeRO's of ours."""
    return is_deepspeed(module) or is_pardemo_engine(module)


def _pieces_of(root: torch.nn.Module, gradients: bool) -> Iterator[HeldPiece]:
    tied = names_of(root)
    if is_deepspeed(root):
        yield from _deepspeed_pieces(root, tied, gradients)
        return
    if sharded := _fsdp1_pieces(root):
        yield from sharded
        return
    if is_pardemo_engine(root):
        yield from _zero_pieces(root, tied, gradients)
        return
    for parameter, names in tied.values():
        yield _plain_piece(parameter, names)


def names_of(root: torch.nn.Module) -> dict[int, tuple[torch.nn.Parameter, tuple[str, ...]]]:
    """A model's parameters by their ids, each with all its names, without wrappers."""
    found: dict[int, tuple[torch.nn.Parameter, tuple[str, ...]]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        known = found.get(id(parameter), (parameter, ()))[1]
        found[id(parameter)] = (parameter, (*known, without_wrappers(name)))
    return found


def _plain_piece(parameter: torch.nn.Parameter, names: tuple[str, ...]) -> HeldPiece:
    gradient: Any = parameter.grad
    if gradient is None:
        gradient = getattr(parameter, "main_grad", None)  # Megatron-core's buffers
    whole = start = None
    value: Any = parameter.detach()
    own: Any = parameter
    if _is_dtensor(own):
        whole, start = tuple(parameter.shape), _box_start(parameter)
        value = compat.local_tensor(parameter).detach()
        if gradient is not None and _is_dtensor(gradient):
            if gradient.placements != own.placements:  # a part of a sum, or whole where the parameter is cut
                gradient = gradient.redistribute(own.device_mesh, own.placements)
            gradient = compat.local_tensor(gradient)
    if gradient is not None and gradient.is_sparse:
        gradient = gradient.to_dense()
    piece = Piece(names[0], tuple(value.shape), whole, start, None, names[1:])
    return HeldPiece(piece, value, None if gradient is None else gradient.detach())


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _box_start(parameter: Any) -> tuple[int, ...]:
    """Where a DTensor's local part begins in the whole, an index for each axis."""
    return tuple(compat.local_offset(parameter.shape, parameter.device_mesh, parameter.placements))


def _fsdp1_pieces(root: torch.nn.Module) -> list[HeldPiece]:
    """The parameters of FSDP1's units as ranges of their elements, as far as this rank has them."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    pieces: list[HeldPiece] = []
    for name, part in root.named_modules() if fsdp is not None else ():
        if not isinstance(part, fsdp.FullyShardedDataParallel):
            continue
        for own, whole, begin, value, gradient in compat.fsdp1_ranges(part):
            full = without_wrappers(f"{name}.{own}" if name else own)
            pieces.append(HeldPiece(Piece(full, tuple(value.shape), tuple(whole), None, begin), value, gradient))
    return pieces


def _deepspeed_pieces(
    engine: Any, tied: dict[int, tuple[torch.nn.Parameter, tuple[str, ...]]], gradients: bool
) -> Iterator[HeldPiece]:
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    zero = engine.zero_optimization_stage() > 0
    for parameter, names in tied.values():
        trained = parameter.requires_grad
        gradient = safe_get_full_grad(parameter) if trained and gradients else None
        value = safe_get_full_fp32_param(parameter) if trained and zero else None
        if value is None:
            with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):  # frozen, and cut at stage 3
                value = parameter.detach().clone()
        piece = Piece(names[0], tuple(value.shape), tuple(value.shape), None, None, names[1:])
        yield HeldPiece(piece, value, gradient)


def _zero_pieces(
    engine: Any, tied: dict[int, tuple[torch.nn.Parameter, tuple[str, ...]]], gradients: bool
) -> Iterator[HeldPiece]:
    kept = {id(parameter): (value, gradient) for parameter, value, gradient in whole_of_engine(engine, gradients)}
    for parameter, names in tied.values():
        if id(parameter) not in kept:  # frozen at stages 1 and 2
            yield _plain_piece(parameter, names)
            continue
        value, gradient = kept[id(parameter)]
        shape = tuple(value.shape)
        yield HeldPiece(Piece(names[0], shape, shape, None, None, names[1:]), value, gradient)


#: Elements of a buffer up to which it is compared.
LARGEST_BUFFER = 65536


@dataclass(frozen=True)
class Wanted:
    """What to record: how many steps, into which folder, and how much.

    ``sketched``: parameters as sketches, but those of ``in_full``. ``rounded``: what is in a short type is rounded
    otherwise, to see how far that moves gradients.
    """

    steps: int
    folder: str
    sketched: bool = False
    in_full: tuple[str, ...] = ()
    rounded: bool = False


class Parameters(Outputs):
    """Writes down parameters before and after a step, gradients, buffers, and what changes where few look.

    Attributes: ``_kept`` (the models that were met, by their ids).
    """

    def __init__(self, sites: CallSites, wanted: Wanted):
        super().__init__(sites)
        self._wanted = wanted
        self._accumulated_after = 0  # the backward passes after which gradients were last looked at within a step
        self._after: dict[str, tuple[tuple[int, ...], str]] = {}  # of parameters after the last step, shape and hash
        self._dtypes: dict[str, torch.dtype] = {}  # of parameters
        self._ran: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # models that have run in this step
        self._all_optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._kept: dict[int, torch.nn.Module] = {}  # whose last step is over when the function that has them is, too

    def _optimized(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters of all optimizers, by their places there."""
        optimizers = living(self._all_optimizers)
        return [
            (f"optimizer.{number}.{group}.{place}" if len(optimizers) > 1 else f"optimizer.{group}.{place}", parameter)
            for number, optimizer in enumerate(optimizers)
            for group, one in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(one["params"])
        ]

    def _models(self) -> list[torch.nn.Module]:
        """The modules that are trained: those with a parameter of an optimizer's, in the order of their first calls.

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

    def _in_no_module(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Parameters of optimizers that no module has which the script calls.

        Not where no module has any: such an optimizer may have shards of its own, as an engine's has.
        """
        models = self._models()
        if any(is_engine(root) for root in models):
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
            for held in held_pieces(self._models(), gradients=when == "before", beside=self._in_no_module()):
                name = held.piece.name
                self._tensors[f"{when}/{name}"] = self._taken(name, held.value)
                if when == "before":
                    self.now.pieces.append(held.piece)
                    self._dtypes[name] = held.value.dtype
                    if held.gradient is not None:
                        self._tensors[f"gradient/{name}"] = self._taken(name, held.gradient)

    def _taken(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter's tensor, or its sketch."""
        short = self._wanted.sketched and name not in self._wanted.in_full
        return (records.sketch_of if short else _copied)(tensor)

    def _forget_copies(self) -> None:
        """Modules that ran once, and that nobody holds any more: copies that our layers ask whether they mix tokens."""
        left = [weakref.ref(module) for module in self._kept.values()]
        self._kept.clear()
        gc.collect()
        self._kept |= {id(module): module for one in left if (module := one()) is not None}

    def _note_applied(self) -> None:
        """Gradients as the optimizer gets them, after they were clipped."""
        with torch.no_grad():
            for held in held_pieces(self._models(), beside=self._in_no_module()):
                if held.gradient is not None:
                    self._tensors[f"applied/{held.piece.name}"] = self._taken(held.piece.name, held.gradient)

    def _note_accumulated(self) -> None:
        """The sum, over micro-batches but the last, of the gradients that were there after each."""
        if self.now.backwards == self._accumulated_after:
            return
        self._accumulated_after = self.now.backwards
        for held in pieces_at_hand(self._models(), self._in_no_module()):
            if held.gradient is not None:
                key = f"accumulated/{held.piece.name}"
                before = self._tensors.get(key)
                self._tensors[key] = _copied(held.gradient) if before is None else before + held.gradient

    def _remember_after(self) -> None:
        """What parameters are behind the optimizer's step, to be held against what the next forward pass uses."""
        self._ran.clear()
        prefix = "after/"
        self._after = {
            key.removeprefix(prefix): (tuple(tensor.shape), records.digest(tensor))
            for key, tensor in self._tensors.items()
            if key.startswith(prefix)
        }

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        super()._module_ends(module, inputs, output)
        first = self._depth == 1 and self.now.micro_batches and not self.now.backwards and torch.is_grad_enabled()
        if first and self._after and module not in self._ran and threading.get_ident() == self._thread:
            self._ran.add(module)
            self._note_used()

    def _note_used(self) -> None:
        """Parameters with which a model has run, where they are others than behind the step before.

        Ranks that step shards of their own gather them behind the optimizer's step, or in the next forward pass.
        """
        with torch.no_grad():
            for held in pieces_at_hand(self._models()):
                name = held.piece.name
                value = self._taken(name, held.value)
                if held.value.dtype != self._dtypes.get(name, held.value.dtype):
                    continue  # FSDP2's policy computes with parameters that are rounded
                if self._after.get(name, ((), ""))[0] == tuple(value.shape) and self._after[name][1] != records.digest(
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


def noting_optimizers(
    begin: Callable[..., None], noted: list[weakref.ref[torch.optim.Optimizer]]
) -> Callable[..., None]:
    """``Optimizer.__init__`` or ``__setstate__``, which notes its optimizer as well, each once."""

    def begin_and_note(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        begin(optimizer, *args, **kwargs)
        if not any(known() is optimizer for known in noted):
            noted.append(weakref.ref(optimizer))

    return begin_and_note


def living(noted: list[weakref.ref[torch.optim.Optimizer]]) -> list[torch.optim.Optimizer]:
    """Those of the noted optimizers that somebody still holds, in the order in which they were made."""
    return [optimizer for known in noted if (optimizer := known()) is not None]
