"""Stands in for torch.cuda on a CPU rank: mocks its functions, streams, events and generators."""

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import psutil
import torch

from pardemo.script.runtime import libraries
from pardemo.script.runtime.libraries import NeedsGpu, is_script

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class StandInState(Protocol):
    """The state that stand-ins share on a rank: its device, whether torch.compile is off, how to note a difference."""

    index: int
    eager: bool
    note: Callable[[str], None]


def is_cuda(device: Any) -> bool:
    """Whether a device, in any form that torch takes, is a GPU: ``"cuda"``, ``"cuda:1"``, 1, a ``torch.device``."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return device.startswith("cuda") if isinstance(device, str) else type(device) is int


def caller(depth: int) -> types.FrameType:
    """Returns the frame that is ``depth`` up the stack, without those of torch function modes above it."""
    frame = sys._getframe(depth)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def script_asks(depth: int = 2) -> bool:
    """Whether the function ``depth`` frames up is the script's, or a library's that is to see a GPU as scripts do."""
    frame = caller(depth + 1)
    if is_script(frame.f_code.co_filename) or frame.f_code.co_qualname.partition(".")[0] in libraries.TOLD_OF_GPUS_IN:
        return True
    return frame.f_globals.get("__name__", "").partition(".")[0] in libraries.TOLD_OF_GPUS


def no_op(*_: Any, **__: Any) -> None:
    """Does nothing, in place of functions that a CPU has no need of."""


class Event:
    """Replaces a GPU's event: it reads the clock at once, as all earlier work of a CPU is done."""

    def __init__(self, *_: Any, **__: Any):
        self.at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return (end.at_s - self.at_s) * 1000

    def query(self) -> bool:
        return True

    wait = synchronize = staticmethod(no_op)


class Stream:
    """Replaces a GPU's stream, and does nothing: on a CPU all work runs in the script's order."""

    device, device_index, cuda_stream, stream_id, priority = torch.device("cuda", 0), 0, 0, 0, 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    wait_event = wait_stream = synchronize = staticmethod(no_op)


_GENERATOR = torch.Generator


class _AnyGenerator(type(_GENERATOR)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _GENERATOR)


class Generator(_GENERATOR, metaclass=_AnyGenerator):
    """Replaces a generator for cuda by a CPU's generator."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _GENERATOR("cpu" if is_cuda(device) else device)


class _Future(torch.futures.Future):
    """Replaces the future that gloo's collectives lack and nccl's have: waiting for it waits for the collective."""

    def __init__(self, work: Any):
        super().__init__()
        self._work = work

    def _over(self) -> None:
        if not super().done():
            self._work.wait()
            self.set_result([])  # nccl's has the outputs, which gloo's work does not know

    def wait(self) -> Any:
        self._over()
        return super().wait()

    def then(self, callback: Callable) -> Any:
        self._over()
        return super().then(callback)

    def add_done_callback(self, callback: Callable) -> None:
        self._over()
        super().add_done_callback(callback)


def with_future(get: Callable) -> Callable:
    """Returns a ``Work.get_future`` that also works for gloo's collectives, which have no future."""

    def get_future(work: Any) -> Any:
        try:
            return get(work)
        except RuntimeError:
            return _Future(work)

    return answering_scripts(get, get_future)


def _zero(*_: Any, **__: Any) -> int:
    return 0


def answering_scripts(real: Callable, answer: Callable) -> Callable:
    """Returns a function that calls ``answer`` for the script, and for libraries that follow it; else ``real``."""

    @functools.wraps(real)
    def ask(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs) if script_asks() else real(*args, **kwargs)

    return ask


