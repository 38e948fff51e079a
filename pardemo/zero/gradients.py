"""What ``.grad`` is under an engine: a tensor by which torch's functions see the mean over the ranks.

Plain training reads and changes ``.grad`` between ``backward()`` and ``step()``: ``clip_grad_norm_``,
``p.grad.mul_()``, ``GradScaler.unscale_``. Under ZeRO no rank has the mean there: at stage 1 a rank has its own
gradient until ``step()``, at stages 2 and 3 a part of the sum. So ``.grad`` is a tensor of a class of its own, which
torch asks what its functions do (``__torch_function__``). Autograd adds to it as to any other tensor.
"""

import math
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pardemo import compat
from pardemo.zero.running import Running
from pardemo.zero.sharded_parameters import HARMLESS
from pardemo.zero.unit import Unit

_VIEWS = {getattr(torch.Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
_NORMS = {torch.Tensor.norm, torch.norm, torch.linalg.vector_norm, torch.linalg.norm}
_UNSCALE = compat.unscale_
_OF_THE_WHOLE = {*_NORMS, compat.foreach_norm, _UNSCALE}
_ADDS = {torch.Tensor.add_, torch.Tensor.__iadd__}
#: changes for which it does not matter whether they are made before or after the sum over the ranks
_LINEAR = {
    torch.Tensor.mul_,
    torch.Tensor.__imul__,
    torch.Tensor.div_,
    torch.Tensor.__itruediv__,
    torch.Tensor.neg_,
    torch.Tensor.zero_,
}
_ON_THE_MEAN = {torch.Tensor.clamp_, torch.Tensor.clamp_min_, torch.Tensor.clamp_max_, torch.Tensor.nan_to_num_}
_FOREACH = {
    compat.foreach_mul_: torch.Tensor.mul_,
    compat.foreach_div_: torch.Tensor.div_,
    compat.foreach_zero_: torch.Tensor.zero_,
    compat.foreach_clamp_min_: torch.Tensor.clamp_min_,
    compat.foreach_clamp_max_: torch.Tensor.clamp_max_,
}


class OwnGradient(torch.Tensor):
    """``.grad`` at stage 1: this rank's own sum, until somebody looks at its values; the mean of the ranks' then.

    Averaging is a collective: all ranks look, or none. Later backward passes add to it, and ``step()`` averages again,
    which leaves a mean as it is.
    """

    #: set by the engine
    engine: "weakref.ref[Running]"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if not _is_harmless(function):
            for leaf in compat.tree_leaves((args, kwargs)):
                engine = leaf.engine() if isinstance(leaf, cls) and hasattr(leaf, "engine") else None
                if engine is not None:
                    _before_use(engine, function)
        return _natively(function, args, kwargs)


class ShardedGradient(torch.Tensor):
    """``.grad`` at stages 2 and 3: has no memory; norms and changes are those of the mean, which is in the shards."""

    #: set by the engine
    shards: "GradientsInShards"
    parameter: nn.Parameter

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if _is_harmless(function):
            return _natively(function, args, kwargs)
        mine = next(leaf for leaf in compat.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        if function in (torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.data.__get__):
            return mine
        if function in (torch.Tensor.__repr__, torch.Tensor.__format__):
            return f"<gradient of {mine.shards.name_of(mine.parameter)}, in shards>"
        return mine.shards.apply(function, args, kwargs or {})


class MastersGradient(torch.Tensor):
    """``.grad`` of what the optimizer was made from, between two steps: says where gradients are to whoever uses it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if _is_harmless(function):
            return _natively(function, args, kwargs)
        raise RuntimeError(
            "the parameters of engine.optimizer are shards without gradients of their own: clip, scale and unscale "
            "those of engine.parameters(): clip_grad_norm_(engine.parameters(), …), scaler.unscale_(engine)"
        )

    @classmethod
    def of(cls, master: nn.Parameter) -> "MastersGradient":
        return master.detach().new_zeros(1).expand(master.shape[0]).as_subclass(cls)


class GradientsInShards:
    """Shows an engine's gradients in ``.grad`` after a backward pass, and does there what is done to it.

    Args:
        engine: of stage 2 or 3.
    """

    def __init__(self, engine: Running):
        self._engine = weakref.ref(engine)
        self._names = {parameter: name for name, parameter in engine.module.named_parameters()}
        self._units = {parameter: unit for unit in engine.trained for parameter in unit.parameters}
        self._spans = {p: span for unit in engine.trained for p, span in unit.spans()}
        # by the units' shapes: at stage 3 the parameters are empty by now
        shapes = {p: shape for unit in engine.trained for p, shape in zip(unit.parameters, unit.shapes, strict=True)}
        self._gradients = {parameter: self._make(parameter, shape) for parameter, shape in shapes.items()}
        self._norms: dict[float, dict[nn.Parameter, torch.Tensor]] = {}
        self._shown = False
        #: a checksum of all changes since the last ``zero_grad()``, for the ranks to compare: after a step, too, since
        #: stage 3's sends nothing
        self.changes = 0

    def show(self) -> None:
        """After a backward pass. No memory, and nothing is sent."""
        for parameter, gradient in self._gradients.items():
            if parameter.grad is None:
                _set(parameter, gradient)
        self._shown = True
        self._norms.clear()

    def hide(self) -> None:
        """Before the next backward pass or step: what was set to None meanwhile (``module.zero_grad()``) is discarded.

        A unit of which all was discarded is as one that had no backward pass.
        """
        if not self._shown:
            return
        self._shown = False
        kept: set[Unit] = set()
        for parameter, gradient in self._gradients.items():
            if parameter.grad is gradient:
                parameter.grad = None
                kept.add(self._units[parameter])
            elif (piece := self._piece(parameter)) is not None:
                piece.zero_()
                self._note_change("discarded", parameter, ())
        for unit in set(self._units.values()) - kept:
            unit.gradient = None

    def forget(self) -> None:
        """All gradients are gone: ``zero_grad()``."""
        self._shown, self.changes = False, 0

    def is_shown(self, parameter: nn.Parameter) -> bool:
        return parameter.grad is self._gradients.get(parameter)

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._names[parameter]

    def apply(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """What a function of torch's does to gradients, done to the mean in the shards.

        Raises:
            RuntimeError: the function needs more than a norm or a change element by element.
        """
        first = args[0]
        if function in _NORMS:
            order, rest = _order(args, kwargs)
            return self._refuse(function, first) if rest else self._norm(first, order)
        if function is compat.foreach_norm:
            order, rest = _order(args, kwargs)
            return [_sharded(g).shards._norm(g, order) if _sharded(g) is not None else g.norm(order) for g in first]
        if function is _UNSCALE:
            self._unscale(*args)
            return None
        if function in _FOREACH and not any(isinstance(value, (list, tuple)) for value in args[1:]):
            for gradient in first:
                _FOREACH[function](gradient, *args[1:], **kwargs)
            return None
        alone = all(_is_one_number(value) for value in (*args[1:], *kwargs.values()))
        if function in _LINEAR | _ON_THE_MEAN and isinstance(first, ShardedGradient) and alone:
            self._change(function, first, args[1:], kwargs)
            return first
        return self._refuse(
            function, next(g for g in compat.tree_leaves((args, kwargs)) if isinstance(g, ShardedGradient))
        )

    def _change(self, function: Any, gradient: ShardedGradient, args: tuple, kwargs: dict) -> None:
        parameter, engine = gradient.parameter, self._engine()
        self._check(gradient)
        self._note_change(function.__name__, parameter, (*args, *kwargs.values()))
        for norms in self._norms.values():
            norms.pop(parameter, None)
        if (piece := self._piece(parameter)) is None:
            return
        with torch.no_grad():
            piece = piece.div_(engine.size) if function in _ON_THE_MEAN else piece
            function(piece, *args, **kwargs)
            if function in _ON_THE_MEAN:
                piece.mul_(engine.size)

    def _norm(self, gradient: ShardedGradient, order: float) -> torch.Tensor:
        """Of one parameter's mean gradient. The first that is asked for brings all; they stay until they change."""
        self._check(gradient)
        if gradient.parameter not in self._norms.get(order, ()):
            self._norms[order] = self._all_norms(order)
        return self._norms[order][gradient.parameter].clone()

    def _all_norms(self, order: float) -> dict[nn.Parameter, torch.Tensor]:
        """Collective: each rank's norms of its pieces, [ranks, parameters] in fp64, then the norms of these."""
        engine = self._engine()
        _check_whole(engine)
        if not order > 0:
            raise RuntimeError(f"gradients in shards have norms of orders above 0, not {order}")
        norms = engine.units[0].shard.new_zeros((engine.size, len(self._units)), dtype=torch.float64)
        for at, parameter in enumerate(self._units):
            piece = self._piece(parameter)
            if piece is not None and piece.numel():
                dtype = torch.promote_types(piece.dtype, torch.float32)
                norms[engine.trained[0].rank, at] = torch.linalg.vector_norm(piece, order, dtype=dtype)
        engine.exchange(norms, f"norms of order {order:g} of the gradients")
        norms = (torch.linalg.vector_norm(norms, order, dim=0) / engine.size).float()
        return dict(zip(self._units, norms.unbind(), strict=True))

    def _unscale(self, gradients: Sequence[torch.Tensor], inf: torch.Tensor, factor: torch.Tensor) -> None:
        """Collective: ``GradScaler``'s; what is not finite on one rank counts on all."""
        engine = self._engine()
        _check_whole(engine)
        pieces = list(self._pieces_of(gradients))
        if pieces:
            compat.unscale_(pieces, inf, factor)
        self._norms.clear()
        ours = inf.detach().clone().reshape(1)
        engine.exchange(ours, "whether gradients are finite")
        inf.copy_(ours.clamp_(max=1).reshape(inf.shape))

    def _pieces_of(self, gradients: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for gradient in gradients:
            if _sharded(gradient) is None:
                yield gradient
                continue
            gradient.shards._check(gradient)
            piece = gradient.shards._piece(gradient.parameter)
            if piece is not None and piece.numel():
                yield piece

    def _piece(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What this rank has of a parameter's gradient, of the sum over the ranks."""
        gradient = self._units[parameter].gradient
        return None if gradient is None else gradient[self._spans[parameter]]

    def _make(self, parameter: nn.Parameter, shape: torch.Size) -> ShardedGradient:
        gradient = self._units[parameter].shard.new_zeros(1).expand(shape).as_subclass(ShardedGradient)
        gradient.shards, gradient.parameter = self, parameter
        return gradient

    def _note_change(self, what: str, parameter: nn.Parameter, numbers: tuple) -> None:
        """Ranks that change gradients differently are told apart in what they send next."""
        known = [n.item() if torch.is_tensor(n) and not n.is_cuda else n for n in numbers if not _on_gpu(n)]
        self.changes = zlib.crc32(f"{self.changes} {what} {self._names[parameter]} {known}".encode())

    def _check(self, gradient: ShardedGradient) -> None:
        if not self._shown or not self.is_shown(gradient.parameter):
            raise RuntimeError(f"this gradient of {self._names[gradient.parameter]} was used by step() or discarded")

    def _refuse(self, function: Any, gradient: ShardedGradient) -> None:
        name = getattr(function, "__name__", str(function))
        raise RuntimeError(
            f"{self._names[gradient.parameter]}.grad is in shards, on which {name}() does not work: norm(), mul_(), "
            "div_(), zero_(), clamp_() by numbers do, and torch's clip_grad_norm_, clip_grad_value_ and GradScaler"
        )


def _set(parameter: nn.Parameter, gradient: ShardedGradient) -> None:
    """Torch takes a gradient of the parameter's own shape only, which stage 3's parameters do not have between uses."""
    with compat.without_functions():
        data = parameter.data
        parameter.data = gradient.detach()
        parameter.grad = gradient
        parameter.data = data


def _before_use(engine: Running, function: Any) -> None:
    """Stage 1: the mean, unless the function does the same to a rank's own gradient as to the mean."""
    if function in _OF_THE_WHOLE:
        _check_whole(engine)
    if function in _ADDS:
        engine.note_own_gradients()
    elif function not in _LINEAR:
        engine.average_gradients()


def _check_whole(engine: Running) -> None:
    """RuntimeError where this rank's part of the model is not the whole."""
    if engine.norm.is_of_a_part:
        raise RuntimeError(
            "this rank has a part of the model only, and torch would take its norm for the whole's: give the engine "
            "max_norm (and norm_over, with a pipeline)"
        )


def _is_harmless(function: Any) -> bool:
    """Whether a function of torch's needs no values."""
    name = getattr(function, "__name__", "")
    return function in HARMLESS or (name == "__get__" and function not in _VIEWS) or name == "__set__"


def _natively(function: Any, args: tuple, kwargs: dict | None) -> Any:
    with compat.without_functions():
        return function(*args, **(kwargs or {}))


def _order(args: tuple, kwargs: dict) -> tuple[float, bool]:
    """The order of a norm, and whether more than a norm of all elements is asked for."""
    options = dict(zip(("x", "order", "dim", "keepdim"), args, strict=False)) | kwargs
    order = next((options[key] for key in ("order", "ord", "p") if options.get(key) is not None), 2)
    return (2.0 if order == "fro" else math.inf if order == "inf" else float(order)), bool(
        options.get("dim") is not None or options.get("keepdim")
    )


def _sharded(gradient: torch.Tensor) -> ShardedGradient | None:
    return gradient if isinstance(gradient, ShardedGradient) else None


def _is_one_number(value: Any) -> bool:
    return value is None or isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1)


def _on_gpu(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_cuda
