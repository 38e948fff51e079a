"""Describes a run's record by rank and optimizer step: samples, outputs, parameters, their hashes and sketches."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class ParameterShard:
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
    """A draw of dropout: where, hashes of its input and of what was dropped."""

    module: str
    line: str
    input: str
    dropped: str
    elements: int
    repeated: bool


@dataclass
class LossCall:
    """A loss function's call in a micro-batch: how many targets it was given, and how many of them it ignored."""

    targets: int
    ignored: int
    micro_batch: int


@dataclass
class MicroBatch:
    """One forward pass of the model for training: hashes of its samples, and the names of its inputs.

    ``unseen``: what the model was called with, where nothing of it could be hashed. ``activations``: they are no
    samples, but what an earlier stage of a pipeline has made of them, which wants a gradient back.
    """

    samples: list[str]
    names: list[str]
    unseen: list[str] = field(default_factory=list)
    activations: bool = False


#: What a step does, each at a line of the script: it calls the model, goes backward, clips, steps, prints the loss.
FORWARD, BACKWARD, CLIP, STEP, PRINT = "forward", "backward", "clip", "step", "print"


def called(module: str) -> str:
    """Returns the name under which a step keeps the line that calls a module."""
    return f"{FORWARD}:{module}"


@dataclass
class Step:
    """One rank's record of what is between two steps of the optimizer. Tensors are in ``file``, by kind and name.

    ``scales``: by which a GradScaler has multiplied losses, of each step that it took or skipped. ``skipped``: how many
    it skipped just before; what was recorded of these is not kept. Of runs that may be stopped: ``saved``, whether
    files have changed since the step before; ``saves``, seconds of each save; ``asynchronous``, whether any so far was
    made by another thread than the script's; ``generators``, by name, hashes of where random numbers were when its
    first forward pass began. ``cleared``: by parameter, the line that cleared its gradient behind a backward
    pass and before the step. ``draws``: by line, hashes of what the script drew from torch's own generator.
    ``lines``: of what the step does (:data:`FORWARD`, … and :func:`called` of a module) the line of the script that did
    it first, as ``/home/me/train.py:31``.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    loss_calls: list[LossCall] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    clips: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    printed: list[float] = field(default_factory=list)
    pieces: list[ParameterShard] = field(default_factory=list)
    backwards: int = 0
    file: str = ""
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    saved: bool = False
    saves: list[float] = field(default_factory=list)
    asynchronous: bool = False
    generators: dict[str, str] = field(default_factory=dict)
    cleared: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    draws: dict[str, str] = field(default_factory=dict)


@dataclass
class ReplayReport:
    """Reports which inputs of a rank's step were replayed. Places are the script's line and the operation there.

    Args:
        replayed: micro-batches that got recorded inputs.
        already_recorded: micro-batches that kept their samples, as these were recorded ones.
        other_rows: of the latter, those with other rows than a replay gives the rank.
        loss_inputs: places of the loss's tensors that were replaced.
        draws: places of random numbers that were replaced.
        routes: by router, how many rows were sent elsewhere, and how many rows there were.
        not_replayed: places of random numbers and routes that were not replaced.
        without_counterpart: what the loss reads of replaced samples, and that was not recorded.
        differing: places of the loss's tensors that differ though the samples do not, and by how much.
    """

    replayed: int = 0
    already_recorded: int = 0
    other_rows: int = 0
    loss_inputs: set[str] = field(default_factory=set)
    draws: set[str] = field(default_factory=set)
    routes: dict[str, tuple[int, int]] = field(default_factory=dict)
    not_replayed: dict[str, str] = field(default_factory=dict)
    without_counterpart: dict[str, str] = field(default_factory=dict)
    differing: dict[str, str] = field(default_factory=dict)


@dataclass
class RankRecord:
    """One rank's record of a run.

    ``ended``: ``end`` of the script, or ``enough`` steps. ``unseeded``: lines that drew random numbers from a generator
    that nobody had seeded. ``dtypes``: the parameters'. ``optimizer``: names of its class and of those that it is made
    of. ``alone``: whether the script made no group of processes, or called no collective. ``computed_in``: types of
    what modules returned. ``replays``: what was replayed in each step, with recorded inputs.
    """

    rank: int
    ended: str
    steps: list[Step]
    notes: list[str]
    unseeded: list[str]
    dtypes: list[str]
    optimizer: str = ""
    batch_norms: list[str] = field(default_factory=list)
    alone: bool = False
    computed_in: list[str] = field(default_factory=list)
    replays: list[ReplayReport] = field(default_factory=list)


Tensors = dict[str, torch.Tensor]


class CurrentStep:
    """The record of the step that runs, until it is written down, and how far its optimizers are."""

    def __init__(self) -> None:
        self.begin(Step())

    def begin(self, step: Step) -> None:
        """Begins a step of which nothing is recorded."""
        self.step = step
        self.tensors: Tensors = {}  # by kind and name
        self.runs: Counter[tuple[int, str]] = Counter()  # of micro-batch and module, how often it ran
        self.pending = False  # an optimizer has stepped, and the parameters are still to be written down
        self.stepped: set[int] = set()  # ids of the parameters that optimizers have stepped
        self.summed = False  # gradients were written down when they were clipped,
        self.clipped_after = 0  # and after how many backward passes
        self.accumulated_after = 0  # the backward passes after which gradients were last looked at within the step

    def note_line(self, event: str, find_line: Callable[[], str]) -> None:
        """Notes the script's line for what the step does, where it has none yet."""
        if event not in self.step.lines:
            self.step.lines[event] = find_line()


