"""Records whose code makes each storage: the model's, the optimizer's, the engine's, or the engine's gathers."""

import bisect
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pardemo import compat
from pardemo.meters.calls import bytes_of_call
from pardemo.meters.memory import MemoryMeter
from pardemo.meters.operation_costs import FLOPS, traffic
from pardemo.planner.dry_run.fake import NONE

#: Parts of file names that tell whose code asked for memory; the innermost frame that has one of them decides.
_ENGINES = ("/deepspeed/", "/torch/distributed/fsdp/", "/torch/distributed/tensor/", "/torch/distributed/_")
_OPTIMIZERS = ("/torch/optim/",)
#: DeepSpeed's stand-in for torch's linear function under stage 3: what it makes is the model's.
_STAND_IN = "/deepspeed/runtime/zero/linear.py"
_GATHERING = ("partition_parameters.py", "partitioned_param_coordinator.py", "_fsdp_param.py")
_MODEL = ("/torch/nn/modules/", "/torch/utils/checkpoint.py", "/torch/autograd/graph.py", "/transformers/", "/peft/",
          "/pardemo/baichuan2/")  # fmt: skip


def origin() -> str:
    """Returns whose code called the caller: ``model``, ``optimizer``, ``engine`` or ``gather``."""
    frame: FrameType | None = sys._getframe(2)
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


_DEVICE, _META_DEVICE = torch.ops.prim.device.default, torch.device("meta")
FLOP_PHASES = ("forward", "recomputation", "backward", "step", "build")


@dataclass(eq=False)
class Life:
    """The life of a storage. ``death_phase`` is empty where it outlived the run."""

    nbytes: int
    kind: str
    phase: str
    module: str
    origin: str  # model, optimizer, gather (of parameters), engine
    width: int  # its tensor's last dimension when it was made
    death_phase: str = ""


