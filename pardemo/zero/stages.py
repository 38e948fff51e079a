"""ZeRO-1 and ZeRO-2: every rank computes with whole parameters.

What a rank keeps of one unit, in elements (N: ranks; chunk: an N-th of the unit), and what it sends::

                 parameters   gradients        optimizer      in each backward pass      in step()
    Zero1        [N · chunk]  [N · chunk]      k · [chunk]                               reduce-scatter, all-gather
    Zero2        [N · chunk]  [chunk]          k · [chunk]    reduce-scatter             all-gather

In ``step()`` each rank updates its own chunk in fp32; the all-gather then brings the others' to it. Units are reduced
strictly in one order, whichever is complete first, so that all ranks agree without a word; at most two are on their
way at a time, so that gradients do not pile up before a slow link::

    backward of Zero2   | unit 3: p9 p8 p7 | unit 2: p6 p5 p4 | unit 1: p3 p2 p1 |
    channel                                | reduce-scatter 3 | reduce-scatter 2 | reduce-scatter 1 |
    kept                  .grad of unit 3    [chunk] of 3       + [chunk] of 2     + [chunk] of 1
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.argument_checks import above_zero
from pardemo.collectives.decorators import not_compiled
from pardemo.zero.checks import check_elementwise, same_outcome
from pardemo.zero.engine import Engine, SavedShard, broadcast
from pardemo.zero.gradients import OwnGradient, no_gradient
from pardemo.zero.param_groups import MakeOptimizer, ParamGroups
from pardemo.zero.unit import Unit, make_units


class Zero1(Engine):
    """P_os: optimizer states in shards. Bytes per rank 2Ψ + 2Ψ + KΨ/N; sends 2Ψ(N−1)/N per step.

    Gradients accumulate in ``.grad`` as in plain training, until :meth:`step` reduces them: micro-batches are free.
    Until then they are this rank's own, and refuse to be computed with (:class:`OwnGradient`).

    Args:
        module: the model; all ranks start from rank 0's values, without gradients. Trained parameters are bf16 or
            fp32; some may be frozen or tied.
        optimizer: makes one from a list of fp32 parameters (this rank's shards): ``partial(torch.optim.AdamW, lr=…)``.
            It has to work element by element: each shard holds pieces of several parameters. It is called on two
            small samples first, to see whether it does.
        group: the ranks that share the states, the data-parallel ones; the default group when None.
        max_norm: clip gradients by their global norm: over the group, over the tensor-parallel group that the module's
            layers name, and over ``pipeline_group``.
        pipeline_group: the pipeline's group, where the module is one of its stages.
        tied: what the ``Pipeline`` was given: parameters of which other stages have a copy, and their holders. Stage 1
            only.
        param_groups: torch's own, over the module's parameters: ``[{"params": weights}, {"params": norms_and_biases,
            "weight_decay": 0.0}]``. The optimizer is then made from such a list, and
            ``engine.optimizer.param_groups`` has the settings.
        bucket_bytes: gradients of so many bytes are packed and reduced at a time.

    Raises:
        ValueError: nothing to train, another dtype (fp16 needs loss scaling, which is not here), a module whose engine
            was not closed, ranks with different models, ``max_norm`` or ``bucket_bytes`` not above 0, an optimizer
            that is not element by element, parameters in no group or in two, layers that are cut over the engine's own
            group.
    """

    stage = 1

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = 8 << 20,
        **options,
    ):
        above_zero(bucket_bytes, "bucket_bytes")
        self._bucket_bytes, self._extra_label = bucket_bytes, f", buckets of {bucket_bytes} B"
        self._tied = {parameter for parameter, _ in options.get("tied", ())}
        self._sending: deque[Future] = deque()
        self._hooks: list = []
        self.units: list[Unit]
        super().__init__(module, optimizer, group, **options)

    def close(self) -> None:
        """Removes all hooks and gradients from the module. The engine cannot be used after it."""
        if self._closed:
            return
        super().close()
        for hook in self._hooks:
            hook.remove()
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = None
        self.units = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        for unit in self.units:
            unit.gradient = None

    def update_masters(self) -> None:
        """Copies values that were written into the parameters to the masters. Sends nothing."""
        with torch.no_grad():
            for unit in self.units:
                unit.update_master()

    def check_usable(self) -> None:
        super().check_usable()
        if not all(unit.shows() for unit in self.units):
            raise RuntimeError("parameters were moved after the engine was made (.data, half(), …): close() it before")

    def state_bytes(self) -> dict[str, int]:
        kinds = super().state_bytes()
        gradients = [unit.gradient for unit in self.units if unit.gradient is not None]
        masters = [unit.master for unit in self.units if unit.master.data_ptr() != unit.shard.data_ptr()]
        kinds["gradients"] += sum(gradient.nbytes for gradient in gradients)
        kinds["optimizer states"] += sum(master.nbytes for master in masters)
        return kinds

    def shards(self) -> dict[str, SavedShard]:
        self.update_masters()
        names = {p: name for name, p in self.module.named_parameters()}
        saved = {}
        for unit in self.units:
            unit_facts = [[names[p] for p in unit.parameters], unit.group_index, str(unit.flat.dtype), unit.numel]
            saved[unit.name] = SavedShard(unit.master, partial(unit.as_dtensor, mesh=self.mesh), unit_facts)
        return saved

    def replicated(self) -> dict[str, torch.Tensor]:
        frozen = {name: p.detach() for name, p in self.module.named_parameters() if not p.requires_grad}
        return frozen | super().replicated()

    def after_load(self) -> None:
        with torch.no_grad():
            for unit in self.units:
                unit.gather(f"loaded, {self.now}")

    def _make_shards(self, optimizer: MakeOptimizer, groups: ParamGroups) -> None:
        with same_outcome(self.group):
            check_elementwise(optimizer, groups, self.device)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        with torch.no_grad():
            self.units = make_units(trained, groups, self._bucket_bytes, self.channel)
        self._make_optimizer(optimizer, groups, [(unit.group_index, unit.master) for unit in self.units])
        self._guard_optimizer()
        self._hide_masters()
        # nothing is refused from here on: up to now the module is as it was
        in_units = set(trained)
        broadcast([p for p in self.module.parameters() if p not in in_units], self.group)
        broadcast(self.module.buffers(), self.group)
        super().zero_grad()
        for number, unit in enumerate(self.units):
            unit.show()
            for parameter in unit.parameters:
                hook = self._call(type(self)._accumulated, number)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _call(self, method: Callable, *more: Any) -> Callable:
        """Makes a hook that calls a method while the engine exists; the hook itself does not keep it alive."""
        myself = weakref.ref(self)

        def hook(value: Any) -> None:
            if (engine := myself()) is not None:
                method(engine, *more, value)

        return hook

    def _guard_optimizer(self) -> None:
        """Makes the optimizer refuse to save or load its states, which are one rank's, and share ``zero_grad()``."""

        def states(engine: Zero1, *_: Any) -> None:
            raise RuntimeError(
                "the optimizer's states are this rank's shards: pardemo.zero.save and load keep and read all ranks'"
            )

        refuse, discard = self._call(states), self._call(type(self).zero_grad)
        self.optimizer.register_state_dict_pre_hook(refuse)
        self.optimizer.register_load_state_dict_pre_hook(lambda optimizer, _: refuse(optimizer))
        setattr(self.optimizer, "zero_grad", lambda set_to_none=True: discard(set_to_none))  # noqa: B010

    def _hide_masters(self) -> None:
        """Gives the masters gradients that raise an error when somebody clips them between two steps."""
        for unit in self.units:
            unit.master.grad = no_gradient(unit.master)

    def _accumulated(self, number: int, parameter: nn.Parameter) -> None:
        """Marks a new gradient as this rank's own; a tied parameter's is the pipeline's until its sum is there."""
        if parameter not in self._tied:
            gradient = parameter.grad
            if type(gradient) is not OwnGradient and gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                parameter.grad = dense.as_subclass(OwnGradient)

    def _send(self, unit: Unit) -> None:
        """Packs and reduces a unit's gradients; no third one is packed before the first has arrived."""
        if len(self._sending) >= 2:
            self._sending.popleft().result()
        self._sending.append(self.channel.submit(unit.reduce, unit.pack_gradients(), self.now))

    def _wait(self) -> None:
        while self._sending:
            self._sending.popleft().result()

    def _finish_gradients(self) -> None:
        self.update_masters()
        for unit in self.units:
            self._send(unit)
        self._wait()

    def _gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, int]]:
        for unit in self.units:
            if unit.gradient is not None:
                yield from unit.pieces(unit.gradient)

    def _global_norm(self) -> float:
        return super()._global_norm() / self.size  # units have the sum

    def _update(self, factor: float) -> None:
        updated = [unit for unit in self.units if unit.gradient is not None]
        for unit in self.units:
            gradient, unit.gradient = unit.gradient, None
            unit.master.grad = None if gradient is None else gradient.float().mul_(factor / self.size)
        self._step_optimizer()
        self._hide_masters()
        with torch.no_grad():
            for gathered in [self.channel.submit(unit.gather, self.now) for unit in updated]:
                gathered.result()
        # a backward pass through a forward pass of before is refused by torch itself
        torch.autograd.graph.increment_version([p for unit in updated for p in unit.parameters])


