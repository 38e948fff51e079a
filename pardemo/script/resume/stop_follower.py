"""Records on a rank what each step begins with and when the script saves, and stops the script."""

import contextlib
import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from pardemo import compat
from pardemo.compat import local_part
from pardemo.script.record.parameters import living_optimizers
from pardemo.script.record.pieces import parameter_names
from pardemo.script.record.rank_record import STATE
from pardemo.script.record.recorder import Recorder
from pardemo.script.resume import GRACE_S
from pardemo.script.runtime import stand_ins
from pardemo.script.runtime.libraries import is_script
from pardemo.world.errors import ranks_text

#: How a run ends before its end, and in words.
KINDS = {
    "rank": "SIGKILL of one rank",
    "all": "SIGKILL of all ranks",
    "launcher": "SIGKILL of the launcher",
    "save": "SIGKILL during a save",
    "term": "SIGTERM to all ranks",
}
#: Where in a step a rank is stopped: before its first forward pass, before the optimizer's step, right after it.
MOMENTS = {"forward": "before", "backward": "in", "step": "after"}
NEVER = "the stop never came: the script went another way than in the undisturbed run"


@dataclass(frozen=True)
class Stop:
    """A stop of the script: its kind, its moment, and the ranks that get the signal.

    ``done``: steps of the optimizer that are over when it comes; with the moment ``step`` one more, and nothing behind
    it. ``ranks``: those that get the signal. ``share``: of a save, the part of its time that is over; ``saves_s``: the
    seconds of all saves behind that step, in the undisturbed run.
    """

    kind: str
    done: int
    moment: str
    ranks: tuple[int, ...]
    share: float = 0.0
    saves_s: tuple[float, ...] = ()
    grace_s: float = GRACE_S

    @property
    def text(self) -> str:
        """``SIGKILL of rank 1 in step 5``."""
        who = f"SIGKILL of {ranks_text(list(self.ranks))}" if self.kind == "rank" else KINDS[self.kind]
        if self.kind == "save":
            return f"{who} after step {self.done}"
        return f"{who} {MOMENTS[self.moment]} step {self.done + 1}"


def draw_stops(
    kinds: Sequence[str],
    steps: int,
    saved: Sequence[int],
    saves_s: Mapping[int, Sequence[float]],
    ranks: int,
    seed: int,
) -> list[Stop]:
    """Draws a stop of each kind.

    Args:
        steps: of the undisturbed run. saved: numbers of steps behind which files had changed. saves_s: the seconds of
            the saves that were seen behind a number of steps; where there are none, a stop of the kind ``save`` is
            left out.

    Raises:
        ValueError: nothing is saved before the last two steps, so that nothing could be resumed.
    """
    places = [done for done in range(steps - 1) if any(0 < number <= done for number in saved)]
    if not places:
        first = f"the first save comes after step {min(saved)}" if saved else "nothing is written to {folder}"
        raise ValueError(f"{first}, and {steps} steps are run: raise --steps, or let the script save more often")
    draw = random.Random(seed)
    made = []
    for kind in kinds:
        done, moment = draw.choice(places), draw.choice(list(MOMENTS))
        drawn_rank, share = draw.randrange(ranks), draw.random()
        if kind == "save":
            later = [place for place in saves_s if any(0 < number < place for number in saved) and place < steps]
            if not later:
                continue
            done, moment = draw.choice(later), "forward"
        which = (drawn_rank,) if kind == "rank" else tuple(range(ranks))
        made.append(Stop(kind, done, moment, which, share, tuple(saves_s[done]) if kind == "save" else ()))
    return made


#: Kinds of states that no optimizer has: of what the script keeps beside the model, and its copies of the parameters.
KEPT, COPIES = "kept", "copies"
#: Optimizers' names for what they keep, in words.
SLOTS = {
    "exp_avg": "the optimizer's first moment", "exp_avg_sq": "the optimizer's second moment",
    "momentum_buffer": "the optimizer's momentum", "max_exp_avg_sq": "the optimizer's largest second moment",
    "step": "the optimizer's count of steps", "square_avg": "the optimizer's mean of squares",
    "sum": "the optimizer's sum of squares", KEPT: "what the script keeps beside the model",
    COPIES: "the script's copy of the parameters",
}  # fmt: skip