class StorageRecorder(MemoryMeter):
    """Records ``lives``; phases are entered with :meth:`phase`, modules as the forward pass calls them.

    A backward operation belongs to the module whose forward made its node of the graph: nodes are numbered in the
    order of the forward pass.

    Attributes: ``lives`` in order of birth; ``events`` (the life, the change in bytes) in order of time; ``marks``
    (name, number of the first event) of each phase.
    """

    def __init__(self, answers: Callable = lambda *operation: NONE):
        super().__init__()
        self.answers = answers
        self.lives: list[Life] = []
        self.events: list[tuple[Life, int]] = []
        self.marks: list[tuple[str, int]] = []
        self._phase = "build"
        self._by_record: dict = {}
        self._calls = [""]  # names of the modules that are being called
        self._numbers = [0]  # of the graph's nodes, where another module begins …
        self._owners = [""]  # … and which
        self._names: dict[nn.Module, str] = {}
        self._width = 0
        self._hooked: set[int] = set()
        self.flops: dict[str, int] = {}
        self.traffic = self.step_traffic = 0
        self.sent: dict[str, float] = {}
        self.first_event = self.built = 0

    def end_of_building(self) -> None:
        """Ends the phase in which model and engine are built; what follows is training."""
        self.built = len(self.events)

    def begin_step(self, module: nn.Module) -> None:
        """Begins the step to report, which lasts until the next one begins."""
        self.first_event = len(self.events)
        # FSDP2 computes with parameters that no module lists once a layer is over
        for parameter in (*module.parameters(), *compat.fsdp_gathered(module)):
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                hook = parameter.register_post_accumulate_grad_hook(self.brought)
                self._hooks.append(hook)  # removed at the end: by it the model and this would keep one another alive

    def brought(self, parameter: nn.Parameter) -> None:
        """Notes a parameter's gradient when it is there."""
        self._note(parameter.grad, "gradients")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled in a dry run: torch's guard costs half its time
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # more than half of all that there is to dispatch
        if func is _DEVICE and isinstance(asked := args[0], compat.FakeTensor):
            return _META_DEVICE if asked.fake_mode.in_kernel_invocation else asked.fake_device
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: its local operations are what takes memory
        answer = self.answers(self._recorded, func, args)
        return self._recorded(func, args, **(kwargs or {})) if answer is NONE else answer

    def _recorded(self, func, args, **kwargs):
        out = self._follow(func, args, kwargs)
        if self.flops:
            self._count_work(func, args, kwargs, out)
        return out

    def _count_work(self, func, args, kwargs, out) -> None:
        """Adds what an operation costs in time: operations, bytes through memory, bytes on the wire."""
        phase = "recomputation" if self._phase == "backward" and len(self._calls) > 1 else self._phase
        if func.namespace in ("c10d", "_c10d_functional"):
            self.sent[phase] = self.sent.get(phase, 0) + bytes_of_call(func, args, kwargs).sent
            return
        count = FLOPS.get(compat.op_packet(func))
        if count is not None:
            self.flops[phase] += count(*args, **kwargs, out_val=out)
        elif compat.op_name(func).endswith("mm"):
            raise ValueError(
                f"cannot plan a model that uses {compat.op_schema(func).name}: nobody counts its operations"
            )
        else:
            moved = sum(traffic(func, args, out))
            if phase == "step":
                self.step_traffic += moved
            else:
                self.traffic += moved

    def watch(self, module: nn.Module) -> None:
        """Calls the modules by their names in ``module``."""
        self._names = {part: name for name, part in module.named_modules()}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self._phase = self._phase, name
        if name == "forward":  # operations are counted of one micro-batch, the last, and of the update
            self.flops, self.sent = dict.fromkeys(FLOP_PHASES, 0), {}
            self.traffic = self.step_traffic = 0
        self.marks.append((name, len(self.events)))
        yield
        self._phase = before
        self.marks.append((before, len(self.events)))

    def __enter__(self) -> "StorageRecorder":
        # always: a checkpoint's recomputation ends in the middle of a module, by an exception
        leave = register_module_forward_hook(self._leave, always_call=True)
        self._global = [register_module_forward_pre_hook(self._enter), leave]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._global:
            hook.remove()
        super().__exit__(*error)

    def life_of(self, tensor: torch.Tensor) -> Life | None:
        """Returns the record of a tensor's storage."""
        record = self._records.get(tensor.untyped_storage())
        return self._by_record.get(record)

    def _enter(self, module: nn.Module, args: object) -> None:
        self._calls.append(self._names.get(module, self._calls[-1]))
        self._begins(self._calls[-1])

    def _leave(self, module: nn.Module, args: object, out: object) -> None:
        if len(self._calls) > 1:
            self._calls.pop()
        self._begins(self._calls[-1])

    def _begins(self, name: str) -> None:
        number = compat.sequence_number()
        if number == self._numbers[-1]:
            self._owners[-1] = name
        else:
            self._numbers.append(number)
            self._owners.append(name)

    def _module(self) -> str:
        if len(self._calls) == 1 and self._phase == "backward":
            node = compat.autograd_node()
            if node is not None:
                return self._owners[bisect.bisect_right(self._numbers, compat.node_number(node)) - 1]
        return self._calls[-1]

    def _note(self, tensor: torch.Tensor | None, kind: str | None = None) -> None:
        if kind == "random states":  # they are on the host, whatever is planned
            return
        if tensor is not None:
            self._width = tensor.shape[-1] if tensor.dim() else 1
        super()._note(tensor, kind)

    def _changed(self, storage, record, nbytes: int) -> None:
        life = self._by_record.get(record)
        if life is None:
            life = Life(0, record.kind, self._phase, self._module(), origin(), self._width)
            self._by_record[record] = life
            self.lives.append(life)
        life.kind = record.kind
        self.events.append((life, nbytes))
        if nbytes > 0:
            life.nbytes += nbytes
        if storage is None or storage.nbytes() == 0:
            life.death_phase = self._phase
            if storage is not None:  # emptied: what fills it again lives another life
                del self._by_record[record]
