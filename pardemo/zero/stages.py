"""ZeRO-1 and ZeRO-2: every rank computes with whole parameters.

What a rank keeps of one unit, in elements (N: ranks; chunk: an N-th of the unit), and what it sends::

                 parameters   gradients        optimizer      in each backward pass      in step()
    Zero1        [N · chunk]  [N · chunk]      k · [chunk]                               reduce-scatter, all-gather
    Zero2        [N · chunk]  [chunk]          k · [chunk]    reduce-scatter, in buckets all-gather

In ``step()`` each rank updates its own chunk in fp32; the all-gather then brings the others' to it.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat
from pardemo.zero.engine import Engine
from pardemo.zero.gradient_norm import Tied
from pardemo.zero.gradients import OwnGradient
from pardemo.zero.in_backward import ReducesInBackward
from pardemo.zero.param_groups import MakeOptimizer
from pardemo.zero.unit import Unit


class Zero1(Engine):
    """P_os: optimizer states in shards. Bytes per rank 2Ψ + 2Ψ + KΨ/N; sends 2Ψ(N−1)/N per step.

    Gradients accumulate in ``.grad`` as in plain training, until :meth:`step` reduces them: micro-batches are free.
    Who looks at ``.grad`` before, as torch's ``clip_grad_norm_`` does, sees the mean, for one all-reduce more.

    Args:
        module: the model; all ranks start from rank 0's values, without gradients. Trained parameters are bf16 or
            fp32; some may be frozen or tied.
        optimizer: makes one from a list of fp32 parameters (this rank's shards): ``partial(torch.optim.AdamW, lr=…)``.
            It has to work element by element: each shard holds pieces of several parameters. It is called on two
            small samples first, to see whether it does.
        group: the ranks that share the states, the data-parallel ones; the default group when None.
        max_norm: clip gradients by their global norm: over the group, over the tensor-parallel group that the module's
            layers name, and over ``norm_over``.
        norm_over: the pipeline's group, where the module is one of its stages.
        tied: what the ``Pipeline`` was given: parameters of which other stages have a copy, and their holders. Stage 1
            only.
        param_groups: torch's own, over the module's parameters: ``[{"params": weights}, {"params": norms_and_biases,
            "weight_decay": 0.0}]``. The optimizer is then made from such a list, and
            ``engine.optimizer.param_groups`` has the settings (a schedule of the learning rate works).

    Raises:
        ValueError: nothing to train, another dtype (fp16 needs loss scaling, which is not here), a module whose engine
            was not closed, ranks with different models, ``max_norm`` not above 0, an optimizer that is not element by
            element, parameters in no group or in two, layers that are cut over the engine's own group.
    """

    stage = 1

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        tied: Sequence[Tied] = (),
        **options,
    ):
        self._tied = {parameter for parameter, _ in tied}
        self._own_gradients = False
        super().__init__(module, optimizer, group, tied=tied, **options)

    def _make_units(self) -> list[Unit]:
        parts = self.param_groups.split([p for p in self.module.parameters() if p.requires_grad])
        units = [Unit(f"unit {n}", part, self._channel, True, of) for n, (of, part) in enumerate(parts)]
        for unit in units:
            unit.sum = torch.zeros_like(unit.flat)  # [N · chunk]: micro-batches add to it
            unit.places = [self._place(*pair) for pair in zip(unit.parameters, unit.views(unit.sum), strict=True)]
        return units

    def _show_units(self) -> None:
        super()._show_units()
        for unit in self.units:
            _show(unit)
            for parameter, place in zip(unit.parameters, unit.places, strict=True):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._noting(place)))

    def average_gradients(self) -> None:
        """Makes ``.grad`` the mean of the ranks' gradients, if a rank has added to its own since. Collective."""
        if not self._own_gradients or self._updating:
            return
        self._own_gradients = False
        for unit in self.units:
            _adopt(unit)
            self.exchange(unit.sum, f"{unit.name}, gradients that are looked at").div_(self.size)

    def note_own_gradients(self) -> None:
        """``.grad`` is this rank's own from here on: something was added to it."""
        self._own_gradients = True

    def forward(self, *args, **kwargs):
        self._own_gradients |= torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def _place(self, parameter: nn.Parameter, view: torch.Tensor) -> torch.Tensor:
        """Where the parameter's gradient is. A tied one's is summed over the pipeline, and nobody else looks at it."""
        if parameter in self._tied:
            return view
        place = view.as_subclass(OwnGradient)
        place.engine = weakref.ref(self)
        return place

    def _noting(self, place: torch.Tensor) -> Callable[[nn.Parameter], None]:
        myself = weakref.ref(self)

        def is_accumulated(parameter: nn.Parameter) -> None:
            if (engine := myself()) is not None:
                engine.note_own_gradients()
            if parameter.grad is not place and type(place) is OwnGradient:
                _put(place, parameter.grad)
                parameter.grad = place
                if engine is not None:  # the module's zero_grad() has set the others to None, too
                    engine._show_unused()

        return is_accumulated

    def _show_unused(self) -> None:
        """A gradient of zero for each parameter that has none, as other ranks may have one: torch's
        ``clip_grad_norm_`` passes over what is None, and the ranks would take the norms of different models."""
        for unit in self.units:
            for parameter, place in zip(unit.parameters, unit.places, strict=True):
                if parameter.grad is None and type(place) is OwnGradient:
                    _put(place, None)
                    parameter.grad = place

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        for unit in self.units:
            unit.sum.zero_()
            _show(unit)
        self._own_gradients = False

    def _finish_gradients(self) -> None:
        for unit in self.units:
            _adopt(unit)
            unit.reduce(unit.sum, f"step {self._steps}")  # [N · chunk] to [chunk]
            unit.sum.zero_()
        self._own_gradients = False


def _show(unit: Unit) -> None:
    """Gradients accumulate in the flat tensor that will be reduced."""
    for parameter, place in zip(unit.parameters, unit.places, strict=True):
        parameter.grad = place


def _adopt(unit: Unit) -> None:
    """What somebody set anew, such as the module's own ``zero_grad()``, goes where gradients are reduced."""
    for parameter, place in zip(unit.parameters, unit.places, strict=True):
        if parameter.grad is not place:
            _put(place, parameter.grad)
            parameter.grad = place


def _put(place: torch.Tensor, gradient: torch.Tensor | None) -> None:
    with torch.no_grad(), compat.without_functions():  # as it is: nobody looks at it
        place.zero_() if gradient is None else place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)


class Zero2(ReducesInBackward):
    """P_os+g: gradients in shards, too. Bytes per rank 2Ψ + (2+K)Ψ/N; sends (m+1)Ψ(N−1)/N for m micro-batches a step.

    When ``backward()`` returns, the sum is in shards, and ``.grad`` is a tensor without memory, by which
    torch's functions clip, scale and discard it. A parameter without a gradient counts as zero.

    Args:
        bucket_bytes: gradients of so many bytes are packed and reduced at a time. The others as :class:`Zero1`.
    """

    stage = 2

    def __init__(
        self,
        module: nn.Module,
        optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = 8 << 20,
        **options,
    ):
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be above 0, not {bucket_bytes}")
        self._bucket_bytes, self.cut = bucket_bytes, f", buckets of {bucket_bytes} B"
        super().__init__(module, optimizer, group, **options)

    def _make_units(self) -> list[Unit]:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        parts = self.param_groups.split(trained, self._bucket_bytes)
        return [Unit(f"unit {n}", part, self._channel, True, of) for n, (of, part) in enumerate(parts)]
