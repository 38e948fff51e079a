"""Records on a rank what each step begins with and when the script saves, and stops the script."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

from pardemo import compat
from pardemo.script.record.parameters import living_optimizers
from pardemo.script.record.pieces import parameter_names
from pardemo.script.record.rank_record import STATE
from pardemo.script.record.recorder import Recorder
from pardemo.script.resume.script_state import generator_states, optimizer_states, untracked_state
from pardemo.script.resume.stops import Stop
from pardemo.script.runtime import stand_ins


class StopFollower:
    """Records states of optimizers, random numbers and saves, with all that prove records, and stops the script.

    Args:
        folder: in which the script saves. stop: that is to come, if one is.
        marker: a file that is there from the stop on: to a launcher that is to be killed from outside it says that the
            time has come, and after a run that ended with an error, that the stop was its end.
    """

    def __init__(self, recorder: Recorder, folder: str, stop: Stop | None, marker: str):
        self._recorder, self._folder, self._stop, self._marker = recorder, folder, stop, marker
        self._stack = contextlib.ExitStack()
        self._files: set[tuple[str, int, int]] = set()
        self._saves: dict[int, list[float]] = {}  # seconds of each, by how many steps were over
        self._stopped = self._sees_saves = self._asynchronous = False
        self._over, self._to_stop = threading.Event(), threading.Lock()

    def __enter__(self) -> Self:
        recorder = self._recorder
        recorder.on_model, recorder.on_gradients = self._model_begins, self._note_states
        recorder.on_finish = lambda: self._may_stop("step")
        self._files = self._present()
        if self._stop is not None and self._stop.kind == "term":
            threading.Thread(target=self._stop_with_the_first, args=[self._stop.grace_s], daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._stack.close()

    @property
    def _done(self) -> int:
        """Steps that are over; also one whose parameters are still to be written down."""
        return len(self._recorder.steps) + self._recorder.current.pending

    # --- what a step begins with

    def _model_begins(self) -> None:
        if not self._sees_saves:  # by now the script has imported what it saves with
            self._sees_saves = True
            ours = sys.modules.get("pardemo.zero")  # whose names stand-ins leave alone
            functions = _saving_functions() + ([ours.save] if ours is not None else [])
            saving = stand_ins.outermost_calls(functions, self._saved)
            self._stack.enter_context(stand_ins.replaced_everywhere(saving))
            if ours is not None:
                self._stack.enter_context(compat.replaced(ours, "save", saving[-1][1]))
        step = self._recorder.current.step
        if not step.micro_batches:
            step.saves, step.asynchronous = self._saves.pop(self._done, []), self._asynchronous
            step.generators = generator_states()
            if self._recorder.rank == 0:
                files = self._present()
                step.saved, self._files = files != self._files, files
            self._may_stop("forward")

    def _note_states(self) -> None:
        self._may_stop("backward")
        parameters, tensors = self._recorder.parameters, self._recorder.current.tensors
        models = parameters.models()
        names = {key: known[0] for root in models for key, (_, known) in parameter_names(root).items()}
        for name, slot, value in optimizer_states(living_optimizers(parameters.optimizers), names):
            tensors[f"{STATE}{slot}/{name}"] = value if value.dim() == 0 else parameters.recorded(name, value)
        with torch.no_grad():
            for name, value in untracked_state(models):
                tensors[f"{STATE}{name}"] = parameters.recorded(name, value)

    # --- saves

    def _present(self) -> set[tuple[str, int, int]]:
        """Lists files in the script's folder: name, size, time of the last change."""
        files = set()
        for folder, _, names in os.walk(self._folder):  # which passes over what another rank has just removed
            for name in names:
                with contextlib.suppress(OSError):  # it is being replaced
                    known = os.stat(os.path.join(folder, name))
                    files.add((os.path.join(folder, name), known.st_size, known.st_mtime_ns))
        return files

    def _saved(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Saves, and notes how long it took."""
        done = self._done
        earlier = self._saves.setdefault(done, [])
        begin_s = time.perf_counter()
        in_thread = threading.current_thread() is not threading.main_thread()
        self._asynchronous |= in_thread or save.__name__ == "async_save"
        self._stop_in_save(done, len(earlier))
        try:
            return save(*args, **kwargs)
        finally:
            earlier.append(time.perf_counter() - begin_s)
            if self._marker:
                _note_complete_save(self._marker, self._recorder.rank, done)

    # --- the stop

    def _may_stop(self, moment: str) -> None:
        stop = self._stop
        if stop is None or self._stopped or stop.kind == "save":
            return
        if (stop.moment, stop.done) != (moment, len(self._recorder.steps)) or self._recorder.rank not in stop.ranks:
            return
        with self._to_stop:
            if self._stopped:  # it was told together with the first
                return
            self._stopped = True
            Path(self._marker).touch()
            if stop.kind == "term":
                _terminate(stop.grace_s)
                return
        if stop.kind == "launcher":
            time.sleep(60)  # until the launcher is gone, and this rank with it
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop_with_the_first(self, grace_s: float) -> None:
        """Stops this rank when the first is: a scheduler tells all at one moment, each of them somewhere else."""
        while not self._over.wait(0.002):
            if os.path.exists(self._marker):
                with self._to_stop:
                    if not self._stopped:
                        self._stopped = True
                        _terminate(grace_s)
                return

    def _stop_in_save(self, done: int, number: int) -> None:
        """Begins to count down before a save, the ``number``-th after its step, if the stop comes within it."""
        stop = self._stop
        if stop is None or stop.kind != "save" or stop.done != done:
            return
        left_s = stop.share * sum(stop.saves_s) - sum(stop.saves_s[:number])
        if number < len(stop.saves_s) and left_s <= stop.saves_s[number]:
            Path(self._marker).touch()
            _die_in(left_s)


def _note_complete_save(marker: str, rank: int, done: int) -> None:
    """Notes in a file that a save is over: of a stopped run nothing else says it."""
    with open(f"{marker}.saves{rank}", "a") as file:
        file.write(f"{done}\n")


def complete_saves(marker: str, rank: int, done: int) -> int:
    """Counts a rank's saves after so many steps that were over when a run was stopped."""
    try:
        return Path(f"{marker}.saves{rank}").read_text().split().count(str(done))
    except FileNotFoundError:  # it has none
        return 0


def _terminate(grace_s: float) -> None:
    _die_in(grace_s)
    os.kill(os.getpid(), signal.SIGTERM)


def _die_in(seconds: float) -> None:
    """Ends the process by SIGALRM, which needs no turn of Python's: a save may not give any."""
    if threading.current_thread() is threading.main_thread():  # Python allows it there alone
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))  # 0 would be never


def _saving_functions() -> list[Callable[..., Any]]:
    """Returns the functions by which scripts and libraries save tensors, as far as this script has imported them."""
    names = {"torch": ("save",), "torch.distributed.checkpoint": ("save", "async_save"),
             "safetensors.torch": ("save_file", "save_model")}  # fmt: skip
    there = {module: functions for module, functions in names.items() if module in sys.modules}
    return [getattr(sys.modules[module], name) for module, functions in there.items() for name in functions]
