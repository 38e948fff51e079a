"""ZeRO-3: parameters exist in full only around their use."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from pardemo.buckets import split_into_buckets
from pardemo.zero.engine import MakeOptimizer, ReducesInBackward
from pardemo.zero.unit import Unit


class Zero3(ReducesInBackward):
    """P_os+g+p: parameters in shards, too. Bytes per rank (4+K)Ψ/N, and two layers at a time; sends 3Ψ(N−1)/N per
    micro-batch: a layer is gathered before its forward, freed, gathered before its backward, and its gradients reduced.

    Args:
        layers: the modules that are gathered one at a time, in the order of their use; by default the elements of
            the module's ``nn.ModuleList`` and ``nn.Sequential`` children, of the first level where there are any. What
            is in none of them, or in several (tied), is gathered around the whole module.
            They must not contain one another.
        prefetch: gather the next layer while this one computes. The others as :class:`Zero1`.

    A layer that is checkpointed (non-reentrant) is gathered once for recomputation and backward. Between two uses the
    parameters have no memory: read them through :meth:`whole`.
    """

    stage = 3

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        max_norm: float | None = None,
        layers: Sequence[nn.Module] | None = None,
        prefetch: bool = True,
    ):
        self._layers = list(layers) if layers is not None else default_layers(module)
        if layers is not None:
            _check_layers(module, self._layers)
        self._prefetch, self._whole = prefetch, 0
        self._order: list[nn.Module] = []  # of the last forward: the whole, then its layers as they were used
        self._seen: list[nn.Module] = []
        self._back, self._current = 0, None
        super().__init__(module, optimizer, group, max_norm=max_norm)
        myself = weakref.ref(self)
        for owner in self._units_of:
            before = owner.register_forward_pre_hook(lambda owner, _: (e := myself()) and e._before_forward(owner))
            after = owner.register_forward_hook(lambda owner, _, out: (e := myself()) and e._after_forward(owner, out))
            self._hooks += [before, after]
        for unit in self.units:
            unit.free()

    def _make_units(self) -> list[Unit]:
        owners = [*self._layers, self.module]
        used = [{id(p): p for p in layer.parameters()} for layer in self._layers]
        shared = {key for i, own in enumerate(used) for other in used[i + 1 :] for key in own.keys() & other.keys()}
        taken = {key for own in used for key in own} - shared
        parts = [[p for key, p in own.items() if key not in shared] for own in used]
        parts.append([p for p in self.module.parameters() if id(p) not in taken])
        self._units_of = {}
        for owner, parameters in zip(owners, parts, strict=True):
            kinds = [[p for p in parameters if p.requires_grad], [p for p in parameters if not p.requires_grad]]
            units = [Unit(part, self.group, False) for kind in kinds for part in split_into_buckets(kind)]
            if units or owner is self.module:  # the whole marks the beginning and the end, with parameters or without
                self._units_of[owner] = units
        return [unit for units in self._units_of.values() for unit in units]

    def _backward_order(self) -> list[Unit]:
        owners = [*reversed(self._layers), self.module]
        return [unit for owner in owners for unit in self._units_of.get(owner, ()) if unit.trained]

    def step(self) -> float | None:
        self._leave_all()  # nothing gathered before the update may be used after it
        return super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        self._current = None
        self._leave_all()

    def close(self) -> None:
        with self.whole():
            super().close()
            self._units_of.clear()

    def state_dict(self, *args, **kwargs):
        """Within :meth:`whole` only: elsewhere there are no values to give (:func:`pardemo.zero.save` needs none).

        Raises:
            RuntimeError: outside ``whole()``.
        """
        if not self._whole:
            raise RuntimeError("stage 3 keeps parameters in shards: use pardemo.zero.save, or state_dict() in whole()")
        return super().state_dict(*args, **kwargs)

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """As :meth:`Engine.whole`; here it gathers, so that all ranks have to take part."""
        for owner in self._units_of:
            self._arrive(owner)
        self._whole += 1
        try:
            yield self.module
        finally:
            self._whole -= 1
            if not self._whole:
                with torch.no_grad():
                    for unit in self.units:
                        unit.take_over()
                self._leave_all()

    def _before_forward(self, owner: nn.Module) -> None:
        self._arrive(owner)
        if not _in_backward():
            self._seen = [owner] if owner is self.module else [*self._seen, owner]
            at = len(self._seen)
            if self._order[:at] == self._seen and at < len(self._order):
                self._fetch(self._order[at])

    def _after_forward(self, owner: nn.Module, output: object) -> None:
        if _in_backward():  # a recomputation: its backward follows
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._before_backward(owner))
        if owner is self.module:
            self._order = self._seen
            self._leave_all()
        else:
            self._leave(owner)

    def _begins(self) -> None:
        if torch._C._current_graph_task_id() != self._backward:
            self._back = len(self._order)
        super()._begins()

    def _before_backward(self, owner: nn.Module) -> None:
        """The gradient of the owner's output is there: what it was computed from is needed next."""
        self._begins()
        if owner is not self.module and owner is not self._current:
            if self._current is not None:  # its backward has ended; frozen parameters are still here
                self._leave(self._current)
            self._current = owner
        self._arrive(owner)
        if owner is not self.module:
            place = next((i for i in range(self._back - 1, 0, -1) if self._order[i] is owner), 0)
            self._back = place or self._back
        if self._back > 1:
            self._fetch(self._order[self._back - 1])

    def _send_next(self) -> None:
        unit = self._order_of_sending[self._next]
        super()._send_next()
        if not self._whole:
            unit.free()

    def _end_of_backward(self) -> None:
        super()._end_of_backward()
        self._current = None
        self._leave_all()

    def _fetch(self, owner: nn.Module) -> None:
        """Begins to gather an owner's parameters; the courier keeps the order that all ranks agree on."""
        if self._prefetch:
            for unit in self._units_of[owner]:
                if not unit.resident and unit.arriving is None:
                    unit.arriving = self._courier.submit(unit.gather)

    def _arrive(self, owner: nn.Module) -> None:
        units = self._units_of[owner]
        for unit in units:
            if not unit.resident and unit.arriving is None:
                unit.arriving = self._courier.submit(unit.gather)
        for unit in units:
            unit.arrive()

    def _leave(self, owner: nn.Module) -> None:
        for unit in self._units_of[owner]:
            if not self._whole and (unit.resident or unit.arriving is not None):
                unit.free()

    def _leave_all(self) -> None:
        for owner in self._units_of:
            self._leave(owner)


def default_layers(module: nn.Module) -> list[nn.Module]:
    """The elements of the outermost ``ModuleList`` and ``Sequential`` in ``module`` that have parameters."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [layer for layer in module if next(layer.parameters(), None) is not None]
    return [layer for child in module.children() for layer in default_layers(child)]


def _check_layers(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    names = {part: name for name, part in module.named_modules()}
    for number, layer in enumerate(layers):
        if not names.get(layer):
            raise ValueError(f"layers[{number}] is {'the whole' if layer is module else 'no part of the'} module")
        inside = next((other for other in layers if other is not layer and other in set(layer.modules())), None)
        if inside is not None or layer in layers[:number]:
            raise ValueError(f"layers overlap: {names[inside or layer]} is in {names[layer]}, which is listed as well")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
