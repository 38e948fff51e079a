"""Lets a script that was written for CUDA and nccl run unchanged on a CPU rank.

``cuda`` as a device is the CPU, nccl is gloo, and a script that asks is told that it has a GPU, while torch's and the
libraries' own code is told the truth and goes its way for CPUs. What that changes stands in :data:`TABLE`, and a run
is told of those of its rows that it met.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from pardemo import compat
from pardemo.script.runtime import libraries, stand_ins
from pardemo.script.runtime.libraries import NeedsGpu, is_script
from pardemo.script.runtime.stand_ins import (
    CPU,
    answering_scripts,
    caller,
    is_cuda,
    script_asks,
    with_changed_arguments,
)
from pardemo.world import bf16


class Row(NamedTuple):
    """A form that a script may write, what it gets on a CPU rank, and whether a run that meets it notes it."""

    written: str
    here: str
    noted: bool = True


#: All that is different under :func:`without_gpu`.
TABLE = {
    "device": Row(
        'cuda as a device: .cuda(), .to("cuda"), device=, map_location=, set_default_device',
        "the CPU; nothing is copied, so what is moved shares its memory with what it was moved from",
    ),
    "nccl": Row("the backend nccl, also in cpu:gloo,cuda:nccl; device_id and pg_options of groups", "the backend gloo"),
    "wrappers": Row("device_ids, output_device of DDP; device_id of FSDP1; a mesh of cuda", "the CPU's", noted=False),
    "asked": Row(
        "torch.cuda.is_available(), device_count(), torch.accelerator, is_nccl_available(), x.device, x.is_cuda",
        "a GPU for each rank of a host, where the script asks; none where a library does",
        noted=False,
    ),
    "properties": Row(
        "get_device_capability(), get_device_properties(), mem_get_info(), is_bf16_supported()",
        "compute capability 8.0 with bf16, and the memory of this machine",
    ),
    "current": Row("set_device(), current_device(), torch.cuda.device", "a number that is kept", noted=False),
    "nothing": Row("synchronize(), empty_cache(), nvtx, the profiler's start and stop", "nothing", noted=False),
    "streams": Row("streams and events", "work runs at once, in the order of the script; events read the clock"),
    "memory": Row("torch.cuda's memory statistics", "zeros: no allocator of a GPU runs"),
    "seeds": Row("torch.cuda's seeds and random states", "the CPU's generator, the only one: the last seed counts"),
    "random": Row(
        "random numbers in a DTensor",
        "each rank draws its own part from its own generator: equal parts where the seeds are equal",
    ),
    "pin_memory": Row("pin_memory, .pin_memory()", "ordinary memory"),
    "autocast": Row(
        "autocast on cuda", "autocast on the CPU in the same dtype; it has a list of its own of what runs in fp32"
    ),
    "GradScaler": Row("GradScaler on cuda", "GradScaler on the CPU: it scales, and skips steps alike", noted=False),
    "foreach": Row("an optimizer's default implementation", "foreach, as on a GPU", noted=False),
    "fused": Row("an optimizer with fused=True", "torch's fused implementation for CPUs"),
    "capturable": Row("an optimizer with capturable=True", "capturable=False: there are no CUDA graphs"),
    "tf32": Row("TF32 switched on", "fp32: the CPU's matrix multiplications take no notice"),
    "bf16": Row(
        "bf16 matrix multiplications on a processor without AVX-512",
        "through fp32, and rounded once to bf16: the processor's own take 40 times as long",
    ),
    "compile": Row("torch.compile", "not compiled: operations run one by one, and keep what a compiler would not"),
    "graphs": Row("CUDA graphs", "refused", noted=False),
    "kernels": Row(", ".join(libraries.GPU_ONLY), "refused, with what to choose instead", noted=False),
    "DataParallel": Row("torch.nn.DataParallel", "refused: a rank is one device", noted=False),
    "threads": Row("cuda in a thread of the script", "the CPU there, too", noted=False),
}  # fmt: skip


@contextlib.contextmanager
def without_gpu(notes: list[str]) -> Iterator[None]:
    """Within the block a script for CUDA runs on this CPU rank; what that changed for it is appended to ``notes``.

    With a real GPU it does nothing. Everything is as before afterwards, also in modules that were imported meanwhile.

    Raises:
        NeedsGpu: the script asked for a kernel that exists on GPUs only; one line, with what to choose instead.
    """
    if torch.cuda.is_available():
        yield
        return

    def note(key: str) -> None:
        if TABLE[key].noted:
            libraries.note_once(notes, f"{TABLE[key].written} → {TABLE[key].here}")

    tf32, multiplied = _tf32(), bf16.multiplied()
    with contextlib.ExitStack() as stack:
        stack.enter_context(libraries.adjusted_libraries(notes))
        mode = _CpuForCuda(note)
        for owner, name, value in _class_replacements(mode):
            stack.enter_context(compat.replaced(owner, name, value))
        functions = [
            *stand_ins.cuda_replacements(mode),
            *stand_ins.torch_replacements(mode),
            *_distributed_replacements(mode),
        ]
        stack.enter_context(stand_ins.replaced_everywhere(functions))
        stack.callback(lambda: mode.eager and torch.compiler.set_stance("default"))
        stack.callback(_default_device, torch.get_default_device())
        stack.enter_context(mode)
        yield
        if _tf32() != tf32:
            note("tf32")
        if bf16.multiplied() > multiplied:
            note("bf16")


def _default_device(before: torch.device) -> None:
    if torch.get_default_device() != before or before != CPU:
        torch.set_default_device(before)
    if before == CPU:
        torch.set_default_device(None)


def _tf32() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


class _CpuForCuda(TorchFunctionMode):
    """Every function of torch that is given ``cuda`` gets the CPU."""

    def __init__(self, note: Callable[[str], None]):
        super().__init__()
        self.note, self.index, self.eager = note, 0, False
        tensor, init = torch.Tensor, torch.nn.init
        random = (tensor.normal_, tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_)
        self._replaced: dict[Any, Callable] = {
            **dict.fromkeys((*random, torch.nn.functional.dropout), self._random),
            torch.device: self._device,
            tensor.to: self.to,
            tensor.cuda: lambda func, x, device=None, non_blocking=False, **options: self.to(
                tensor.to, x, "cuda", **options
            ),
            tensor.pin_memory: lambda func, x, *_: (self.note("pin_memory"), x)[1],
            tensor.device.__get__: self._device_of,  # type: ignore[attr-defined]
            tensor.is_cuda.__get__: lambda func, x: script_asks(3) and x.device.type == "cpu",  # type: ignore[attr-defined]
            tensor.get_device: lambda func, x: self.index if script_asks(3) else func(x),
            tensor.type: self._type,
        }
        #: methods in whose place others may stand, who watch what is cast or drawn: torch tells a mode of theirs
        self._watched = {method.__name__: method for method in (tensor.to, tensor.normal_, tensor.uniform_)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self._watched and func is getattr(torch.Tensor, name):
            func = self._watched[name]
        if func in self._replaced:
            return self._replaced[func](func, *args, **(kwargs or {}))
        if kwargs:
            if is_cuda(kwargs.get("device")):
                self.note("device")
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                self.note("pin_memory")
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))

    def _device(self, func: Any, *args: Any, **kwargs: Any) -> torch.device:
        """The script's own keep their name, since it may ask them for their type; a library gets the CPU."""
        if len(args) == 1 and not kwargs and type(args[0]) is int:
            args = ("cuda", args[0])
        made = func(*args, **kwargs)
        return CPU if made.type == "cuda" and not script_asks(3) else made

    def _device_of(self, func: Any, x: torch.Tensor) -> torch.device:
        device = func(x)
        return torch.device("cuda", self.index) if device.type == "cpu" and script_asks(3) else device

    def to(self, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """``x.to(…)`` of a tensor or a module."""
        if args and is_cuda(args[0]):
            args = (CPU, *args[1:])
            self.note("device")
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
            self.note("device")
        return func(x, *args, **kwargs)

    def _random(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if type(args[0] if args else kwargs.get("tensor")).__name__ == "DTensor":
            self.note("random")
        return func(*args, **kwargs)

    def _type(self, func: Any, x: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        file = caller(3).f_code.co_filename
        if dtype is None:
            name = func(x)  # Megatron-core compares it with the names of tensors on GPUs
            return name.replace("torch.", "torch.cuda.") if is_script(file) or "/megatron/" in file else name
        return func(x, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *args, **kwargs)


def _distributed_replacements(mode: _CpuForCuda) -> Iterator[tuple[Any, Any]]:
    """Returns the replacements of torch.distributed."""

    def to_gloo(arguments: dict[str, Any]) -> None:
        if arguments.get("backend") is None or "nccl" in arguments["backend"].lower():
            mode.note("nccl")
            arguments["backend"] = "gloo"
        for name in {"device_id", "pg_options"} & set(arguments):
            del arguments[name]

    yield dist.init_process_group, with_changed_arguments(dist.init_process_group, to_gloo)
    yield (
        dist.new_group,
        with_changed_arguments(
            dist.new_group, lambda arguments: to_gloo(arguments) if arguments.get("backend") else None
        ),
    )
    backend = dist.get_default_backend_for_device
    yield backend, answering_scripts(backend, lambda device: "nccl" if is_cuda(device) else backend(device))
    yield dist.is_nccl_available, answering_scripts(dist.is_nccl_available, lambda: True)


def _class_replacements(mode: _CpuForCuda) -> Iterator[tuple[Any, str, Any]]:
    """Attributes that are replaced: of a class, its name, by what."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    note = mode.note

    def autocast(arguments: dict[str, Any]) -> None:
        if arguments["device_type"] == "cuda":
            arguments["device_type"] = "cpu"
            if arguments.get("dtype") is None:
                arguments["dtype"] = torch.get_autocast_dtype("cuda")  # the CPU's own default is another
            if arguments.get("enabled", True):
                note("autocast")

    def scaler(arguments: dict[str, Any]) -> None:
        arguments["device"] = "cpu" if is_cuda(arguments.get("device", "cuda")) else arguments["device"]

    def wrapper(arguments: dict[str, Any]) -> None:
        for name in {"device_ids", "output_device"} & set(arguments):
            del arguments[name]

    def fsdp1(arguments: dict[str, Any]) -> None:
        arguments["device_id"] = CPU

    def mesh(arguments: dict[str, Any]) -> None:
        if arguments["device_type"] == "cuda":
            note("nccl")  # of its groups, unless the script has made one of gloo
            arguments["device_type"] = "cpu"

    def loader(arguments: dict[str, Any]) -> None:
        if arguments.pop("pin_memory", False):
            note("pin_memory")
        arguments.pop("pin_memory_device", None)

    add = torch.optim.Optimizer.add_param_group

    def add_param_group(self: Any, group: Any) -> None:
        add(self, group)
        new = self.param_groups[-1]
        if new.get("fused"):
            note("fused")
        if new.get("capturable"):
            note("capturable")
            new["capturable"] = False
        plain = {torch.Tensor, torch.nn.Parameter}
        if "foreach" in new and new["foreach"] is None and not new.get("fused") and not new.get("differentiable"):
            kinds = {type(p) for p in new["params"]} - plain
            if not isinstance(new.get("lr"), torch.Tensor) and all(kind.__name__ == "DTensor" for kind in kinds):
                new["foreach"] = True

    def refuse(arguments: dict[str, Any]) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise NeedsGpu("DataParallel cuts one process's batch over many GPUs: choose DistributedDataParallel")

    def backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with mode:  # put aside while it was called: for hooks, and for what is computed again
            return run(*args, **kwargs)

    module_to, start = torch.nn.Module.to, threading.Thread.start

    def start_on_cpu(self: Any) -> None:
        run = self.run

        def run_on_cpu() -> None:
            with mode:
                run()

        self.run = run_on_cpu
        start(self)

    for owner, change in (
        (torch.amp.autocast_mode.autocast, autocast),
        (torch.amp.grad_scaler.GradScaler, scaler),
        (torch.nn.parallel.DistributedDataParallel, wrapper),
        (torch.nn.DataParallel, refuse),
        (FullyShardedDataParallel, fsdp1),
        (dist.device_mesh.DeviceMesh, mesh),
        (DataLoader, loader),
    ):
        yield owner, "__init__", with_changed_arguments(owner.__init__, change)
    yield torch.optim.Optimizer, "add_param_group", add_param_group
    yield compat.engine_replaced(backward)
    yield torch.nn.Module, "to", lambda self, *args, **kwargs: mode.to(module_to, self, *args, **kwargs)
    yield torch.Tensor, "record_stream", stand_ins.no_op
    yield torch.UntypedStorage, "cuda", lambda self, *_, **__: self
    yield torch.TypedStorage, "cuda", lambda self, *_, **__: self
    yield torch.cuda, "default_generators", (torch.default_generator,) * 64
    yield threading.Thread, "start", start_on_cpu
    yield dist.Work, "get_future", stand_ins.with_future(dist.Work.get_future)


@functools.cache
def teach_dtensor() -> None:
    """Has DTensors take the CPU's flash attention, as they take the GPU's; in this process, from here on."""
    register_sharding(compat.attention_cpu.default)(_equal_placements(2, 3))  # of output, logsumexp; query, key, value
    register_sharding(compat.attention_cpu_backward.default)(_equal_placements(3, 6))  # of three gradients


def _equal_placements(outputs: int, inputs: int) -> Callable[..., list[tuple[list, list]]]:
    """Acceptable placements of so many outputs and inputs, along the axes that need nothing of the other ranks."""

    def placements(*args: Any, attn_mask: Any = None, **_: Any) -> list[tuple[list, list]]:
        if attn_mask is not None:
            raise NeedsGpu("attention with a mask on DTensors runs on GPUs only: choose is_causal, or local tensors")
        rest = [None] * (len(args) - inputs)
        return [([way] * outputs, [way] * inputs + rest) for way in (Replicate(), Shard(0), Shard(1))]  # samples, heads

    return placements
