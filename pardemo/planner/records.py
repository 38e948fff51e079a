"""The life of every storage of a training step: who made it, when, where in the model, and when it went.

A :class:`pardemo.MemoryMeter` that keeps what it sees. From the records the peak can be taken apart afterwards: by
kind, by module, by what a framework added; and storages that the meter could not tell while they were young (a gradient
that DeepSpeed moved into a bucket) get their kind at the end.
"""

import bisect
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pardemo.meters.calls import bytes_of_call
from pardemo.meters.memory import MemoryMeter

FLOP_PHASES = ("forward", "recomputation", "backward", "step", "build")

#: Parts of file names that tell whose code asked for memory; the innermost frame that has one of them decides.
_ENGINES = ("/deepspeed/", "/torch/distributed/fsdp/", "/torch/distributed/tensor/", "/torch/distributed/_")
_OPTIMIZERS = ("/torch/optim/",)
#: DeepSpeed's stand-in for torch's linear function under stage 3: what it makes is the model's.
_STAND_IN = "/deepspeed/runtime/zero/linear.py"
_GATHERING = ("partition_parameters.py", "partitioned_param_coordinator.py", "_fsdp_param.py")
_MODEL = ("/torch/nn/modules/", "/torch/utils/checkpoint.py", "/torch/autograd/graph.py", "/transformers/", "/peft/",
          "/pardemo/baichuan2/")  # fmt: skip


@dataclass(eq=False)
class Life:
    """One storage. ``birth`` and ``death`` are numbers of events; ``death`` is None where it outlived the run."""

    nbytes: int
    kind: str
    phase: str
    module: str
    origin: str  # model, optimizer, gather (of parameters), engine
    call: int  # the module call that it was made in
    width: int  # its tensor's last dimension when it was made
    birth: int
    death: int | None = None
    death_call: int = -1
    death_phase: str = ""


