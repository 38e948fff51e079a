"""On a rank: somebody's script, unchanged, as ``__main__`` in torchrun's environment, until its steps are counted."""

import contextlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pardemo.cluster import loopback
from pardemo.measure import environment, libraries, processes
from pardemo.measure.attention import teach_dtensor
from pardemo.measure.calls import Call, Calls
from pardemo.measure.held import Held
from pardemo.measure.launch_lines import Launch
from pardemo.measure.places import Places
from pardemo.measure.running import Parallelism, model, recognised
from pardemo.measure.running_cut import with_terms
from pardemo.measure.shapes import Shapes
from pardemo.measure.steps import Cut, Enough, Steps
from pardemo.measure.trained import Trained
from pardemo.measure.waiting import Waited, Waiting
from pardemo.measure.without_gpu import without_gpu
from pardemo.measure.work import StepWork, Work
from pardemo.meters.snapshot import Block
from pardemo.meters.wire import connections, kernel_counts

#: Steps before those that are measured: in the first an optimizer makes its states, in the second DDP its buckets anew
#: while memory is followed, and with the third's backward pass nothing is followed any more but collectives.
MEMORY_STEP = 2
WARM = 3


@dataclass(frozen=True)
class Program:
    """A script to run: what a launcher would start, its path made absolute; how many steps; where it writes."""

    launch: Launch
    steps: int
    folder: str
    journals: str
    work: bool = False
    layer_s: float = 0.0


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
    """What one rank saw. ``ended``: ``enough`` steps, or the script's own ``end``.

    ``notes``: what ran in another way than it was written. ``wire``: whether the kernel counted bytes. ``work``: the
    second step's operations, where they were asked for. ``waited``: of layers that take a given time. ``started``:
    processes of the script's own, in which nothing is followed.
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
    work: StepWork | None = None
    waited: Waited | None = None
    started: tuple[str, ...] = ()


def run(program: Program) -> Seen:
    """Runs the script on this rank, whose World's group is given up for the script's own."""

    def follow(rank: int, port: int, notes: list[str]) -> Seen:
        return _Watch(program, own_folder(program.launch), rank, port).follow(lambda: as_main(program.launch), notes)

    return in_job(program.launch, program.folder, follow)


def in_job(launch: Launch, folder: str, follow: Callable[[int, int, list[str]], Any]) -> Any:
    """What ``follow`` returns on this rank, as a process of the launcher's job; the World's group is given up for it.

    ``follow`` gets the rank, the port where the ranks meet, and a list for what runs in another way than written.
    """
    rank, size, own_process = dist.get_rank(), dist.get_world_size(), os.getpid()
    port: list[Any] = [loopback.free_port()] if rank == 0 else [None]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    environment.set_for(launch, rank, size, port[0])
    first = [f"{launch.local_rank}{os.environ['LOCAL_RANK']}"] if launch.local_rank else []
    sys.argv = [launch.script, *first, *launch.arguments]
    sys.path.insert(0, folder if launch.module else os.path.dirname(launch.script))
    os.chdir(folder)
    os.environ.update(libraries.environment())
    if not torch.cuda.is_available():
        teach_dtensor()
    notes: list[str] = []
    local, beside = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ["LOCAL_WORLD_SIZE"])
    with processes.spawned_here(local, beside, notes), without_gpu(notes, own_folder(launch)):
        seen = follow(rank, port[0], notes)
    if os.getpid() != own_process:  # a child that the script forked, and that came out of the script as well
        os._exit(0)
    return seen


class _Watch:
    """What is followed of a script: its steps and collectives; for its first steps, tensor by tensor, its memory."""

    def __init__(self, program: Program, own: str, rank: int, port: int):
        self._rank, self._ports, self._enough = rank, {port}, WARM + program.steps
        self._wire = kernel_counts()
        self._places = Places(own)
        self._shapes = Shapes(self._places, lambda: self._steps.number)
        self._held = Held(self._places)
        self._trained = Trained(self._places)
        self._following = contextlib.ExitStack()
        self._steps = Steps(self._places, self._enough, self._counters, self._on_cut, self._on_backward)
        journal = os.path.join(program.journals, f"rank{rank}")
        self._calls = Calls(self._places, lambda: self._steps.number, journal, self._on_tensors)
        self._calls.on_wait = self._on_wait
        self._places.on_raise = self._steps.on_raise = self._calls.raised
        self._work = Work(self._places, lambda: self._calls.list) if program.work else None
        self._step_work: StepWork | None = None
        self._waiting = Waiting(program.layer_s) if program.layer_s else None
        self._memory: Memory | None = None
        self._parallelisms: list[Parallelism] = []
        self._model: dict[str, Any] = {}
        self._backend = ""

    def follow(self, script: Callable[[], str], notes: list[str]) -> Seen:
        """Runs the script to its end, or to the end of the steps that were asked for."""
        pace = self._waiting or contextlib.nullcontext()
        stores, started = processes.ports_of_stores(self._ports), list[str]()
        with (
            stores,
            processes.started(started),
            self._places,
            self._shapes,
            self._steps,
            self._calls,
            pace,
            self._following,
        ):
            if self._work is not None:
                self._following.enter_context(self._work)  # below the meter of memory, which passes operations on
            self._following.enter_context(self._held)
            self._following.enter_context(self._trained)
            ended = self._calls.to_the_end(script)
        parallelisms = with_terms(self._parallelisms, self._shapes, WARM, self._held.vocabularies)
        return Seen(
            self._rank, ended, self._steps.cuts, self._calls.list, self._calls.waits, parallelisms, self._model,
            notes, self._memory or _memory(self._held), self._wire and "nccl" not in self._backend,
            self._backend, self._step_work, self._waiting.seen if self._waiting else None,
            tuple(dict.fromkeys(started)),
        )  # fmt: skip

    def _on_cut(self, number: int) -> None:
        if number == 1:
            self._held.begin()
            if self._work is not None:
                self._work.begin()
        elif number == MEMORY_STEP:
            self._memory = _memory(self._held)
            if self._work is not None:
                self._step_work = self._work.step(self._places.roots)
        elif number in (WARM, self._enough):  # a script that ends by itself takes its groups down before
            self._look()

    def _on_backward(self) -> None:
        if self._memory is not None:
            self._following.close()  # not at the cut: torch goes through its hooks there, and some are the meter's

    def _on_wait(self) -> None:
        if self._work is not None and self._memory is None:
            self._work.waited()

    def _on_tensors(self, *tensors: Any) -> None:
        if self._memory is None:
            self._held.used(*tensors)

    def _look(self) -> None:
        """What is running, while the script still has it."""
        self._parallelisms = recognised(self._places, self._shapes)
        self._model = model(self._places) | {
            "vocabularies": sorted(self._held.vocabularies), "trained": self._trained.seen()
        }  # fmt: skip
        self._backend = str(dist.get_backend()) if dist.is_initialized() else ""

    def _counters(self) -> tuple[int, int]:
        """The kernel's, of this process's connections without those to stores, through which ranks meet."""
        if not self._wire:
            return 0, 0
        ends = [end for end in connections() if not self._ports & {end.local[1], end.peer[1]}]
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


def as_main(launch: Launch) -> str:
    """Runs the script and says how it ended; Exited: with a status of failure, for which other ranks may wait."""
    try:
        if launch.module:
            runpy.run_module(launch.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(launch.script, run_name="__main__")
    except Enough:
        return "enough"
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise processes.exited(exit_) from None
    return "end"


def own_folder(launch: Launch) -> str:
    """The folder that is the reader's, also where it lies among the libraries: the script's, or the package's."""
    if not launch.module:
        return os.path.dirname(launch.script)
    spec = importlib.util.find_spec(launch.script.partition(".")[0])
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else ""
