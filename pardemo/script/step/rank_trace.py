"""Follows an unchanged script on a rank for some steps, and records its steps, collectives and memory."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from pardemo.meters.snapshot import Block
from pardemo.meters.wire import connections, kernel_counts
from pardemo.script.runtime import job
from pardemo.script.runtime.call_sites import CallSites
from pardemo.script.runtime.collectives import Call, Calls
from pardemo.script.runtime.job import as_main, in_job
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.runtime.steps import StepEnd, Steps
from pardemo.script.step import WARM_UP_STEPS
from pardemo.script.step.dtensor_traffic import DTensors
from pardemo.script.step.layer_padding import LayerPadding, PaddedTimes
from pardemo.script.step.megatron_traffic import Megatron
from pardemo.script.step.operations import OperationRecorder, StepWork
from pardemo.script.step.parallelism import Parallelism
from pardemo.script.step.recognised import describe_model, recognised, with_traffic
from pardemo.script.step.script_memory import ScriptMemoryMeter
from pardemo.script.step.shapes import Shapes
from pardemo.script.step.trained_model import Trained

#: The step before which memory is followed; see :data:`pardemo.script.step.WARM_UP_STEPS`.
MEMORY_STEP = 2


@dataclass(frozen=True)
class RecordedProgram:
    """A script to run: what a launcher would start (with an absolute path), how many steps, and where it writes.

    ``work``: whether the second step's operations are recorded. ``layer_s``: what a layer's forward pass is padded to.
    """

    launch: Launch
    steps: int
    folder: str
    journals: str
    work: bool = False
    layer_s: float = 0.0


class RecordedMemory(NamedTuple):
    """The peak of the second step: bytes, bytes by kind, the line that reached it, and its largest tensors."""

    peak_bytes: int
    kinds: dict[str, int]
    line: str
    largest: list[dict[str, Any]]
    blocks: list[Block]


@dataclass(frozen=True)
class RankTrace:
    """One rank's recorded run of a script. ``ended``: after ``enough`` steps, or at the script's own ``end``.

    ``notes``: what ran in another way than it was written. ``wire``: whether the kernel counted bytes. ``work``: the
    second step's operations, where they were asked for. ``padded``: of layers that take a given time. ``started``:
    processes of the script's own, in which nothing is followed.
    """

    rank: int
    ended: str
    cuts: list[StepEnd]
    calls: list[Call]
    waits: list[tuple[float, float]]
    parallelisms: list[Parallelism]
    model: dict[str, Any]
    notes: list[str]
    memory: RecordedMemory
    wire: bool
    backend: str
    work: StepWork | None = None
    padded: PaddedTimes | None = None
    started: tuple[str, ...] = ()


def follow_script(program: RecordedProgram) -> RankTrace:
    """Runs the script on this rank, whose World's group is given up for the script's own."""

    def follow(rank: int, port: int, notes: list[str]) -> RankTrace:
        return _ScriptFollower(program, rank, port).follow(lambda: as_main(program.launch), notes)

    return in_job(program.launch, program.folder, follow)


class _ScriptFollower:
    """Follows a script's steps and collectives, and in its first steps its memory, tensor by tensor."""

    def __init__(self, program: RecordedProgram, rank: int, port: int):
        self._rank, self._ports, self._enough = rank, {port}, WARM_UP_STEPS + program.steps
        self._wire = kernel_counts()
        self._sites = CallSites()
        self._shapes = Shapes(self._sites, lambda: self._steps.number, DTensors, Megatron)
        self._held = ScriptMemoryMeter(self._sites)
        self._trained = Trained(self._sites)
        self._following = contextlib.ExitStack()
        self._steps = Steps(self._sites, self._enough, self._counters, self._on_cut, self._on_backward)
        journal = os.path.join(program.journals, f"rank{rank}")
        self._calls = Calls(self._sites, lambda: self._steps.number, journal, self._on_tensors)
        self._calls.on_wait = self._on_wait
        self._sites.on_raise = self._steps.on_raise = self._calls.raised
        self._work = OperationRecorder(self._sites, lambda: self._calls.list) if program.work else None
        self._step_work: StepWork | None = None
        self._padding = LayerPadding(program.layer_s) if program.layer_s else None
        self._memory: RecordedMemory | None = None
        self._parallelisms: list[Parallelism] = []
        self._model: dict[str, Any] = {}
        self._backend = ""

    def follow(self, script: Callable[[], str], notes: list[str]) -> RankTrace:
        """Runs the script to its end, or to the end of the steps that were asked for."""
        padding = self._padding or contextlib.nullcontext()
        stores, started = job.store_ports_noted(self._ports), list[str]()
        with contextlib.ExitStack() as stack:
            followed = (self._sites, self._shapes, self._steps, self._calls, padding, self._following)
            for follower in (stores, job.processes_noted(started), *followed):
                stack.enter_context(follower)  # type: ignore[arg-type]
            if self._work is not None:
                self._following.enter_context(self._work)  # below the meter of memory, which passes operations on
            self._following.enter_context(self._held)
            self._following.enter_context(self._trained)
            ended = self._calls.to_the_end(script)
        parallelisms = with_traffic(self._parallelisms, self._shapes, WARM_UP_STEPS, self._held.vocabularies)
        return RankTrace(
            self._rank, ended, self._steps.cuts, self._calls.list, self._calls.waits, parallelisms, self._model,
            notes, self._memory or _memory(self._held), self._wire and "nccl" not in self._backend,
            self._backend, self._step_work, self._padding.seen if self._padding else None,
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
                self._step_work = self._work.step(self._sites.roots)
        elif number in (WARM_UP_STEPS, self._enough):  # a script that ends by itself takes its groups down before
            self._look()

    def _on_backward(self) -> None:
        if self._memory is not None:
            self._following.close()  # not at the cut: torch goes through its hooks there, and some are the meter's

    def _on_wait(self) -> None:
        if self._work is not None and self._memory is None:
            self._work.note_wait()

    def _on_tensors(self, *tensors: Any) -> None:
        if self._memory is None:
            self._held.used(*tensors)

    def _look(self) -> None:
        """Looks at the script's models and groups while they exist."""
        self._parallelisms = recognised(self._sites, self._shapes)
        self._model = describe_model(self._sites) | {
            "vocabularies": sorted(self._held.vocabularies), "trained": self._trained.seen()
        }  # fmt: skip
        self._backend = str(dist.get_backend()) if dist.is_initialized() else ""

    def _counters(self) -> tuple[int, int]:
        """Reads the kernel's byte counts of this process's connections, without those to stores of ranks."""
        if not self._wire:
            return 0, 0
        ends = [end for end in connections() if not self._ports & {end.local[1], end.peer[1]}]
        return sum(end.sent_bytes for end in ends), sum(end.received_bytes for end in ends)


def _memory(held: ScriptMemoryMeter) -> RecordedMemory:
    kinds, alive = held.at_peak()
    largest = [
        {
            "kind": kind, "bytes": life.nbytes, "shape": life.shape, "dtype": life.dtype, "line": life.site.line,
            "module": life.site.module,
        }
        for kind, life in alive[:5]
    ]  # fmt: skip
    blocks = [
        Block(life.nbytes, kind, life.site.line, life.site.module, life.born, life.died, life.site.phase)
        for kind, life in held.all()
        if life.nbytes
    ]
    return RecordedMemory(sum(kinds.values()), kinds, held.peak_site.line if held.peak_site else "", largest, blocks)