def optimizer_states(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields each parameter that is stepped by name, with each of its states: its name, and this rank's part.

    ``names``: of the models' parameters, by their ids. Others are called by where they are in their optimizer.
    """
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"optimizer {number}.{place}.{index}")
                for slot, value in optimizer.state.get(parameter, {}).items():
                    if (tensor := _plain_tensor(value)) is not None:
                        yield name, str(slot), tensor


def _plain_tensor(value: Any) -> torch.Tensor | None:
    """Copies this rank's part of a state; None of what is no number."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, torch.Tensor):
        return None
    return _copy_of_part(value)


def _copy_of_part(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor).detach().cpu().clone().contiguous()


#: Elements from which a tensor in a state is worth a word: counters and rates are compared as what they do.
LEAST = 2
#: Elements of a list or dict that are looked at: one with more holds samples.
MOST = 100


def kept_beside(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors of modules and of objects with a ``state_dict`` in the script's functions, by kind and name.

    Of those that run now: their variables and the script's globals, and in these elements of lists and dicts and
    attributes of objects of its own classes. Plain tensors where they are as many, and of the same shapes, as the
    parameters, as an average is that somebody has written by hand.

    Args:
        models: what is trained, which is compared by itself.
    """
    models = list(models)
    parameters = [parameter for root in models for parameter in root.parameters()]
    buffers = [buffer for root in models for buffer in root.buffers()]
    shapes = [_shapes_of([p for p in parameters if p.requires_grad]), _shapes_of([*parameters, *buffers])]
    trained = {id(part) for root in models for part in root.modules()}
    trained |= {id(tensor) for parameter in parameters for tensor in (parameter, parameter.grad)}
    places = {_place(parameter) for parameter in parameters} - {0}
    seen: set[int] = set()
    for name, value in _reachable():
        if id(value) in seen or id(value) in trained or isinstance(value, (torch.optim.Optimizer, type)):
            continue
        seen.add(id(value))
        kind = KEPT
        state: Any = {}
        if isinstance(value, torch.nn.Module):
            if any(id(parameter) in trained for parameter in value.parameters()):
                continue  # the model in another wrapper, or with a part of it
            state = value.state_dict()
        elif hasattr(value, "load_state_dict") and hasattr(value, "state_dict"):
            state = _state_of(value)
        elif isinstance(value, (dict, list)) and len(value) > 1:
            some = list(value.values()) if isinstance(value, dict) else value
            kind, of_some = COPIES, _shapes_of(some)
            if of_some and of_some in shapes and not any(id(one) in trained or _place(one) in places for one in some):
                state = value
        for slot, tensor in _state_tensors(name, state):
            yield f"{kind}/{slot}", tensor


def _shapes_of(some: list[Any]) -> list[tuple[int, ...]]:
    return sorted(tuple(one.shape) for one in some) if all(isinstance(one, torch.Tensor) for one in some) else []


def _place(tensor: torch.Tensor) -> int:
    return local_part(tensor).data_ptr()


def _reachable() -> Iterator[tuple[str, Any]]:
    frame: FrameType | None = sys._getframe(1)
    files: set[str] = set()
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            scopes = [frame.f_locals, *([frame.f_globals] if frame.f_code.co_filename not in files else [])]
            files.add(frame.f_code.co_filename)
            for name, value in (item for scope in scopes for item in list(scope.items())):
                if not name.startswith("__"):
                    yield from _held(name, value)
        frame = frame.f_back


def _held(name: str, value: Any, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yields a value, and what is in it: elements of lists and dicts, attributes of objects of the script's classes."""
    yield name, value
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value[:MOST])
    elif type(value).__module__ == "__main__" and not isinstance(value, (torch.nn.Module, type)):
        items = getattr(value, "__dict__", {}).items()
    for key, inner in list(items)[:MOST] if depth else ():
        if not isinstance(inner, (torch.Tensor, str, int, float)):
            yield from _held(f"{name}.{key}", inner, depth - 1)


def _state_of(value: Any) -> Any:
    try:
        return value.state_dict()
    except Exception:
        return {}


def _state_tensors(name: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        if local_part(state).numel() >= LEAST:
            yield name, _copy_of_part(state)
    elif isinstance(state, (Mapping, list, tuple)):
        for key, inner in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _state_tensors(f"{name}.{key}", inner)


class StopFollower:
    """Records states of optimizers, random numbers and saves beside all that prove records, and stops the script.

    Args:
        folder: in which the script saves. stop: that is to come, if one is.
        marker: a file that is there from the stop on: to a launcher that is to be killed from outside it says that the
            time has come, and behind a run that ended with an error, that the stop was its end.
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
            for name, value in kept_beside(models):
                tensors[f"{STATE}{name}"] = parameters.recorded(name, value)

    # --- saves

    def _present(self) -> set[tuple[str, int, int]]:
        """Files in the script's folder: name, size, time of the last change."""
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
                _note_whole_save(self._marker, self._recorder.rank, done)

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
        """A scheduler tells all ranks at one moment, at which each of them is somewhere else."""
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


def _note_whole_save(marker: str, rank: int, done: int) -> None:
    """Of a run that is stopped nothing else is left to say which of a rank's saves were over."""
    with open(f"{marker}.saves{rank}", "a") as file:
        file.write(f"{done}\n")


def whole_saves(marker: str, rank: int, done: int) -> int:
    """Counts a rank's saves after so many steps that were over when a run was stopped."""
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
    """Returns the functions by which scripts and libraries save tensors, as far as this script has imported them."""
    names = {"torch": ("save",), "torch.distributed.checkpoint": ("save", "async_save"),
             "safetensors.torch": ("save_file", "save_model")}  # fmt: skip
    there = {module: functions for module, functions in names.items() if module in sys.modules}
    return [getattr(sys.modules[module], name) for module, functions in there.items() for name in functions]


def generator_states() -> dict[str, str]:
    """Returns a hash of each generator's state, by name; numpy's only if something has imported it."""
    states: dict[str, bytes] = {
        "torch's": torch.get_rng_state().numpy().tobytes(),
        "Python's": repr(random.getstate()).encode(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state()
        states["numpy's"] = keys.tobytes() + repr(rest).encode()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}