#: Edge of the block of which a sketch keeps one number, along each of a parameter's last two axes.
BLOCK = 16


def digest(tensor: torch.Tensor) -> str:
    """Returns a hash of a tensor's shape and bits, which is equal for equal tensors only."""
    plain = tensor.detach().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return hashlib.blake2b(raw, digest_size=12, person=str(tuple(plain.shape)).encode()[:16]).hexdigest()


@cache
def signs(elements: int, seed: int) -> torch.Tensor:
    """Makes random signs in fp64, the same on every rank and in every run. [elements]"""
    generator = torch.Generator(device="cpu").manual_seed(0x9E3779B9 + seed)
    drawn = torch.randint(0, 2, (elements,), generator=generator, device="cpu")
    return (drawn * 2 - 1).double()


def project_rows(output: torch.Tensor) -> torch.Tensor:
    """Computes two projections and the norm of each row of the last axis, fp64: [d0, d1, …, h] → [d0, d1, …, 3].

    An output without rows, [n] or a number, is kept as it is, [n, 1].
    """
    plain = output.detach().to(torch.float64)
    if plain.dim() < 2:
        return plain.reshape(-1, 1).clone()  # a wrapper gives what it wraps gives: files keep no memory twice
    width = plain.shape[-1]
    basis = torch.stack([signs(width, 0), signs(width, 1)], dim=1)  # [h, 2]
    return torch.cat([plain @ basis, plain.norm(dim=-1, keepdim=True)], dim=-1)


def token_hashes(batch: torch.Tensor) -> torch.Tensor:
    """A number for each token of a batch: [b, s] of whole numbers as they are, else a hash of each [b, s, …] → [b, s].

    A batch [b, h] of floating point has one token for each sample.
    """
    plain = batch.detach()
    if not plain.is_floating_point() and not plain.is_complex():
        # a copy: a batch may be trained on twice in a step, and files keep no memory twice
        return plain.to(torch.int64, copy=True).reshape(plain.shape[0] if plain.dim() else 1, -1)
    if plain.dim() < 3:
        plain = plain.reshape(plain.shape[0] if plain.dim() else 1, 1, -1)
    elif plain.dim() > 3:
        plain = plain.flatten(2)
    rows = plain.to(torch.float64).contiguous().view(torch.int64)
    weights = torch.arange(1, rows.shape[-1] + 1, dtype=torch.int64) * 0x9E3779B97F4A7C1 + 1
    return (rows.bitwise_xor(rows >> 29) * weights).sum(-1)  # whole numbers overflow, and are the same everywhere


