"""Proves an engine in Python: :func:`prove` trains a model in each layout on the same global batches."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from pardemo.script.compare import run_layouts, runs
from pardemo.script.compare.proof import compare_layouts
from pardemo.script.compare.results import Proof
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.words import count_text

#: Makes an optimizer of the parameters that a rank has.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
#: Its step is a multiple of the gradient, so that no factor of a gradient is lost in it; the momentum is a state. One
#: tensor at a time, since plain parameters may stand beside DTensors.
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=False)


@dataclass
class Parallel:
    """A model as it runs on this rank, and the engine's methods that replace lines of the training loop.

    Args:
        module: the model, called with a micro-batch; or what has this rank's parameters, where ``train`` calls it.
        train: forward and backward of this rank's part of a global batch, all its micro-batches: a pipeline's step.
        synchronize: what is left to be summed, called behind the last micro-batch's backward pass.
        step: the step of the engine's own optimizer, as ``lambda: engine.step()``.
        backward: the engine's own backward pass of a micro-batch's loss, which the engine divides by the number of
            micro-batches; ``step`` is then called behind each of them. DeepSpeed's.
    """

    module: nn.Module
    train: Callable[[Any], Any] | None = None
    synchronize: Callable[[], Any] | None = None
    step: Callable[[], Any] | None = None
    backward: Callable[[torch.Tensor], Any] | None = None


def prove(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    batches: Sequence[Any],
    parallelize: Callable[[nn.Module, RunLayout], Any] | None = None,
    layouts: Sequence[Mapping[str, Any] | str] = ("ranks=1", "ranks=2"),
    *,
    optimizer: MakeOptimizer = SGD,
    shard: Callable[[Any, RunLayout, int], Any] | None = None,
    double: bool = True,
    steps: int | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> Proof:
    """Trains a model in each layout on the same global batches, and compares all with the first layout.

    >>> def parallelize(model, layout):                                             # doctest: +SKIP
    ...     return torch.nn.parallel.DistributedDataParallel(model)
    >>> prove(build, loss, batches, parallelize, ["ranks=1", "ranks=4 accumulate=2"]).equal    # doctest: +SKIP
    True

    Args:
        build: makes the whole model, on each rank from the same seed.
        loss: (model, micro-batch) to its **mean** loss, one number.
        batches: global batches, one for each step: a tensor, or a tuple, list or dict of tensors, whose first axis is
            that of the samples.
        parallelize: (model, layout) to the model as it runs on the rank that calls it: a module; None for the model
            itself, changed in place; an engine with a ``step`` of its own, as ZeRO's, and perhaps a ``backward``, as
            DeepSpeed's; or :class:`Parallel`. The process group is there. It is not called for a reference of one
            rank, which trains the model as it was built. Where it is None, each rank does so.
        layouts: as ``"ranks=4 tp=2 accumulate=2"`` or ``{"ranks": 4, "tp": 2, "accumulate": 2}``; the first is the
            reference. They may say whatever ``parallelize`` reads from ``layout.values``.
        optimizer: makes one of the parameters that the rank has, where the engine has none; by default SGD with
            momentum.
        shard: (global batch, layout, rank) to the rank's part. By default ranks that share a model, tp · cp · pp of
            them in a row, get the same samples, and each such group the next ones.
        double: in fp64, so that a difference is a difference. An engine that refuses it needs ``False``.
        steps: how many; one for each batch by default.
        seed: of ``build``. Each group of ranks that share a model then draws from a seed of its own.
        timeout_s: for each layout.

    Raises:
        ValueError: a batch that does not divide into a layout's ranks and micro-batches, or no batches.
        ProveError: the reference could not be run, or is not the same twice.
    """
    parsed = run_layouts.for_function(layouts)
    steps = len(batches) if steps is None else steps
    if not 1 <= steps <= len(batches):
        raise ValueError(f"{steps} steps need as many batches, and there are {len(batches)}")
    if shard is None:
        for number, batch in enumerate(batches):
            for layout in parsed:
                _check_batch(batch, number, layout)
    plain = parsed[0] if parsed[0].ranks == 1 else None
    training = Training(
        build, loss, list(batches[:steps]), parallelize, plain, optimizer, shard or part, double=double, seed=seed
    )
    options = runs.RunOptions(
        steps=steps, double=double, timeout_s=timeout_s, function=lambda layout: partial(training.train, layout)
    )
    return compare_layouts(parsed, options)


def part(batch: Any, layout: RunLayout, rank: int) -> Any:
    """Returns a rank's samples of a global batch: those of its place among the data-parallel ranks."""
    groups = layout.size("dp")
    return _equal_part(batch, rank // (layout.ranks // groups), groups)


def _check_batch(batch: Any, number: int, layout: RunLayout) -> None:
    sizes: set[int] = set()

    def note_size(tensor: torch.Tensor) -> torch.Tensor:
        sizes.update(tensor.shape[:1])
        return tensor

    _map_tensors(batch, note_size)
    if len(sizes) != 1:
        contents = f"tensors of {sorted(sizes)} samples" if sizes else "no tensor with an axis of samples"
        raise ValueError(f"batch {number + 1} has {contents}")
    groups, parts, samples = layout.size("dp"), layout.size("accumulate"), sizes.pop()
    if samples % (groups * parts):
        raise ValueError(
            f"{layout.name}: {samples} samples of batch {number + 1} do not divide into {groups} data-parallel ranks "
            f"and {count_text(parts, 'micro-batch')}"
        )


@dataclass(frozen=True)
class Training:
    """A training loop that ranks run in any layout; what it is made of as of :func:`prove`."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batches: Sequence[Any]
    parallelize: Callable[[nn.Module, RunLayout], Any] | None
    #: a layout in which the model is trained as it was built
    plain: RunLayout | None
    optimizer: MakeOptimizer
    shard: Callable[[Any, RunLayout, int], Any]
    double: bool
    seed: int

    def train(self, layout: RunLayout) -> None:
        """Runs the training loop on a rank."""
        dist.init_process_group("gloo")
        rank, count = dist.get_rank(), layout.size("accumulate")
        engine = self._engine(layout, rank)
        built = None if engine.step else self.optimizer([p for p in engine.module.parameters() if p.requires_grad])
        step: Any = engine.step if built is None else built.step
        for batch in self.batches:
            samples = self.shard(_to_double(batch) if self.double else batch, layout, rank)
            if engine.train is not None:
                engine.train(samples)
            else:
                for number in range(count):
                    value = self.loss(engine.module, _equal_part(samples, number, count))
                    if engine.backward is not None:
                        engine.backward(value)
                        step()
                    else:
                        (value / count).backward()
            if engine.backward is None:
                if engine.synchronize is not None:
                    engine.synchronize()
                step()
                (built or engine.module).zero_grad()

    def _engine(self, layout: RunLayout, rank: int) -> Parallel:
        """Builds the model and makes it parallel; each group of ranks that share it then draws from its own seed."""
        _seed(self.seed)
        model = self.build()
        model = model.double() if self.double else model
        _seed(self.seed + 1 + rank // (layout.ranks // layout.size("dp")))
        given = None if self.parallelize is None or layout == self.plain else self.parallelize(model, layout)
        return _as_parallel(model if given is None else given)


def _as_parallel(returned: Any) -> Parallel:
    """Reads what ``parallelize`` returned: a module, or an engine."""
    if isinstance(returned, Parallel):
        return returned
    if not isinstance(returned, nn.Module):
        raise TypeError(
            f"parallelize returned {type(returned).__name__}: it has to return a module, an engine that is one, or "
            "Parallel"
        )
    return Parallel(returned, step=_late_method(returned, "step"), backward=_late_method(returned, "backward"))


def _late_method(owner: Any, name: str) -> Callable | None:
    """Looks a method up when it is called: an engine's is followed from the model's first forward pass on."""
    return (lambda *args: getattr(owner, name)(*args)) if callable(getattr(owner, name, None)) else None


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the batch with each of its tensors changed and all else kept."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)([_map_tensors(value, change) for value in batch])
    return batch


def _equal_part(batch: Any, number: int, count: int) -> Any:
    """One of so many equal parts of all samples; a number without an axis of samples is in each."""
    if count == 1:
        return batch
    return _map_tensors(
        batch, lambda t: t[number * (len(t) // count) : (number + 1) * (len(t) // count)] if t.dim() else t
    )


def _to_double(batch: Any) -> Any:
    return _map_tensors(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
