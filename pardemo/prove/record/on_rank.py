"""On a rank: a script, unchanged, with what prove records of it."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pardemo import compat
from pardemo.measure import processes, program, stand_ins
from pardemo.measure.calls import Calls
from pardemo.measure.launch_lines import Launch
from pardemo.measure.places import Places
from pardemo.measure.running import recognised
from pardemo.measure.shapes import Shapes
from pardemo.measure.steps import Enough
from pardemo.prove.record.double import double
from pardemo.prove.record.draws import as_in_a_new_process, dropout_noted, unseeded_noted
from pardemo.prove.record.facts import Record
from pardemo.prove.record.parameters import Wanted
from pardemo.prove.record.recorder import Recorder
from pardemo.zero import gradient_norm

#: A loss in what a script prints: its name, at most a few other characters, a number.
_LOSS = re.compile(r"\bloss\b[\"']?\s*[:=]?\s*([-+]?\d+\.?\d*(?:[eE][-+]?\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Program:
    """A script to run: what a launcher would start, its path made absolute, or a function in its place.

    ``follow``: makes what records it, of places, rank and what is wanted; a :class:`Recorder` where it is None.
    """

    launch: Launch
    folder: str
    wanted: Wanted
    double: bool = False
    function: Callable[[], Any] | None = None
    follow: Callable[[Places, int, Wanted], Recorder] | None = None


def run(asked: Program) -> Record:
    """Runs the script on this rank until its steps are recorded."""

    def follow(rank: int, port: int, notes: list[str]) -> Record:
        as_in_a_new_process()
        places = Places(program.own_folder(asked.launch) if asked.function is None else os.getcwd())
        recorder = (asked.follow or Recorder)(places, rank, asked.wanted)
        unseeded: list[str] = []
        parallelisms: list[Any] = []
        shapes = Shapes(places, lambda: len(recorder.steps) - 1)
        recorder.on_first_step(lambda: parallelisms.extend(_recognised(places, shapes)))
        calls = Calls(places, lambda: len(recorder.steps) - 1, os.path.join(asked.wanted.folder, f"rank{rank}"))
        with contextlib.ExitStack() as stack:
            for one in (places, shapes, recorder, calls, unseeded_noted(places, unseeded), _printed(recorder)):
                stack.enter_context(one)
            stack.enter_context(dropout_noted(places, recorder.mask, notes))
            stack.enter_context(_clipping(recorder))
            stack.enter_context(_losses(recorder))
            stack.enter_context(_scaling(recorder))
            if asked.double:
                stack.enter_context(double(notes))
            ended = calls.to_the_end(lambda: _run(asked, recorder))
        made = recorder.record(ended, parallelisms, notes, unseeded)
        # links of our own are none of torch's collectives: a script that imports us may have them
        made.alone = asked.function is None and not calls.list and not _imports_us(asked.launch)
        if dist.is_initialized():
            dist.destroy_process_group()  # a rank that waits for this one hears that it has gone
        return made

    return program.in_job(asked.launch, asked.folder, follow)


def _imports_us(launch: Launch) -> bool:
    """Whether the script names this package; of a module nobody knows, which may."""
    if launch.module:
        return True
    with open(launch.script, encoding="utf-8", errors="replace") as file:
        return "pardemo" in file.read()


def _recognised(places: Places, shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.kind, one.ranks) for one in recognised(places, shapes)]


def _run(asked: Program, recorder: Recorder) -> str:
    """The script to its end, or to the end of the steps that are recorded: how it ended."""
    ended = _ran(asked, recorder)
    recorder.end()
    return ended


def _ran(asked: Program, recorder: Recorder) -> str:
    try:
        if asked.function is None:
            return program.as_main(asked.launch)
        asked.function()
        return "end"
    except Enough:
        return "enough"
    except (RuntimeError, processes.Exited):
        if recorder.complete:  # it waited for a rank that had all its steps, too
            return "enough"
        raise


@contextlib.contextmanager
def _printed(recorder: Recorder) -> Iterator[None]:
    """Losses that the script prints, found by their name."""
    write = sys.stdout.write

    def noted(text: str) -> int:
        for number in _LOSS.findall(text):
            recorder.printed(float(number))
        return write(text)

    with compat.replaced(sys.stdout, "write", noted):
        yield


@contextlib.contextmanager
def _clipping(recorder: Recorder) -> Iterator[None]:
    """Calls of torch's functions that clip, and of ours: gradients before them, the norm that they found."""
    clip: Any = torch.nn.utils.clip_grad_norm_
    clip_by: Any = torch.nn.utils.clip_grads_with_norm_  # which clip_grad_norm_ calls, too
    inside = [False]
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    of_fsdp: Any = Fsdp.clip_grad_norm_
    ours: Any = gradient_norm.clip_grad_norm_

    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        kept = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        recorder.before_clipping()
        inside[0] = True
        try:
            norm = clip(kept, max_norm, *args, **kwargs)
        finally:
            inside[0] = False
        recorder.clipped(norm, max_norm)
        return norm

    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        if not inside[0]:
            recorder.before_clipping()
            recorder.clipped(total_norm, max_norm)
        clip_by(parameters, max_norm, total_norm, *args, **kwargs)

    def clip_of_fsdp(self: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        recorder.before_clipping()
        norm = of_fsdp(self, max_norm, *args, **kwargs)
        recorder.clipped(norm, max_norm)
        return norm

    def clip_of_ours(module: torch.nn.Module, max_norm: float, **kwargs: Any) -> float:
        recorder.before_clipping()
        norm = ours(module, max_norm, **kwargs)
        recorder.clipped(norm, max_norm)
        return norm

    with (
        stand_ins.replaced_everywhere(
            [(clip, clip_grad_norm_), (clip_by, clip_grads_with_norm_), (ours, clip_of_ours)]
        ),
        compat.replaced(Fsdp, "clip_grad_norm_", clip_of_fsdp),
        compat.replaced(gradient_norm, "clip_grad_norm_", clip_of_ours),  # for those who import it from now on
    ):
        yield


def _scaling(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """Steps of torch's GradScaler, and of those that are made of it: the scale, and which steps it skips."""
    scaler = torch.amp.grad_scaler.GradScaler
    real = scaler.step

    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return real(self, optimizer, *args, **kwargs)
        return recorder.scaled(float(self.get_scale()), lambda: real(self, optimizer, *args, **kwargs))

    return compat.replaced(scaler, "step", step)


@contextlib.contextmanager
def _losses(recorder: Recorder) -> Iterator[None]:
    """Calls of torch's loss functions: how many targets each has, how many it ignores, what it returns."""
    functional: Any = torch.nn.functional
    inside = [False]

    def noted(function: Callable) -> Callable:
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return function(input, target, *args, **kwargs)
            inside[0] = True
            try:
                made = function(input, target, *args, **kwargs)
            finally:
                inside[0] = False
            if torch.is_grad_enabled() and compat.graph_task() == -1:
                ignore = kwargs.get("ignore_index", -100)
                whole = isinstance(target, torch.Tensor) and not target.is_floating_point()
                ignored = int((target == ignore).sum()) if whole else 0
                count = target.numel() if isinstance(target, torch.Tensor) else 0
                value = float(made.detach()) if isinstance(made, torch.Tensor) and made.numel() == 1 else None
                recorder.loss_call(
                    function.__name__, count, ignored, str(kwargs.get("reduction", "mean")), value
                )  # fmt: skip
            return made

        return loss

    names = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "l1_loss")
    with stand_ins.replaced_everywhere([(f := getattr(functional, name), noted(f)) for name in names]):
        yield
