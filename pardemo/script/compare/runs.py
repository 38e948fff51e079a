"""Runs a layout of a script on warm ranks, and reads the tensors that its ranks recorded."""

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pardemo.script.compare.parameter_map import Strip
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.record.parameters import Multiplied, RecordSettings
from pardemo.script.record.rank_record import OF_PARAMETERS, STATE, RankRecord, Tensors
from pardemo.script.record.recorder import RecordedScript, record_script
from pardemo.script.runtime.launch_lines import Launch, read_launch
from pardemo.script.runtime.runner import ScriptError, run_on_ranks, script_text

#: Elements of a model above which parameters are compared by sketches first.
SKETCHED = 20_000_000


class ProveError(ValueError):
    """A layout could not be run; one line says what happened, ``details`` where."""

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


@dataclass
class Run:
    """The run of a layout: each rank's record. ``error``: why it could not be run.

    ``timed_out``: whether its time limit ended it; ``raised``: whether a rank raised or exited. ``strips``: by rank the
    pieces that hold several of the reference's parameters and are read in strips. ``steps_asked``: steps to be
    compared; one more may have been recorded.
    """

    layout: RunLayout
    records: list[RankRecord] = field(default_factory=list)
    error: str = ""
    details: str = ""
    strips: dict[int, dict[str, list[Strip]]] = field(default_factory=dict)
    steps_asked: int = sys.maxsize
    timed_out: bool = False
    raised: bool = False

    @property
    def steps(self) -> int:
        """Number of steps that every rank has recorded, at most those to be compared."""
        return min((min(len(record.steps), self.steps_asked) for record in self.records), default=0)

    def tensors(self, step: int, rank: int, kind: str) -> Tensors:
        """Reads a rank's tensors of a step, by name.

        ``kind``: ``before``, ``after``, ``gradient``, ``output``, ``input``.

        Of a parameter that ranks gather behind the optimizer's step, or in the next forward pass, what it is after a
        step is what the next forward pass has used.
        """
        stored = self._stored(step, rank, kind)
        if kind == "after" and step + 1 < len(self.records[rank].steps):
            stored |= self._stored(step + 1, rank, "used")
        return stored

    def keys(self, step: int, rank: int) -> list[str]:
        """Returns the kinds and names of all tensors that a rank recorded in a step."""
        with safe_open(self.records[rank].steps[step].file, framework="pt") as stored:
            return list(stored.keys())

    def since(self, step: int) -> "Run":
        """Returns the run without its first ``step`` steps."""
        records = [replace(record, steps=record.steps[step:]) for record in self.records]
        return replace(self, records=records, steps_asked=self.steps_asked - step)

    def _stored(self, step: int, rank: int, kind: str) -> Tensors:
        file = self.records[rank].steps[step].file
        prefix = f"{kind}/"
        with safe_open(file, framework="pt") as stored:
            tensors = {key[len(prefix) :]: stored.get_tensor(key) for key in stored.keys() if key.startswith(prefix)}  # noqa: SIM118
        cut = kind in OF_PARAMETERS or kind.startswith(STATE)
        for name, strips in self.strips.get(rank, {}).items() if cut else ():
            if (tensor := tensors.pop(name, None)) is not None:  # a state may be one number
                tensors |= {strip.name_in(name): strip.cut_from(tensor) if tensor.dim() else tensor for strip in strips}
        return tensors

    def gathers_late(self) -> bool:
        """Whether a forward pass has used other parameters than the optimizer's step had left."""
        steps = [(step, rank) for rank, record in enumerate(self.records) for step in range(len(record.steps))]
        return any(self._stored(step, rank, "used") for step, rank in steps)

    def cut(self, strips: dict[int, dict[str, list[Strip]]]) -> None:
        """Splits these pieces into strips, which are read as pieces of their own from now on."""
        self.strips = strips
        for rank, held in strips.items():
            for step in self.records[rank].steps:
                step.pieces = [
                    part
                    for piece in step.pieces
                    for part in ([s.as_piece(piece) for s in held[piece.name]] if piece.name in held else [piece])
                ]


@dataclass(frozen=True)
class RunOptions:
    """Says how layouts are run: how many steps are recorded, in fp64 or the script's own type, and the time limit.

    ``until_s``: when the last run has to end, by ``time.monotonic``.
    ``follow``: what follows more of them on a rank, of prove's recorder. ``rounded``: rounded otherwise.
    ``multiplied``: parameters that are changed on purpose. ``replay``: returns for a layout what follows its ranks
    as ``follow`` does, and replays recorded inputs on them.
    """

    steps: int = 3
    double: bool = False
    timeout_s: float = 600.0
    until_s: float = math.inf
    sketched: bool = False
    in_full: tuple[str, ...] = ()
    function: Callable[[RunLayout], Callable[[], Any]] | None = None
    follow: Callable[..., Any] | None = None
    rounded: bool = False
    multiplied: Multiplied | None = None
    replay: Callable[[RunLayout], Callable[..., Any]] | None = None


def run_layout(layout: RunLayout, options: RunOptions, folder: Path) -> Run:
    """Runs one layout and writes its tensors to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    recorded = max(options.steps, 2)  # the second says what parameters are after the first
    settings = RecordSettings(
        recorded, str(folder), options.sketched, options.in_full, options.rounded, options.multiplied
    )
    launch, text, function, name = Launch(""), "", None, "the training"
    if options.function is not None:
        function = options.function(layout)
    else:
        launch, text = launch_of(layout)
        name = os.path.basename(launch.script)
    follow = options.replay(layout) if options.replay is not None else options.follow
    left_s = max(options.until_s - time.monotonic(), 0.1)
    task = RecordedScript(launch, os.getcwd(), settings, options.double, function, follow)
    try:
        records = run_on_ranks(
            record_script, task, text, name=name, ranks=layout.ranks, journals=str(folder),
            timeout_s=min(options.timeout_s, left_s),
        )  # fmt: skip
    except ScriptError as error:
        return Run(layout, [], str(error), error.details, timed_out=error.timed_out, raised=error.raised)
    run = Run(layout, records, steps_asked=options.steps)
    if 1 < len(records[0].steps) <= options.steps and run.gathers_late():
        run.steps_asked = len(records[0].steps) - 1  # of the last step nobody has seen what parameters are after it
    return run


def launch_of(layout: RunLayout) -> tuple[Launch, str]:
    """Reads a layout's command line: what it starts, and the script's text.

    Raises:
        ProveError: there is no such script. ValueError: the line cannot be read.
    """
    launch = read_launch(list(layout.line), layout.ranks)
    try:
        return script_text(launch, os.getcwd())
    except ScriptError as error:
        raise ProveError(str(error)) from None


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder for tensors, which is removed at the end of its ``with`` block."""
    return tempfile.TemporaryDirectory(prefix="pardemo-prove-", ignore_cleanup_errors=True)


def require_steps(run: Run) -> None:
    """Raises an error where the reference could not be run or took no step."""
    if run.error:
        raise ProveError(f"the reference, {run.layout.name}: {run.error}", run.details)
    if not run.steps:
        raise ProveError(
            f"the reference, {run.layout.name}, took no step of an optimizer after a backward pass: "
            "there is nothing to compare"
        )


def elements(run: Run) -> dict[str, int]:
    """Returns the number of elements of each parameter of a run, by what its ranks' pieces say of the whole."""
    pieces = [piece for record in run.records for piece in record.steps[0].pieces]
    return {piece.name: torch.Size(piece.whole or piece.shape).numel() for piece in pieces}
