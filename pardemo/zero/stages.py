"""ZeRO-1 and ZeRO-2: every rank computes with whole parameters."""

import torch
import torch.distributed as dist
from torch import nn

from pardemo.buckets import split_into_buckets
from pardemo.zero.engine import Engine, MakeOptimizer, ReducesInBackward
from pardemo.zero.unit import Unit


class Zero1(Engine):
    """P_os: optimizer states in shards. Bytes per rank 2Ψ + 2Ψ + KΨ/N; sends 2Ψ(N−1)/N per step.

    Gradients accumulate in ``.grad`` as in plain training, until :meth:`step` reduces them: micro-batches are free.

    Args:
        module: the model; all ranks start from rank 0's values. Trained parameters are bf16 or fp32; some may be
            frozen or tied.
        optimizer: makes one from a list of fp32 parameters (this rank's shards): ``partial(torch.optim.AdamW, lr=…)``.
            It has to work element by element: each shard holds pieces of several parameters.
        group: the ranks that share the states; the default group when None.
        max_norm: clip gradients by their global norm.

    Raises:
        ValueError: nothing to train, another dtype (fp16 needs loss scaling, which is not here), a module whose engine
            was not closed, ``max_norm`` not above 0.
    """

    stage = 1

    def _make_units(self) -> list[Unit]:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        units = [Unit(part, self.group, keep_whole=True) for part in split_into_buckets(trained)]
        for unit in units:
            unit.sum = torch.zeros_like(unit.flat)
            unit.places = unit.views(unit.sum)
            _show(unit)
        return units

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        for unit in self.units:
            unit.sum.zero_()
            _show(unit)

    def _finish_gradients(self) -> None:
        for unit in self.units:
            for parameter, place in zip(unit.parameters, unit.places, strict=True):
                if parameter.grad is not place:  # somebody set it anew, such as the module's own zero_grad()
                    place.zero_() if parameter.grad is None else place.copy_(parameter.grad)
            unit.reduce(unit.sum)
            unit.sum.zero_()
            _show(unit)


def _show(unit: Unit) -> None:
    """Gradients accumulate in the flat tensor that will be reduced."""
    for parameter, place in zip(unit.parameters, unit.places, strict=True):
        parameter.grad = place


class Zero2(ReducesInBackward):
    """P_os+g: gradients in shards, too. Bytes per rank 2Ψ + (2+K)Ψ/N; sends (m+1)Ψ(N−1)/N for m micro-batches a step.

    ``.grad`` is empty when ``backward()`` returns: the sum is in shards. A parameter without a gradient counts as zero.

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
        max_norm: float | None = None,
        bucket_bytes: int = 8 << 20,
    ):
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be above 0, not {bucket_bytes}")
        self._bucket_bytes = bucket_bytes
        super().__init__(module, optimizer, group, max_norm=max_norm)

    def _make_units(self) -> list[Unit]:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return [Unit(part, self.group, True) for part in split_into_buckets(trained, self._bucket_bytes)]