def with_changed_arguments(real: Callable, change: Callable[[dict[str, Any]], None]) -> Callable:
    """Returns ``real`` with changed arguments: ``change`` gets those of a call, by name, and edits them."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        change(bound.arguments)
        return real(*bound.args, **bound.kwargs)

    return call


def outermost_calls(
    functions: Iterable[Callable[..., Any]], around: Callable[..., Any]
) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Pairs each function with a replacement that calls ``around(function, *args, **kwargs)``.

    Calls of any of the functions within such a call are not replaced: torch's functions call one another, and a mode
    calls them again.
    """
    state = threading.local()

    def outermost(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(state, "inside", False):
                return function(*args, **kwargs)
            state.inside = True
            try:
                return around(function, *args, **kwargs)
            finally:
                state.inside = False

        return call

    return [(function, outermost(function)) for function in functions]


def cuda_replacements(mode: StandInState) -> Iterator[tuple[Any, Any]]:
    """Yields the functions and classes of torch.cuda and torch.accelerator, each with its stand-in."""
    cuda, accelerator, note = torch.cuda, torch.accelerator, mode.note

    def ranks(*_: Any) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def set_device(device: Any) -> None:
        if isinstance(device, str):
            device = int(device.partition(":")[2] or mode.index)
        index = device.index if isinstance(device, torch.device) else device
        mode.index = mode.index if index is None else index

    @contextlib.contextmanager
    def device(device: Any = None) -> Iterator[None]:
        before = mode.index
        if device is not None and not isinstance(device, torch.Tensor):
            set_device(device)
        try:
            yield
        finally:
            mode.index = before

    def properties(*_: Any) -> Any:
        note("properties")
        total = psutil.virtual_memory().total
        return types.SimpleNamespace(name="a CPU rank", major=8, minor=0, total_memory=total, multi_processor_count=108,
                                     warp_size=32, is_integrated=0, is_multi_gpu_board=0)  # fmt: skip

    def seed(seed: int) -> None:
        if torch.initial_seed() != seed and not sys._getframe(1).f_globals["__name__"].startswith("torch."):
            note("seeds")
            torch.default_generator.manual_seed(seed)

    def noting(key: str, value: Callable) -> Callable:
        return lambda *args, **kwargs: (note(key), value(*args, **kwargs))[1]

    def refused(*_: Any, **__: Any) -> None:
        raise NeedsGpu("CUDA graphs exist on GPUs only: measure the script without them")

    yield cuda.is_available, answering_scripts(cuda.is_available, lambda: True)
    yield cuda.device_count, answering_scripts(cuda.device_count, ranks)
    yield accelerator.is_available, answering_scripts(accelerator.is_available, lambda: True)
    yield accelerator.device_count, answering_scripts(accelerator.device_count, ranks)
    current = lambda check_available=False: CUDA  # noqa: E731
    yield accelerator.current_accelerator, answering_scripts(accelerator.current_accelerator, current)
    yield cuda.is_initialized, answering_scripts(cuda.is_initialized, lambda: True)
    yield cuda.set_device, set_device
    yield accelerator.set_device_index, set_device
    yield cuda.current_device, lambda: mode.index
    yield accelerator.current_device_index, lambda: mode.index
    yield cuda.device, device
    yield cuda.device_of, device
    yield accelerator.device_index, device
    yield cuda.get_device_properties, properties
    yield cuda.get_device_name, lambda *_: properties().name
    yield cuda.get_device_capability, lambda *_: (properties().major, properties().minor)
    yield cuda.is_bf16_supported, lambda *_, **__: True
    yield cuda.is_tf32_supported, lambda: True
    memory = lambda *_: (psutil.virtual_memory().available, properties().total_memory)  # noqa: E731
    yield cuda.mem_get_info, memory
    yield accelerator.get_memory_info, memory
    for module, names in (
        (cuda, "init synchronize empty_cache ipc_collect set_per_process_memory_fraction set_stream"),
        (cuda, "reset_peak_memory_stats reset_accumulated_memory_stats reset_max_memory_allocated"),
        (cuda.nvtx, "range_push range_pop mark range_start range_end"),
        (cuda.profiler, "start stop"),
        (accelerator, "synchronize empty_cache set_stream reset_peak_memory_stats reset_accumulated_memory_stats"),
    ):
        yield from ((getattr(module, name), no_op) for name in names.split())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        yield getattr(cuda, name), noting("memory", _zero)
        yield getattr(accelerator, name), noting("memory", _zero)
    for module in (cuda, accelerator):
        yield module.memory_stats, noting("memory", lambda *_: defaultdict(int))
    yield cuda.memory_summary, noting("memory", lambda *_, **__: "")
    yield cuda.memory_snapshot, noting("memory", lambda *_, **__: [])
    yield from ((real, seed) for real in (cuda.manual_seed, cuda.manual_seed_all))
    yield cuda.initial_seed, torch.initial_seed
    yield cuda.get_rng_state, lambda device=None: torch.get_rng_state()
    yield cuda.get_rng_state_all, lambda: [torch.get_rng_state()]
    yield cuda.set_rng_state, lambda state, device=None: torch.set_rng_state(state)
    yield cuda.set_rng_state_all, lambda states: torch.set_rng_state(states[0]) if states else None
    stream = Stream()
    for kind, stand_in in ((cuda.Stream, Stream), (torch.Stream, Stream), (cuda.Event, Event), (torch.Event, Event)):
        yield kind, type(kind.__name__, (stand_in,), {"__init__": noting("streams", stand_in.__init__)})
    yield cuda.stream, lambda stream: contextlib.nullcontext()
    for real in (cuda.current_stream, cuda.default_stream, accelerator.current_stream):
        yield real, lambda *_: stream
    yield from ((real, refused) for real in (cuda.graph, cuda.make_graphed_callables, cuda.graph_pool_handle))


def torch_replacements(mode: StandInState) -> Iterator[tuple[Any, Any]]:
    """Yields the functions and classes of torch itself, each with its stand-in."""

    def to_cpu(arguments: dict[str, Any]) -> None:
        location = arguments.get("map_location")
        if isinstance(location, dict) or location is None or is_cuda(location):
            arguments["map_location"] = CPU

    def cpus(real: Callable) -> Callable:
        return lambda device="cuda": real("cpu" if device == "cuda" and on_cpu() else device)

    on_cpu = functools.partial(torch.is_autocast_enabled, "cpu")
    yield torch.load, with_changed_arguments(torch.load, to_cpu)
    yield torch.is_autocast_enabled, cpus(torch.is_autocast_enabled)
    yield torch.get_autocast_dtype, cpus(torch.get_autocast_dtype)
    yield torch.get_autocast_gpu_dtype, functools.partial(cpus(torch.get_autocast_dtype), "cuda")
    module_of = torch.get_device_module

    def module(device: Any = "cuda") -> Any:
        return torch.cuda if is_cuda(device or "cuda") else module_of(device)

    yield module_of, answering_scripts(module_of, module)
    yield torch.Generator, Generator
    compiler = torch.compile

    def compiled(*args: Any, **kwargs: Any) -> Any:
        mode.note("compile")
        if not mode.eager:  # it would trace the mode too, and cannot
            mode.eager = True
            torch.compiler.set_stance("force_eager")
        return compiler(*args, **kwargs)

    yield compiler, functools.wraps(compiler)(compiled)


class _Names:
    """Maps functions and classes to the modules of this process that name them, and rebinds these names.

    A module is read once, and again when it has more or fewer names. In a process that ranks are forked from, this
    makes it cheap for each of them: reading all modules there writes to most of their pages, which are shared.
    """

    def __init__(self) -> None:
        self._read: dict[int, tuple[dict[str, Any], int]] = {}  # namespaces, and how many names they had
        self._places: defaultdict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)  # by id of what is named

    def update(self) -> None:
        """Reads the modules that are new, or have more or fewer names than before."""
        for key, module in list(sys.modules.items()):
            if isinstance(module, types.ModuleType) and not key.startswith("pardemo."):
                names = vars(module)
                if (read := self._read.get(id(names))) is None or read[1] != len(names):
                    self._read[id(names)] = names, len(names)
                    for name, value in list(names.items()):
                        if callable(value):
                            self._places[id(value)].append((names, name))

    def replace(self, now: Any, then: Any) -> None:
        """Rebinds every name of the object ``now`` to ``then``."""
        for names, name in self._places.pop(id(now), ()):
            if names.get(name) is now:
                names[name] = then
                self._places[id(then)].append((names, name))


_NAMES = _Names()


def read_modules() -> None:
    """Reads the names of all modules before ranks are forked, so that :func:`replaced_everywhere` is cheap in each."""
    _NAMES.update()


@contextlib.contextmanager
def replaced_everywhere(pairs: list[tuple[Any, Any]]) -> Iterator[None]:
    """Replaces each function or class by its stand-in in all loaded modules, and puts it back at the end of the block.

    Args:
        pairs: each original with its stand-in. Names in modules that are imported within the block are put back, too.
    """
    # each original needs an object of its own: it is found again by that object's id
    replacements = [(real, ours if isinstance(ours, type) else functools.partial(ours)) for real, ours in pairs]
    _NAMES.update()
    for real, ours in replacements:
        _NAMES.replace(real, ours)
    try:
        yield
    finally:
        _NAMES.update()
        for real, ours in replacements:
            _NAMES.replace(ours, real)
