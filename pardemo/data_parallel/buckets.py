"""Parameters packed into flat tensors: what data parallelism and ZeRO exchange at a time.

A bucket of three parameters, as it is all-reduced. The flags are summed with it: 0 means that no rank used the
parameter, so that its gradient stays None::

    flat   [ gradient of c | gradient of b | gradient of a | 1 1 0 ]      [Σ numel + parameters]
             divided by N, in the order of the backward pass  flags
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn


def split_into_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: float = math.inf) -> list[list[nn.Parameter]]:
    """Parameters in reverse order, about that in which backward produces gradients, cut into buckets of one dtype and
    device each. A bucket is closed when it has reached ``bucket_bytes``."""
    buckets: list[list[nn.Parameter]] = []
    room = 0.0
    for parameter in reversed(parameters):
        same = buckets and (buckets[-1][0].dtype, buckets[-1][0].device) == (parameter.dtype, parameter.device)
        if room <= 0 or not same:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(parameter)
        room -= parameter.numel() * parameter.element_size()
    return buckets


class Bucket:
    """Gradients of some parameters in one flat tensor, followed by one flag for each: did it take part?"""

    def __init__(self, parameters: list[nn.Parameter]):
        sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes) + len(parameters))  # [Σ numel + parameters]
        self.flags = self.flat[sum(sizes) :]  # [parameters]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.views = {
            p: _view_like(self.flat[at : at + p.numel()], p) for p, at in zip(parameters, offsets, strict=True)
        }
        self._index = {p: i for i, p in enumerate(parameters)}
        self.taken: set[nn.Parameter] = set()
        #: of a tensor-parallel part, what makes a tensor its gradient
        self._kinds: dict[nn.Parameter, Callable[[torch.Tensor], torch.Tensor]] = {}

    @property
    def full(self) -> bool:
        return len(self.taken) == len(self.views)

    def take(self, parameter: nn.Parameter, ranks: int) -> None:
        """Moves a gradient in, divided by N already: the sum of the ranks' is then the mean, and cannot overflow.

        A second gradient in the same pass (a layer in two re-entrant checkpoints) is added to the first.
        """
        view = self.views[parameter]
        assert parameter.grad is not None, "autograd has just added to it"
        if parameter in self.taken:
            view.add_(parameter.grad.detach().div_(ranks))
        else:
            torch.div(parameter.grad.detach(), ranks, out=view)
        if hasattr(parameter.grad, "same_kind"):
            self._kinds[parameter] = parameter.grad.same_kind()
        parameter.grad = None
        self.taken.add(parameter)
        self.flags[self._index[parameter]] = 1

    def fill_gaps(self, ranks: int) -> None:
        """Parameters without a new gradient: what accumulated before under ``no_sync`` is sent, else zero."""
        for parameter, view in self.views.items():
            if parameter in self.taken:
                continue
            if parameter.grad is None:
                view.zero_()
                self.flags[self._index[parameter]] = 0
            else:
                self.take(parameter, ranks)

    def clear(self) -> None:
        """All zero: what a rank sends that has no data left."""
        self.flat.zero_()
        self.taken.clear()

    def hand_out(self) -> None:
        for (parameter, view), used in zip(self.views.items(), self.flags.tolist(), strict=True):
            if used:
                parameter.grad = self._kinds[parameter](view) if parameter in self._kinds else view
        self.taken.clear()


def _view_like(flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A view of ``flat`` with the parameter's shape, and its strides where it is dense (channels-last weights)."""
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter.data):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride())
