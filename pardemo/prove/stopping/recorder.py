"""On a rank: what a run that may be stopped begins each step with, when it saves, and the stop itself."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pardemo import compat
from pardemo.measure import stand_ins
from pardemo.measure.places import Places
from pardemo.prove.record import pieces
from pardemo.prove.record.parameters import Wanted
from pardemo.prove.record.recorder import Recorder
from pardemo.prove.runner import STATE
from pardemo.prove.stopping import generators, kept
from pardemo.prove.stopping.state import KEPT, Optimizers
from pardemo.prove.stopping.stops import Stop


@dataclass(frozen=True)
class Following:
    """What is followed beside the steps: the folder in which the script saves, and the stop, if there is one.

    ``marker``: a file that is there from the stop on: to a launcher that is to be killed from outside it says that the
    time has come, and behind a run that ended with an error, that the stop was its end.
    """

    folder: str
    stop: Stop | None = None
    marker: str = ""


class StoppingRecorder(Recorder):
    """Writes down, beside all that prove does, states of optimizers and random numbers, and saves; and stops."""

    def __init__(self, places: Places, rank: int, wanted: Wanted, following: Following):
        super().__init__(places, rank, wanted)
        self._following = following
        self._optimizers = Optimizers()
        self._files: set[tuple[str, int, int]] = set()
        self._saving = threading.local()
        self._saves: dict[int, list[float]] = {}  # seconds of each, by how many steps were over
        self._stopped = self._sees_saves = self._asynchronous = False
        self._over, self._to_stop = threading.Event(), threading.Lock()

    def __enter__(self) -> "StoppingRecorder":
        super().__enter__()
        own = torch.optim.Optimizer
        for begins in ("__init__", "__setstate__"):  # made, or read from a file as it was
            self._changes.enter_context(compat.replaced(own, begins, self._optimizers.noted(getattr(own, begins))))
        self._files = self._present()
        if self._following.stop is not None and self._following.stop.kind == "term":
            threading.Thread(target=self._stop_with_the_first, daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        super().__exit__(*raised)

    @property
    def _done(self) -> int:
        """Steps that are over; also one whose parameters are still to be written down."""
        return len(self.steps) - 1 + self._pending

    # --- what a step begins with

    def _on_model(self, module: torch.nn.Module) -> None:
        self._take_pending()
        if not self._sees_saves:  # by now the script has imported what it saves with
            self._sees_saves = True
            saving = [(f, self._noted(f)) for f in _saving_functions()]
            self._changes.enter_context(stand_ins.replaced_everywhere(saving))
            if (ours := sys.modules.get("pardemo.zero")) is not None:  # whose names stand-ins leave alone
                self._changes.enter_context(compat.replaced(ours, "save", self._noted(ours.save)))
        if not self.now.micro_batches:
            self.now.saves, self.now.asynchronous = self._saves.pop(self._done, []), self._asynchronous
            self.now.generators = generators.places()
            if self._rank == 0:
                files = self._present()
                self.now.saved, self._files = files != self._files, files
            self._may_stop("forward")
        super()._on_model(module)

    def _note_parameters(self, when: str) -> None:
        if when == "before":
            self._may_stop("backward")
            names = {key: of[0] for root in self._models() for key, (_, of) in pieces.names_of(root).items()}
            for name, slot, value in self._optimizers.states(names):
                self._tensors[f"{STATE}{slot}/{name}"] = value if value.dim() == 0 else self._taken(name, value)
            with torch.no_grad():
                for name, value in kept.kept(self._places.is_own, self._models()):
                    self._tensors[f"{STATE}{KEPT}/{name}"] = self._taken(name, value)
        super()._note_parameters(when)

    def _finish(self) -> None:
        self._may_stop("step")
        super()._finish()

    # --- saves

    def _present(self) -> set[tuple[str, int, int]]:
        """Files in the script's folder: name, size, time of the last change."""
        found = set()
        for folder, _, names in os.walk(self._following.folder):  # which passes over what another rank has just removed
            for name in names:
                with contextlib.suppress(OSError):  # it is being replaced
                    known = os.stat(os.path.join(folder, name))
                    found.add((os.path.join(folder, name), known.st_size, known.st_mtime_ns))
        return found

    def _noted(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """A function that saves, which notes how long it took; the outermost one of those within each other."""

        def saved(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._saving, "now", False):
                return save(*args, **kwargs)
            done = self._done
            earlier = self._saves.setdefault(done, [])
            self._saving.now, begin_s = True, time.perf_counter()
            in_thread = threading.current_thread() is not threading.main_thread()
            self._asynchronous |= in_thread or save.__name__ == "async_save"
            self._stop_in_save(done, len(earlier))
            try:
                return save(*args, **kwargs)
            finally:
                self._saving.now = False
                earlier.append(time.perf_counter() - begin_s)
                if self._following.marker:
                    _note_whole(self._following.marker, self._rank, done)

        return saved

    # --- the stop

    def _may_stop(self, moment: str) -> None:
        stop = self._following.stop
        if stop is None or self._stopped or stop.kind == "save":
            return
        if (stop.moment, stop.done) != (moment, len(self.steps) - 1) or self._rank not in stop.ranks:
            return
        with self._to_stop:
            if self._stopped:  # it was told together with the first
                return
            self._stopped = True
            Path(self._following.marker).touch()
            if stop.kind == "term":
                _terminate(stop.grace_s)
                return
        if stop.kind == "launcher":
            time.sleep(60)  # until the launcher is gone, and this rank with it
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop_with_the_first(self) -> None:
        """A scheduler tells all ranks at one moment, at which each of them is somewhere else."""
        assert self._following.stop is not None
        while not self._over.wait(0.002):
            if os.path.exists(self._following.marker):
                with self._to_stop:
                    if not self._stopped:
                        self._stopped = True
                        _terminate(self._following.stop.grace_s)
                return

    def _stop_in_save(self, done: int, number: int) -> None:
        """Before a save, the ``number``-th behind its step: begins to count down if the stop comes within it."""
        stop = self._following.stop
        if stop is None or stop.kind != "save" or stop.done != done:
            return
        left_s = stop.share * sum(stop.saves_s) - sum(stop.saves_s[:number])
        if number < len(stop.saves_s) and left_s <= stop.saves_s[number]:
            Path(self._following.marker).touch()
            _die_in(left_s)


def _note_whole(marker: str, rank: int, done: int) -> None:
    """Of a run that is stopped nothing else is left to say which of a rank's saves were over."""
    with open(f"{marker}.saves{rank}", "a") as file:
        file.write(f"{done}\n")


def whole_saves(marker: str, rank: int, done: int) -> int:
    """How many saves of a rank's behind so many steps were over when a run was stopped."""
    try:
        return Path(f"{marker}.saves{rank}").read_text().split().count(str(done))
    except FileNotFoundError:  # it has none
        return 0


def _terminate(grace_s: float) -> None:
    _die_in(grace_s)
    os.kill(os.getpid(), signal.SIGTERM)


def _die_in(seconds: float) -> None:
    """SIGALRM, whose default is the end of the process: it needs no turn of Python's, which a save may not give."""
    if threading.current_thread() is threading.main_thread():  # Python allows it there alone
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))  # 0 would be never


def _saving_functions() -> list[Callable[..., Any]]:
    """What scripts and libraries save tensors by, as far as this script has imported it."""
    names = {"torch": ("save",), "torch.distributed.checkpoint": ("save", "async_save"),
             "safetensors.torch": ("save_file", "save_model")}  # fmt: skip
    there = {of: functions for of, functions in names.items() if of in sys.modules}
    return [getattr(sys.modules[of], name) for of, functions in there.items() for name in functions]
