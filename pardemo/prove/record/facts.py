"""What is recorded of a run: per rank and optimizer step, and of the whole run. Tensors lie in files beside it."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that a rank holds.

    ``name``: without wrappers. ``shape``: of the part. ``whole``: of the parameter, where the framework says it.
    ``start``: of a box within the whole, an index for each axis; ``flat``: of a range of its elements in order. With
    neither the part may be the whole, or a cut that its shape or its values have to tell. ``tied``: other names.
    """

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    flat: int | None = None
    tied: tuple[str, ...] = ()
    trained: bool = True


@dataclass(frozen=True)
class ModuleCall:
    """A module's forward: its name, class, micro-batch and how often it ran in it before. ``key``: of its tensors."""

    module: str
    kind: str
    micro_batch: int
    number: int
    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Mask:
    """A draw of dropout: where, of which probability, hashes of its input and of what was dropped."""

    module: str
    line: str
    probability: float
    input: str
    dropped: str
    elements: int
    repeated: bool


@dataclass
class LossCall:
    """A loss function's call: how many targets it was given, how many it ignored, by what it was reduced."""

    function: str
    targets: int
    ignored: int
    reduction: str
    value: float | None
    line: str
    micro_batch: int


@dataclass
class MicroBatch:
    """One forward pass of the model for training: hashes of its samples, and of each token of them in ``key``.

    ``unseen``: what the model was called with, where nothing of it could be hashed. ``activations``: they are no
    samples, but what an earlier stage of a pipeline has made of them, which wants a gradient back.
    """

    samples: list[str]
    key: str
    names: list[str]
    unseen: list[str] = field(default_factory=list)
    activations: bool = False


@dataclass
class Clip:
    """A call of a function that clips: the norm that it found, and the limit."""

    norm: float
    limit: float
    line: str


@dataclass
class Step:
    """What one rank recorded between two steps of the optimizer. Tensors are in ``file``, by kind and name.

    ``scales``: by which a GradScaler has multiplied losses, of each step that it took or skipped. ``skipped``: how many
    it skipped just before; what was recorded of these is not kept. Of runs that may be stopped: ``saved``, whether
    files have changed since the step before; ``saves``, seconds of each save; ``asynchronous``, whether any so far was
    made by another thread than the script's; ``generators``, by name, hashes of where random numbers were when its
    first forward pass began. ``cleared``: by parameter, the line that cleared its gradient behind a backward
    pass and before the step.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    loss_calls: list[LossCall] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    printed: list[float] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    no_gradient: list[str] = field(default_factory=list)
    backwards: int = 0
    file: str = ""
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    saved: bool = False
    saves: list[float] = field(default_factory=list)
    asynchronous: bool = False
    generators: dict[str, str] = field(default_factory=dict)
    cleared: dict[str, str] = field(default_factory=dict)


@dataclass
class Record:
    """What one rank recorded of a run. ``owners``: of each parameter the module that has it, in the order of execution.

    ``unseeded``: lines that drew random numbers from a generator that nobody had seeded. ``dtype``: the parameters'.
    ``line``: where the model is first called. ``alone``: whether the script made no group of processes, or called no
    collective. ``computed_in``: types of what modules returned.
    """

    rank: int
    ended: str
    steps: list[Step]
    parallelisms: list[Any]
    notes: list[str]
    unseeded: list[str]
    dtypes: list[str]
    optimizer: str = ""
    batch_norms: list[str] = field(default_factory=list)
    alone: bool = False
    computed_in: list[str] = field(default_factory=list)


Tensors = dict[str, torch.Tensor]