def sketch_of(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a parameter's sketch, cut as the parameter is: a number for each block of :data:`BLOCK` × :data:`BLOCK`.

    A block's number is the sum of its elements with random signs, which depend on the place within the block: the
    sketch of a part that begins and ends at blocks is the part of the sketch. An axis that does not divide into blocks
    is kept. Sums of squares stay what they are, on average, and so do factors, exactly. [a, b] → [a / 16, b / 16]
    """
    plain = tensor.detach().to(torch.float64)
    for axis in range(max(plain.dim() - 2, 0), plain.dim()):
        size = plain.shape[axis]
        if size % BLOCK == 0 and size:
            shape = (*plain.shape[:axis], size // BLOCK, BLOCK, *plain.shape[axis + 1 :])
            plain = torch.tensordot(plain.reshape(shape), signs(BLOCK, 7 + axis), dims=([axis + 1], [0]))
    return plain.clone() if plain.data_ptr() == tensor.data_ptr() else plain


def scale_piece(piece: ParameterShard, shape: tuple[int, ...]) -> ParameterShard:
    """Converts a parameter's piece to its place in the whole's sketch, where it begins and ends at blocks.

    ``shape``: of the piece's own sketch.
    """
    if shape == piece.shape or piece.whole is None or piece.start is None:
        return piece
    steps = [BLOCK if length != size else 1 for length, size in zip(piece.shape, shape, strict=True)]
    if any(size % step or at % step for size, at, step in zip(piece.whole, piece.start, steps, strict=True)):
        return piece
    whole = tuple(size // step for size, step in zip(piece.whole, steps, strict=True))
    start = tuple(at // step for at, step in zip(piece.start, steps, strict=True))
    return replace(piece, shape=shape, whole=whole, start=start)


#: Kinds of tensors that are a parameter's.
OF_PARAMETERS = ("before", "after", "used", "gradient", "applied", "accumulated")


#: What kinds of tensors begin with that are an optimizer's states; behind it the name of the state.
STATE = "state."


#: Arguments that are the samples, of whatever else a model is given.
FIRST_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "tokens")
#: What says nothing of the samples.
_PLAIN = (torch.Tensor, np.ndarray, str, bool, int, float, type(None))


def input_tensors(inputs: Any, arguments: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Returns a model's inputs with a first axis by name, the samples' first; also those in lists, dicts, dataclasses.

    Where there is none, lists of texts or numbers stand for it: a text as a hash of it.
    """
    named = [*((f"input {number}", value) for number, value in enumerate(inputs)), *arguments.items()]
    leaves = [leaf for name, value in named for leaf in _input_leaves(name, value)]
    tensors = [(name, tensor) for name, value in leaves if (tensor := _as_tensor(value)) is not None]
    tensors = tensors or [(name, tensor) for name, value in leaves if (tensor := _list_as_tensor(value)) is not None]
    known = {name: index for index, name in enumerate(FIRST_INPUTS)}
    return sorted(tensors, key=lambda item: known.get(item[0], len(known)))


def unseen_inputs(inputs: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Returns kinds of objects among a model's inputs that nothing is known of."""
    leaves = [leaf for value in (*inputs, *arguments.values()) for _, leaf in _input_leaves("", value)]
    return sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN)})


def _input_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _input_leaves(str(key), inner)
    elif isinstance(value, (list, tuple)) and _list_as_tensor(value) is None:
        for number, inner in enumerate(value):
            yield from _input_leaves(f"{name}.{number}", inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _input_leaves(part.name, getattr(value, part.name))
    else:
        yield name, value


def _as_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor) or value.dim() < 1:
        return None
    return value.to_local() if hasattr(value, "to_local") else value


def _list_as_tensor(value: Any) -> torch.Tensor | None:
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if all(isinstance(item, str) for item in value):
        digests = [hashlib.blake2b(item.encode(errors="replace"), digest_size=8).digest() for item in value]
        return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])
    if all(isinstance(item, (int, float)) for item in value):
        return torch.tensor(value)
    return None
