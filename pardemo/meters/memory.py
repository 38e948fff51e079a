"""Counts the bytes of live tensors by kind, storage by storage.

Works on CPU tensors, on fake tensors (``FakeTensorMode``: full-size models without the memory) and on CUDA,
where the allocator's own figures are reported as well. On the CPU the sum is checked against the allocator's
memory events (tests/test_meters.py).
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from pardemo import compat
from pardemo.meters.figures import Figures
from pardemo.meters.tensors import local_tensors, tensors_in, unwrap_optimizer

KINDS = ("parameters", "gradients", "optimizer states", "random states", "activations")
#: Functions that make a tensor past the dispatcher, and the kind of what they make.
_NOT_DISPATCHED = (
    (torch, "get_rng_state", "random states"),
    (torch.random, "get_rng_state", "random states"),  # by which fork_rng calls it
    (torch, "frombuffer", None),
)


class MemoryMeter(Figures, compat.TorchDispatchMode):
    """Follows every tensor storage that is made while the block runs.

    >>> with MemoryMeter(model, optimizer) as memory:        # doctest: +SKIP
    ...     loss_of(model(batch)).backward()
    ...     optimizer.step()
    >>> memory.peak_bytes, memory.peak["activations"]         # doctest: +SKIP

    Kinds: **parameters** (buffers too), **gradients** (what ``.grad`` holds), **optimizer states**, **random states**
    (of ``torch.get_rng_state``: activation checkpointing keeps one, 5 kB, with each checkpoint), and **activations**:
    everything else that was made in the block and is alive: what the backward pass waits for, and temporaries. What
    was there before, such as the batch, is counted only where it belongs to ``modules`` or ``optimizers``. A storage
    counts once, however many views it has, and with its full size in bytes. Tensors that other threads make are not
    seen (pardemo's own communication threads take the meter along). A storage that is resized (ZeRO-3 and FSDP2 free
    and refill whole parameters so) counts with the size it has; filled from nothing within the block, it is
    new, whoever made it.

    What is read from pickles, checkpoints and safetensors counts, and a tensor over memory that others have made
    (numpy's, a buffer's, a mapped file's) with that memory. Not seen: a storage that no tensor shows, what
    ``torch.Generator.get_state`` and ``torch.from_dlpack`` return, and what a library keeps for itself (a product's
    workspace, a communication library's buffers); on CUDA ``allocator`` has what comes from torch's allocator.

    States that an optimizer makes in its first step are its states from the moment that they are made, at the peak,
    too. An optimizer that wraps another one (Accelerate's, DeepSpeed's) is followed to the one inside.

    Args:
        modules: a module or several, whose parameters, buffers and gradients are there from the beginning.
        optimizers: an optimizer or several, whose states are.
        meets: also the modules that run and the optimizers that step within the block, whoever made them: for a
            trainer that keeps its own.

    Attributes: ``live`` and ``peak`` (bytes by kind; peak is the composition at the moment of the largest sum),
    ``live_bytes``, ``peak_bytes`` (their sums), ``baseline_bytes`` (the sum on entry); ``allocator`` on CUDA
    (``allocated_peak_bytes``, ``reserved_peak_bytes``).
    """

    shown = ("peak_bytes", "peak", "live_bytes", "live")
    kept = ("live", "peak", "baseline_bytes", "allocator")

    def __init__(
        self,
        modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        meets: bool = False,
    ):
        super().__init__()
        self._modules = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
        given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._optimizers = [unwrap_optimizer(optimizer) for optimizer in given]
        self._meets, self._met = meets, weakref.WeakSet[torch.nn.Module]()
        self._clock = self._peak_clock = 0  # logical clock of allocations
        self.live: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.peak: dict[str, int] = dict(self.live)
        self.baseline_bytes = 0
        self.allocator: dict[str, int] = {}
        # Storages themselves are the keys: an address is used again as soon as one is freed.
        self._records: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._hooks: list = []
        self._replaced: list[tuple[Any, str, Callable]] = []
        self._lock = threading.RLock()  # a bucket's exchange runs in a thread of its own

    @property
    def live_bytes(self) -> int:
        return sum(self.live.values())

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    def reset_peak(self) -> None:
        """Starts the peak anew from what is alive now."""
        self.peak, self._peak_clock = dict(self.live), self._clock

    def __enter__(self) -> "MemoryMeter":
        self._records = WeakIdKeyDictionary()
        self.live = dict.fromkeys(KINDS, 0)
        self.reset_peak()
        self._classify()
        self.baseline_bytes = self.live_bytes
        self.reset_peak()
        for module in self._modules:
            self._watch_gradients(module.parameters())
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_post_hook(lambda o, *_: self._note_states(o)))
        if self._meets:
            self._hooks.append(register_module_forward_pre_hook(self._meet))
            self._hooks.append(register_optimizer_step_post_hook(lambda o, *_: self._note_updated(unwrap_optimizer(o))))
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self._watch_what_nothing_dispatches()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for owner, name, function in reversed(self._replaced):
            setattr(owner, name, function)
        self._replaced.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._classify()
        with self._lock:
            for record in filter(None, self._records.values()):
                record.finalizer.detach()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self.allocator = {
                "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
                "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
            }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self._follow(func, args, kwargs)

    def _follow(self, func, args, kwargs):
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(...): new, but it comes in as an argument
            for tensor in tensors_in((args, kwargs)):
                self._note_older(tensor)
        out = self._call(func, args, kwargs or {})
        for tensor in tensors_in(out):
            self._note(tensor)
        return out

    def _call(self, func, args, kwargs):
        """Runs the operation. For meters that know a quicker way."""
        return func(*args, **kwargs)

    def _watch_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: self._note(p.grad, "gradients"))
                self._hooks.append(hook)

    def _meet(self, module: torch.nn.Module, _: Any) -> None:
        """A module begins to run: its own parameters and buffers are what they are, whoever made it."""
        if module in self._met:
            return
        self._met.add(module)
        own = [tensor for tensor in module.parameters(recurse=False) if isinstance(tensor, torch.nn.Parameter)]
        for tensor in (*own, *torch.nn.Module.buffers(module, recurse=False)):  # Megatron's DDP has a list of that name
            self._note(tensor, "parameters")
            if tensor.is_leaf and tensor.grad is not None:
                self._note(tensor.grad, "gradients")
        self._watch_gradients(own)

    def _watch_what_nothing_dispatches(self) -> None:
        """Storages resized or copied, random states, buffers: no operators. Meters within one another end in order."""

        def resize_(resize: Callable, storage: torch.UntypedStorage, size: int) -> None:
            empty = storage.nbytes() == 0
            resize(storage, size)
            with self._lock:
                if empty and self._records.get(storage) is None:
                    self._records.pop(storage, None)
                elif storage not in self._records:
                    self._records[storage] = None
                self._record(storage, None)

        def copy_(copy: Callable, storage: torch.UntypedStorage, source: Any, *rest: Any) -> torch.UntypedStorage:
            if isinstance(source, torch.UntypedStorage):
                with self._lock:
                    if source not in self._records:
                        self._records[source] = None  # a copy looks at it as at a new tensor's; it was there before
            return copy(storage, source, *rest)

        def make(function: Callable, *args: Any, kind: str | None, **kwargs: Any) -> torch.Tensor:
            made = function(*args, **kwargs)
            self._note(made, kind)
            return made

        self._replace(torch.UntypedStorage, "resize_", resize_)
        self._replace(torch.UntypedStorage, "copy_", copy_)
        for owner, name, kind in _NOT_DISPATCHED:
            self._replace(owner, name, functools.partial(make, kind=kind))

    def _replace(self, owner: Any, name: str, instead: Callable) -> None:
        """``instead(original, …)`` in the place of a function, until the block ends."""
        original = getattr(owner, name)
        self._replaced.append((owner, name, original))

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        setattr(owner, name, replaced)

    def _classify(self) -> None:
        for module in self._modules:
            for tensor in (*module.parameters(), *torch.nn.Module.buffers(module)):
                self._note(tensor, "parameters")
                if tensor.grad is not None:
                    self._note(tensor.grad, "gradients")
        for optimizer in self._optimizers:
            self._note_states(optimizer)

    def _note_states(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._note(value, "optimizer states")

    def _note_updated(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's states, and what it updates: parameters that no module shows while it runs (shards), too."""
        self._note_states(optimizer)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if isinstance(parameter, torch.nn.Parameter):
                self._note(parameter, "parameters")
                self._note(parameter.grad, "gradients")
            elif not self._is_parameters(parameter):  # a copy in fp32; or a part of the parameters' own buffer
                self._note(parameter, "optimizer states")

    def _is_parameters(self, tensor: torch.Tensor) -> bool:
        records = [self._records.get(part.untyped_storage()) for part in local_tensors(tensor)]
        return any(record is not None and record.kind == "parameters" for record in records)

    def _note_older(self, tensor: torch.Tensor) -> None:
        """An argument whose storage nobody has seen being made was there before: not ours to count."""
        for part in local_tensors(tensor):
            storage = part.untyped_storage()
            with self._lock:
                if storage not in self._records:
                    self._records[storage] = None

    def _note(self, tensor: torch.Tensor | None, kind: str | None = None) -> None:
        """Records a tensor's storage; with ``kind``, moves it to that kind."""
        for part in local_tensors(tensor) if tensor is not None else ():
            with self._lock:
                self._record(part.untyped_storage(), kind)

    def _record(self, storage: torch.UntypedStorage, kind: str | None) -> None:
        record = self._records.get(storage)
        if record is None and storage in self._records and kind is None:
            return
        if record is None:
            record = _Record(kind or "activations")
            self._records[storage] = record
            record.finalizer = weakref.finalize(storage, _forget, weakref.ref(self), record)
            record.finalizer.atexit = False
        elif kind is not None and kind != record.kind:
            self.live[record.kind] -= record.nbytes
            self.live[kind] += record.nbytes
            if kind == "optimizer states" and record.since <= self._peak_clock:  # made in a step, named after it
                self.peak[record.kind] -= record.nbytes
                self.peak[kind] += record.nbytes
            record.kind = kind
        grown = storage.nbytes() - record.nbytes
        if grown:
            self._clock += 1
            record.nbytes, record.since = record.nbytes + grown, self._clock
            self.live[record.kind] += grown
            self._changed(storage, record, grown)
            if self.live_bytes > self.peak_bytes:
                self.reset_peak()

    def _changed(self, storage: torch.UntypedStorage | None, record: "_Record", nbytes: int) -> None:
        """A storage grew (or is new, or shrank) by ``nbytes``; None when it is gone. For meters that keep more."""


class _Record:
    """One recorded storage."""

    __slots__ = ("finalizer", "kind", "nbytes", "since")
    finalizer: weakref.finalize

    def __init__(self, kind: str):
        self.kind, self.nbytes, self.since = kind, 0, 0


def _forget(meter_ref: "weakref.ref[MemoryMeter]", record: _Record) -> None:
    meter = meter_ref()
    if meter is not None:
        with meter._lock:
            meter.live[record.kind] -= record.nbytes
            meter._changed(None, record, -record.nbytes)