@dataclass(eq=False)
class Recorder(MemoryMeter):
    """Records ``lives``; phases are entered with :meth:`phase`, modules as the forward pass calls them.

    A backward operation belongs to the module whose forward made its node of the graph: nodes are numbered in the
    order of the forward pass.

    Attributes: ``lives`` in order of birth; ``events`` (the life, the change in bytes) in order of time; ``marks``
    (name, number of the first event) of each phase.
    """

    root: nn.Module | None = None
    lives: list[Life] = field(default_factory=list)
    events: list[tuple[Life, int]] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self):
        MemoryMeter.__init__(self)
        self._phase = "build"
        self._by_record: dict = {}
        self._calls: list[tuple[str, int]] = [("", 0)]  # the modules that are being called: name and number of the call
        self._count = 0
        self._numbers: list[int] = [0]  # of the graph's nodes, where another module begins …
        self._owners: list[str] = [""]  # … and which
        self._names: dict[nn.Module, str] = {}
        self._width = 0
        self._hooked: set[int] = set()
        self.flops: dict[str, int] = {}
        self.traffic: Counter[str] = Counter()
        self.step_traffic = 0
        self.kernels: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.first_event = self.built = 0

    def end_of_building(self) -> None:
        """Model and engine stand: what is recorded from here on is training."""
        self.built = len(self.events)

    def begin_step(self, module: nn.Module) -> None:
        """What is recorded from here on is the step to report, until the next one begins."""
        self.first_event = len(self.events)
        for parameter in _all_parameters(module):
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(lambda p: self._note(p.grad, "gradients"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled in a dry run: torch's guard costs half its time
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "prim":  # a fake tensor is asked for its device: half of all there is to dispatch
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: its local operations are what takes memory
        out = self._follow(func, args, kwargs)
        if self.flops:
            self._count_work(func, args, kwargs or {}, out)
        return out

    def _count_work(self, func, args, kwargs, out) -> None:
        """What an operation costs in time: operations, bytes through memory, bytes on the wire, a kernel's launch."""
        phase = "recomputation" if self._phase == "backward" and len(self._calls) > 1 else self._phase
        if func.namespace in ("c10d", "_c10d_functional"):
            self.sent[phase] += bytes_of_call(func, args, kwargs).sent
            return
        count = _FLOPS.get(func._overloadpacket)
        if count is not None:
            self.flops[phase] += count(*args, **kwargs, out_val=out)
        elif func._opname.endswith("mm"):
            raise ValueError(f"cannot plan a model that uses {func._schema.name}: nobody counts its operations")
        else:
            nbytes = _traffic(func, args, out)
            if not nbytes:
                return
            if phase == "step":
                self.step_traffic += nbytes
            else:
                self.traffic[self._module()] += nbytes
        self.kernels[phase] += 1

    def watch(self, module: nn.Module) -> None:
        """Whose modules the names are of."""
        self._names = {part: name for name, part in module.named_modules()}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self._phase = self._phase, name
        if name == "forward":  # operations are counted of one micro-batch, the last, and of the update
            self.flops, self.traffic = dict.fromkeys(FLOP_PHASES, 0), Counter()
            self.step_traffic, self.kernels, self.sent = 0, Counter(), Counter()
        self.marks.append((name, len(self.events)))
        yield
        self._phase = before
        self.marks.append((before, len(self.events)))

    def __enter__(self) -> "Recorder":
        # always: a checkpoint's recomputation ends in the middle of a module, by an exception
        leave = register_module_forward_hook(self._leave, always_call=True)
        self._global = [register_module_forward_pre_hook(self._enter), leave]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        for hook in self._global:
            hook.remove()
        super().__exit__(*error)

    def life_of(self, tensor: torch.Tensor) -> Life | None:
        """The record of a tensor's storage."""
        record = self._records.get(tensor.untyped_storage())
        return self._by_record.get(record)

    def _enter(self, module: nn.Module, args: object) -> None:
        self._count += 1
        self._calls.append((self._names.get(module, self._calls[-1][0]), self._count))
        self._begins(self._calls[-1][0])

    def _leave(self, module: nn.Module, args: object, out: object) -> None:
        if len(self._calls) > 1:
            self._calls.pop()
        self._begins(self._calls[-1][0])

    def _begins(self, name: str) -> None:
        number = torch._C._autograd._get_sequence_nr()
        if number == self._numbers[-1]:
            self._owners[-1] = name
        else:
            self._numbers.append(number)
            self._owners.append(name)

    def _module(self) -> str:
        if len(self._calls) == 1 and self._phase == "backward":
            node = torch._C._current_autograd_node()
            if node is not None:
                return self._owners[bisect.bisect_right(self._numbers, node._sequence_nr()) - 1]
        return self._calls[-1][0]

    def _note(self, tensor: torch.Tensor | None, kind: str | None = None) -> None:
        if kind == "random states":  # they are on the host, whatever is planned
            return
        if tensor is not None:
            self._width = tensor.shape[-1] if tensor.dim() else 1
        super()._note(tensor, kind)

    def _changed(self, storage, record, nbytes: int) -> None:
        life = self._by_record.get(record)
        if life is None:
            life = Life(0, record.kind, self._phase, self._module(), _origin(), self._calls[-1][1], self._width,
                        len(self.events))  # fmt: skip
            self._by_record[record] = life
            self.lives.append(life)
        life.kind = record.kind
        self.events.append((life, nbytes))
        if nbytes > 0:
            life.nbytes += nbytes
        if storage is None or storage.nbytes() == 0:
            life.death, life.death_call, life.death_phase = len(self.events), self._calls[-1][1], self._phase
            if storage is not None:  # emptied: what fills it again lives another life
                del self._by_record[record]


def _all_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Also those that FSDP2 computes with, which no module lists once the layer is over."""
    found = list(module.parameters())
    for part in module.modules():
        state = part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else None
        for group in _groups_of(state):
            found += [p._unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    return found


def _groups_of(state: Any) -> list[Any]:
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _attention_flops(q, k, v, *args, **kwargs) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _attention_backward_flops(grad, q, k, v, *args, **kwargs) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *args, out_val: torch.Tensor, **kwargs) -> int:
    """Experts' products: each row of a [S, K] meets one of b [E, K, N]; a weight's gradient is [K, S] by [S, N]."""
    rows, inner = a.shape[-2:]
    return 2 * rows * inner * b.shape[-1]


def _traffic(func: Any, args: Any, out: Any) -> int:
    """Bytes that an operation element by element reads and writes: none for a view, the rows taken for a look-up."""
    name = func._schema.name
    if name in _IDLE:
        return 0
    read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if func._schema.is_mutable:
        written = written or _changed_in_place(func, args)  # a fused optimizer returns nothing
    else:
        own = {id(tensor.untyped_storage()) for tensor in read}
        written = [tensor for tensor in written if id(tensor.untyped_storage()) not in own]
        if not written:
            return 0
    if name in _LOOK_UPS:
        return 2 * sum(map(_span, written))
    return sum(map(_span, read)) + sum(map(_span, written))


def _changed_in_place(func: Any, args: Any) -> list[torch.Tensor]:
    changed = [arg for arg, told in zip(args, func._schema.arguments, strict=False) if told.is_write]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, torch.Tensor)]


def _span(tensor: torch.Tensor) -> int:
    """What an expanded tensor has in memory, not what it stands for."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


_IDLE = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::detach"}
_LOOK_UPS = {"aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::select"}

#: What torch's FlopCounterMode counts, and what it leaves out: attention on the CPU, experts.
_FLOPS = {
    **flop_registry,
    torch.ops.aten._grouped_mm: _grouped_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def _origin() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/pardemo/meters/" not in name and "/pardemo/planner/" not in name:
            if name.endswith(_STAND_IN):
                return "model"
            if any(part in name for part in _ENGINES):
                gathers = name.endswith(_GATHERING) or "all_gather" in frame.f_code.co_name
                return "gather" if gathers else "engine"
            if any(part in name for part in _OPTIMIZERS):
                return "optimizer"
            if any(part in name for part in _MODEL):
                return "model"
        frame = frame.f_back
    return "model"