class Zero2(Zero1):
    """P_os+g: gradients in shards, too. Bytes per rank 2Ψ + (2+K)Ψ/N; sends (m+1)Ψ(N−1)/N for m micro-batches a step.

    A unit's gradients are packed, freed, and reduced while the backward pass goes on. When ``backward()`` returns, the
    sum is in shards, and ``.grad`` a tensor without memory that refuses to be computed with (:class:`OwnGradient`).

    Args: as for :class:`Zero1`, but for ``tied``.
    """

    stage = 2

    def _make_shards(self, optimizer: MakeOptimizer, groups: ParamGroups) -> None:
        super()._make_shards(optimizer, groups)
        self._in_backward = False  # begun and not ended: it failed, if the next forward pass begins
        self._ready: dict[Unit, set[nn.Parameter]] = {}  # whose gradients are there
        self._shown: dict[nn.Parameter, torch.Tensor] = {}
        for unit in self.units:
            for parameter in unit.parameters:
                self._hooks.append(parameter.register_hook(self._call(type(self)._begin_backward)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for future in self._sending:
            future.exception()
        self._sending.clear()
        self._in_backward, self._shown = False, {}
        super().zero_grad()

    def check_usable(self) -> None:
        super().check_usable()
        if self._in_backward:
            raise RuntimeError("the last backward pass failed: call zero_grad() to discard what it left")
        if any(parameter.grad is not shown for parameter, shown in self._shown.items()):
            raise RuntimeError("gradients in shards are discarded by engine.zero_grad(), and set by backward() alone")

    @not_compiled
    def _watch(self, output: Any) -> None:
        for tensor in compat.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._call(type(self)._begin_backward))

    def _begin_backward(self, _: torch.Tensor) -> None:
        """Begins a pass at its first call, before any backward pass within it, as of re-entrant checkpoints."""
        if not self._in_backward:
            self._in_backward = True
            self._passes += 1
            self._ready = {unit: set() for unit in self.units}
            for parameter in self._shown:
                parameter.grad = None
            self._shown = {}
            compat.after_backward(self._end_of_backward)

    def _accumulated(self, number: int, parameter: nn.Parameter) -> None:
        if (unit := self.units[number]) in self._ready:
            self._ready[unit].add(parameter)
        while self._ready and len(self._ready[first := next(iter(self._ready))]) == len(first.parameters):
            self._send_first(first)

    def _send_first(self, unit: Unit) -> None:
        del self._ready[unit]
        self._send(unit)

    def _end_of_backward(self) -> None:
        for unit in list(self._ready):  # what parameters without a gradient left incomplete
            self._send_first(unit)
        for unit in self.units:  # a layer that is used twice under re-entrant checkpoints has a gradient of each use
            if any(parameter.grad is not None for parameter in unit.parameters):
                self._send(unit)
        self._wait()
        self._in_backward = False
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = self._shown[parameter] = no_gradient(parameter)

    def _finish_gradients(self) -> None:
        self.update_masters()
        for parameter in self._shown:
            parameter.grad = None
        self._shown = {}
