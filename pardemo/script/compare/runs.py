"""Runs each layout of a proof on warm ranks, and has what they recorded compared."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pardemo.script.compare.layouts import Layout
from pardemo.script.compare.parameter_map import Strip
from pardemo.script.record.parameters import Wanted
from pardemo.script.record.recorder import Recording, record_script
from pardemo.script.record.records import OF_PARAMETERS, STATE, RankRecord, Tensors
from pardemo.script.runtime.launch_lines import Launch, read
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
    """A layout that was run: each rank's record. ``error``: why it could not be run.

    ``timed_out``: whether that is since its limit was over.
    ``strips``: of each rank the pieces that are read in strips, since they are several of the reference's parameters.
    ``wanted``: how many steps are to be compared; one more may have been recorded.
    """

    layout: Layout
    records: list[RankRecord] = field(default_factory=list)
    error: str = ""
    details: str = ""
    strips: dict[int, dict[str, list[Strip]]] = field(default_factory=dict)
    wanted: int = sys.maxsize
    timed_out: bool = False

    @property
    def steps(self) -> int:
        """Steps that every rank has recorded, as far as they are to be compared."""
        return min((min(len(record.steps), self.wanted) for record in self.records), default=0)

    def tensors(self, step: int, rank: int, kind: str) -> Tensors:
        """A rank's tensors of a step by name, of a kind: ``before``, ``after``, ``gradient``, ``output``, ``input``.

        Of a parameter that ranks gather behind the optimizer's step, or in the next forward pass, what it is after a
        step is what the next forward pass has used.
        """
        found = self._stored(step, rank, kind)
        if kind == "after" and step + 1 < len(self.records[rank].steps):
            found |= self._stored(step + 1, rank, "used")
        return found

    def keys(self, step: int, rank: int) -> list[str]:
        """Of all tensors that a rank recorded in a step, their kinds and names."""
        with safe_open(self.records[rank].steps[step].file, framework="pt") as stored:
            return list(stored.keys())

    def since(self, step: int) -> "Run":
        """The run as if it had begun behind so many steps."""
        records = [replace(record, steps=record.steps[step:]) for record in self.records]
        return replace(self, records=records, wanted=self.wanted - step)

    def _stored(self, step: int, rank: int, kind: str) -> Tensors:
        file = self.records[rank].steps[step].file
        prefix = f"{kind}/"
        with safe_open(file, framework="pt") as stored:
            found = {key[len(prefix) :]: stored.get_tensor(key) for key in stored.keys() if key.startswith(prefix)}  # noqa: SIM118
        cut = kind in OF_PARAMETERS or kind.startswith(STATE)
        for name, strips in self.strips.get(rank, {}).items() if cut else ():
            if (tensor := found.pop(name, None)) is not None:  # a state may be one number
                found |= {strip.name_in(name): strip.cut_from(tensor) if tensor.dim() else tensor for strip in strips}
        return found

    def gathers_late(self) -> bool:
        """Whether a forward pass has used other parameters than were there behind the optimizer's step."""
        steps = [(step, rank) for rank, record in enumerate(self.records) for step in range(len(record.steps))]
        return any(self._stored(step, rank, "used") for step, rank in steps)

    def cut(self, strips: dict[int, dict[str, list[Strip]]]) -> None:
        """From now on these pieces are read in strips, each a piece of its own."""
        self.strips = strips
        for rank, own in strips.items():
            for step in self.records[rank].steps:
                step.pieces = [
                    part
                    for piece in step.pieces
                    for part in ([strip.as_piece(piece) for strip in own[piece.name]] if piece.name in own else [piece])
                ]


@dataclass(frozen=True)
class Options:
    """How layouts are run: steps that are recorded, in fp64 or the script's own type, and for how long.

    ``follow``: what records them on a rank, where it is not prove's own. ``rounded``: rounded otherwise.
    """

    steps: int = 3
    double: bool = False
    timeout_s: float = 600.0
    sketched: bool = False
    in_full: tuple[str, ...] = ()
    function: Callable[[Layout], Callable[[], Any]] | None = None
    follow: Callable[..., Any] | None = None
    rounded: bool = False


def run_layout(layout: Layout, options: Options, folder: Path) -> Run:
    """Runs one layout, its tensors in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    recorded = max(options.steps, 2)  # the second says what parameters are after the first
    wanted = Wanted(recorded, str(folder), options.sketched, options.in_full, options.rounded)
    launch, text, function, name = Launch(""), "", None, "the training"
    if options.function is not None:
        function = options.function(layout)
    else:
        launch, text = launch_of(layout)
        name = os.path.basename(launch.script)
    asked = Recording(launch, os.getcwd(), wanted, options.double, function, options.follow)
    try:
        records = run_on_ranks(
            record_script, asked, text, name=name, ranks=layout.ranks, journals=str(folder), timeout_s=options.timeout_s
        )
    except ScriptError as error:
        return Run(layout, [], str(error), error.details, timed_out=error.timed_out)
    run = Run(layout, records, wanted=options.steps)
    if 1 < len(records[0].steps) <= options.steps and run.gathers_late():
        run.wanted = len(records[0].steps) - 1  # of the last step nobody has seen what parameters are after it
    return run


def launch_of(layout: Layout) -> tuple[Launch, str]:
    """What a layout's line starts, and the script's text.

    Raises:
        ProveError: there is no such script. ValueError: the line cannot be read.
    """
    launch = read(list(layout.line), layout.ranks)
    try:
        return script_text(launch, os.getcwd())
    except ScriptError as error:
        raise ProveError(str(error)) from None


def scratch_folder() -> str:
    """A folder for tensors, to be removed."""
    return tempfile.mkdtemp(prefix="pardemo-prove-")


def remove_folder(folder: str) -> None:
    """Removes it."""
    shutil.rmtree(folder, ignore_errors=True)


def run_reference(layout: Layout, options: Options, folder: str) -> tuple[Run, Run, Options]:
    """The reference, the same once more, and the options for all other runs.

    The first of the two keeps sketches of parameters, which are enough to see whether the second is the same; if the
    model is a large one, they all do from then on.

    Raises:
        ProveError: it could not be run, or took no step.
    """
    again = run_layout(layout, replace(options, sketched=True), Path(folder, "again"))
    require_steps(again)
    if elements(again) > SKETCHED:
        options = replace(options, sketched=True)
    first = run_layout(layout, options, Path(folder, "0"))
    require_steps(first)
    return first, again, options


def require_steps(run: Run) -> None:
    """Raises where a run that others are held against could not be run, or took no step."""
    if run.error:
        raise ProveError(f"the reference, {run.layout.name}: {run.error}", run.details)
    if not run.steps:
        raise ProveError(
            f"the reference, {run.layout.name}, took no step of an optimizer after a backward pass: "
            "there is nothing to compare"
        )


def elements(run: Run) -> int:
    """Elements of the model of a run, as far as its ranks' pieces say how large the whole is."""
    pieces = {piece.name: piece for record in run.records for piece in record.steps[0].pieces}
    return sum(torch.Size(piece.whole or piece.shape).numel() for piece in pieces.values())
