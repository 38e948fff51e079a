"""On a rank: somebody's script, unchanged, as ``__main__`` in torchrun's environment, until its steps are counted."""

import contextlib
import importlib.util
import os
import runpy
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pardemo.measure import libraries
from pardemo.measure.attention import teach_dtensor
from pardemo.measure.calls import Call, Calls
from pardemo.measure.held import Held
from pardemo.measure.places import Places
from pardemo.measure.running import Parallelism, model, recognised
from pardemo.measure.running_cut import with_terms
from pardemo.measure.shapes import Shapes
from pardemo.measure.snapshot import Block
from pardemo.measure.steps import Cut, Enough, Steps
from pardemo.measure.without_gpu import without_gpu
from pardemo.meters.wire import connections, kernel_counts

#: Steps before those that are measured: in the first an optimizer makes its states, in the second DDP its buckets anew
#: while memory is followed, and with the third's backward pass nothing is followed any more but collectives.
MEMORY_STEP = 2
WARM = 3


@dataclass(frozen=True)
class Program:
    """A script to run: a path or, with ``module``, a module's name; its arguments; how many steps; where it writes."""

    script: str
    arguments: tuple[str, ...]
    module: bool
    steps: int
    folder: str
    journals: str


@dataclass(frozen=True)
class Tensor:
    """A tensor that was alive at the peak, and where it was made."""

    kind: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    line: str
    module: str


class Memory(NamedTuple):
    """The second step's peak: bytes, by kind, the line that reached it, and its largest tensors."""

    peak_bytes: int
    kinds: dict[str, int]
    line: str
    largest: list[Tensor]
    blocks: list[Block]


@dataclass(frozen=True)
class Seen:
    """What one rank saw. ``ended``: ``enough`` steps, the script's own ``end``, or ``exit 3``.

    ``notes``: what ran in another way than it was written. ``wire``: whether the kernel counted bytes.
    """

    rank: int
    ended: str
    cuts: list[Cut]
    calls: list[Call]
    waits: list[tuple[float, float]]
    parallelisms: list[Parallelism]
    model: dict[str, Any]
    notes: list[str]
    memory: Memory
    wire: bool
    backend: str


def run(program: Program) -> Seen:
    """Runs the script on this rank, whose World's group is given up for the script's own."""
    rank, size, own_process = dist.get_rank(), dist.get_world_size(), os.getpid()
    port: list[Any] = [free_port()] if rank == 0 else [None]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    _environment(rank, size, port[0])
    sys.argv = [program.script, *program.arguments]
    sys.path.insert(0, program.folder if program.module else os.path.dirname(program.script))
    os.chdir(program.folder)
    os.environ.update(libraries.environment())
    if not torch.cuda.is_available():
        teach_dtensor()
    own = _own(program)
    notes: list[str] = []
    with without_gpu(notes, own):
        seen = _Watch(program, own, rank, port[0]).follow(lambda: _run(program), notes)
    if os.getpid() != own_process:  # a child that the script forked, and that came out of the script as well
        os._exit(0)
    return seen


class _Watch:
    """What is followed of a script: its steps and collectives; for its first steps, tensor by tensor, its memory."""

    def __init__(self, program: Program, own: str, rank: int, port: int):
        self._rank, self._port, self._enough = rank, port, WARM + program.steps
        self._wire = kernel_counts()
        self._places = Places(own)
        self._shapes = Shapes(self._places, lambda: self._steps.number)
        self._held = Held(self._places)
        self._following = contextlib.ExitStack()
        self._steps = Steps(self._places, self._enough, self._counters, self._on_cut, self._on_backward)
        journal = os.path.join(program.journals, f"rank{rank}")
        self._calls = Calls(self._places, lambda: self._steps.number, journal, self._on_tensors)
        self._memory: Memory | None = None
        self._parallelisms: list[Parallelism] = []
        self._model: dict[str, Any] = {}
        self._backend = ""

    def follow(self, script: Callable[[], str], notes: list[str]) -> Seen:
        """Runs the script to its end, or to the end of the steps that were asked for."""
        with self._places, self._shapes, self._steps, self._calls, self._following:
            self._following.enter_context(self._held)
            ended = script()
            if not self._model:  # it ended by itself
                self._look()
        parallelisms = with_terms(self._parallelisms, self._shapes, WARM, self._held.vocabularies)
        return Seen(
            self._rank, ended, self._steps.cuts, self._calls.list, self._calls.waits, parallelisms, self._model,
            notes, self._memory or _memory(self._held), self._wire and "nccl" not in self._backend,
            self._backend,
        )  # fmt: skip

    def _on_cut(self, number: int) -> None:
        if number == 1:
            self._held.begin()
        elif number == MEMORY_STEP:
            self._memory = _memory(self._held)
        elif number == self._enough:
            self._look()

    def _on_backward(self) -> None:
        if self._memory is not None:
            self._following.close()  # not at the cut: torch goes through its hooks there, and some are the meter's

    def _on_tensors(self, *tensors: Any) -> None:
        if self._memory is None:
            self._held.used(*tensors)

    def _look(self) -> None:
        """What is running, while the script still has it."""
        self._parallelisms = recognised(self._places, self._shapes)
        self._model = model(self._places) | {"vocabularies": sorted(self._held.vocabularies)}
        self._backend = str(dist.get_backend()) if dist.is_initialized() else ""

    def _counters(self) -> tuple[int, int]:
        """The kernel's, of this process's connections without those to the store through which ranks meet."""
        if not self._wire:
            return 0, 0
        ends = [end for end in connections() if self._port not in (end.local[1], end.peer[1])]
        return sum(end.sent_bytes for end in ends), sum(end.received_bytes for end in ends)


def _memory(held: Held) -> Memory:
    kinds, alive = held.at_peak()
    largest = [
        Tensor(kind, one.nbytes, one.shape, one.dtype, one.place.line, one.place.module) for kind, one in alive[:5]
    ]
    blocks = [
        Block(one.nbytes, kind, one.place.line, one.place.module, one.born, one.died, one.place.phase)
        for kind, one in held.all()
        if one.nbytes
    ]
    return Memory(sum(kinds.values()), kinds, held.peak_place.line if held.peak_place else "", largest, blocks)


def _run(program: Program) -> str:
    """Runs the script and says how it ended."""
    try:
        if program.module:
            runpy.run_module(program.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program.script, run_name="__main__")
    except Enough:
        return "enough"
    except SystemExit as exit_:
        return "end" if exit_.code in (None, 0) else f"exit {exit_.code}"
    return "end"


def _own(program: Program) -> str:
    """The folder that is the reader's, also where it lies among the libraries: the script's, or the package's."""
    if not program.module:
        return os.path.dirname(program.script)
    spec = importlib.util.find_spec(program.script.partition(".")[0])
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else ""


def _environment(rank: int, size: int, port: int) -> None:
    """What torchrun sets for a worker of a job on one host, or on a cluster's."""
    local, beside = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    os.environ.update(
        {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(beside),
            "GROUP_RANK": str(rank // beside), "GROUP_WORLD_SIZE": str(-(-size // beside)),
            "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(size), "ROLE_NAME": "default",
            "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "pardemo-measure", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
    )  # fmt: skip


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
