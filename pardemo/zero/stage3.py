"""ZeRO-3: parameters exist in full only around their use.

A step of three layers on one rank. G: a layer's parameters are gathered, [chunk] to [N · chunk]; R: its gradients are
reduced, [N · chunk] to [chunk]. Gathers run ahead by a layer, so that at most two layers are whole::

    computes        |   1   |   2   |   3   |    |   3   |   2   |   1   |
    sends        G1 | G2    | G3    |       | G3 | G2    | G1 R3 | R2    | R1
    whole           | 1 2   | 2 3   | 3     |    | 3 2   | 2 1   | 1     |
                        forward                      backward
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.collectives.decorators import not_compiled
from pardemo.zero.in_backward import ReducesInBackward
from pardemo.zero.layers import check_layers, default_layers, parameters_by_owner
from pardemo.zero.output_tensors import hides, tensors_in
from pardemo.zero.param_groups import MakeOptimizer
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

    As FSDP2: a layer may be used several times, call another one, be checkpointed (re-entrantly or not; gathered once
    for recomputation and backward), and return tensors in tuples, lists, dicts and dataclasses; a method other than
    ``forward`` works when it is named to :meth:`register_forward_method`. Between two uses the parameters have no
    memory: read and change them, and load a state dict, within :meth:`whole`. Two engines on one group: all ranks use
    them in one order, because a forward waits for the other ranks' shards (a time-out names who waits for which).

    Refused: a parameter that is used or changed where it is in shards; a layer whose output is an object of another
    kind; ranks that use different layers; ``create_graph=True`` (second derivatives).
    """

    stage = 3

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        layers: Sequence[nn.Module] | None = None,
        prefetch: bool = True,
        **options,
    ):
        self._layers = list(layers) if layers is not None else default_layers(module)
        if layers is not None:
            check_layers(module, self._layers)
        self._prefetch, self._whole = prefetch, 0
        self._order: list[nn.Module] = []  # of the last forward: the whole, then its layers as they were used
        self._seen: list[nn.Module] = []
        self._running: list[nn.Module] = []  # whose forward has begun and not ended
        self._callers: dict[nn.Module, set[nn.Module]] = defaultdict(set)  # of a layer, the layers that called it
        self._back, self._current = 0, None
        self._names = {part: name or "the module" for name, part in module.named_modules()}
        super().__init__(module, optimizer, group, **options)
        myself = weakref.ref(self)
        # they wait for other ranks: nothing for torch.compile to look into
        before = not_compiled(lambda owner, _: (e := _engine_of(myself, owner)) and e._before_forward(owner))
        after = not_compiled(lambda owner, *call: (e := _engine_of(myself, owner)) and e._after_forward(owner, *call))
        for owner in self._units_of:
            self._hooks += [
                owner.register_forward_pre_hook(before),
                owner.register_forward_hook(after, with_kwargs=True, always_call=True),  # after an error too, with None
            ]

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Gathers ``module``'s parameters around its method ``name`` as around its forward.

        Torch's ``register_fsdp_forward_method`` for this engine; :meth:`close` undoes it.

        Raises:
            ValueError: ``module`` is neither one of the layers nor the whole.
        """
        if module not in self._units_of:
            raise ValueError(f"{type(module).__name__} is neither one of the engine's layers nor the whole module")
        method, myself = getattr(module, name), weakref.ref(self)

        def gathered(*args, **kwargs):
            if (engine := myself()) is None:
                return method(*args, **kwargs)
            output = None
            engine._before_forward(module)
            try:
                output = method(*args, **kwargs)
            finally:
                engine._after_forward(module, args, kwargs, output)
            return output

        setattr(module, name, gathered)
        self._hooks.append(_Replaced(module, name))

    def _take_over_what_was_written(self) -> None:
        """Nothing: into shards nobody writes. What was gathered before the update may not be used after it."""
        self._leave_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        self._current = None
        for unit in self.units:
            unit.forget_arrival()
        self._leave_all()

    def close(self) -> None:
        if self._closed:
            return
        with self.whole():
            super().close()
            self._units_of.clear()
        for parameter in self.module.parameters():
            del parameter.sharded_name

    def state_dict(self, *args, **kwargs):
        """Within :meth:`whole` only: elsewhere there are no values to give (:func:`pardemo.zero.save` needs none).

        Raises:
            RuntimeError: outside ``whole()``.
        """
        if not self._whole and not self._closed:
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
                self.take_over()
                self._leave_all()

    def _make_units(self) -> list[Unit]:
        self._units_of: dict[nn.Module, list[Unit]] = {}
        count = 0
        for owner, parameters in parameters_by_owner(self.module, self._layers).items():
            kinds = [[p for p in parameters if p.requires_grad], [p for p in parameters if not p.requires_grad]]
            parts = [part for kind in kinds for part in self.param_groups.split(kind)]
            if parts or owner is self.module:  # the whole marks the beginning and the end, with parameters or without
                self._units_of[owner] = [
                    Unit(f"unit {count + n} ({self._names[owner]})", part, self._channel, False, of)
                    for n, (of, part) in enumerate(parts)
                ]
                count += len(parts)
        return [unit for units in self._units_of.values() for unit in units]

    def _show_units(self) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.sharded_name = name
        for unit in self.units:
            unit.free()

    def _backward_order(self) -> list[Unit]:
        owners = [*reversed(self._layers), self.module]
        return [unit for owner in owners for unit in self._units_of.get(owner, ()) if unit.trained]

    def _check_load(self, assign: bool) -> None:
        super()._check_load(assign)
        if not self._whole and self._units_of:
            raise RuntimeError("stage 3 keeps parameters in shards: load_state_dict() within engine.whole()")

    def _before_forward(self, owner: nn.Module) -> None:
        if owner is self.module and not _in_backward():
            self._passes += 1
        self._arrive(owner)
        self._callers[owner].update(caller for caller in self._running if caller is not owner)
        self._running.append(owner)
        if not _in_backward():
            self._seen = [owner] if owner is self.module else [*self._seen, owner]
            at = len(self._seen)
            if self._order[:at] == self._seen and at < len(self._order):
                self._fetch(self._order[at])

    def _after_forward(self, owner: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if owner in self._running:
            self._running.remove(owner)
        if _in_backward():  # a recomputation: its backward follows
            return
        if torch.is_grad_enabled():
            self._watch(owner, (args, kwargs), output)
        if owner in self._running:
            return
        if owner is self.module:
            self._order = self._seen if output is not None else self._order
            self._leave_all()
        else:
            self._leave(owner)

    def _watch(self, owner: nn.Module, arguments: object, output: object) -> None:
        """The backward pass comes back through the output's tensors, but for those that were only handed on."""
        tensors, passed = list(tensors_in(output)), {id(leaf) for leaf in compat.tree_leaves(arguments)}
        if not tensors and (hidden := hides(output)) is not None:
            raise TypeError(
                f"{self._names[owner]} returns a {type(hidden).__name__}, in which stage 3 finds no tensors: return "
                "tensors, tuples, lists, dicts or dataclasses"
            )
        for tensor in tensors:
            if tensor.requires_grad and id(tensor) not in passed:
                tensor.register_hook(lambda _: self._before_backward(owner))

    def _begins(self) -> None:
        if not self._open:
            self._back = len(self._order)
        super()._begins()

    def _before_backward(self, owner: nn.Module) -> None:
        """The gradient of the owner's output is there: what it was computed from is needed next."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True is not supported by stage 3: its weights are gone when it is used")
        self._begins()
        if owner is not self.module and owner is not self._current:
            if self._current is not None and not self._nested(self._current, owner):
                self._leave(self._current)  # its backward has ended; frozen parameters are still here
            self._current = owner
        self._arrive(owner)
        if owner is not self.module:
            place = next((i for i in range(self._back - 1, 0, -1) if self._order[i] is owner), 0)
            self._back = place or self._back
        if self._back > 1:
            self._fetch(self._order[self._back - 1])

    def _nested(self, one: nn.Module, other: nn.Module) -> bool:
        """Whether one calls the other in its forward, so that its backward goes on after the other's."""
        return one in self._callers[other] or other in self._callers[one]

    def _send(self, unit: Unit) -> None:
        super()._send(unit)
        if not self._whole:
            unit.free()

    def _end_of_backward(self) -> None:
        super()._end_of_backward()
        self._current = None
        self._leave_all()

    def _fetch(self, owner: nn.Module) -> None:
        """Begins to gather an owner's parameters; the channel keeps the order that all ranks agree on."""
        if self._prefetch:
            self._send_for(owner)

    def _send_for(self, owner: nn.Module) -> None:
        for unit in self._units_of[owner]:
            if not unit.resident and unit.arriving is None:
                unit.arriving = self._channel.submit(unit.gather, self._now)

    def _arrive(self, owner: nn.Module) -> None:
        self._send_for(owner)
        for unit in self._units_of[owner]:
            unit.arrive()

    def _leave(self, owner: nn.Module) -> None:
        for unit in self._units_of[owner]:
            if not self._whole and (unit.resident or unit.arriving is not None):
                unit.free()

    def _leave_all(self) -> None:
        for owner in self._units_of:
            self._leave(owner)


class _Replaced:
    """A method that was replaced by one of the same name in the module's own dict; to undo it."""

    def __init__(self, module: nn.Module, name: str):
        self._module, self._name = module, name

    def remove(self) -> None:
        vars(self._module).pop(self._name, None)


def _engine_of(reference: "weakref.ref[Zero3]", owner: nn.Module) -> Zero3 | None:
    """None for a copy of a layer, which has the layer's hooks and parameters of its own."""
    engine = reference()
    return engine if engine is not None and owner in engine._units_of else None


def _in_backward() -> bool:
    return compat.in_backward()
