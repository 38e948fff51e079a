"""Finds a running script's line, module and phase by hooks on its modules."""

import bisect
import os
import re
import sys
import time
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from pardemo import compat
from pardemo.compat import dtype_name
from pardemo.meters.tensors import tensors_in
from pardemo.script.runtime.hooks import Hooks, outermost
from pardemo.script.runtime.libraries import is_script

#: Functions of torch that send Python objects, as bytes: nobody asked for these collectives of tensors.
_OF_OBJECTS = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?$")
#: Files of libraries that shard a model: what their functions make is gathered parameters, or a buffer.
_SHARDING = ("_fsdp_collectives.py", "_fsdp_param.py", "_fsdp_param_group.py", "_flat_param.py", "_runtime_utils.py",
             "partition_parameters.py", "stage3.py", "stage_1_and_2.py", "reducer.cpp")  # fmt: skip
_GATHERS = re.compile("gather|unshard|init_unsharded|alloc_storage")

#: Functions of libraries that make one number of all gradients, to clip them or to look for an overflow.
_OF_NORMS = re.compile("grad_norm|total_norm|global_norm|overflow|unscale_|found_inf")
#: Of a place in such a function.
NORM = "norm"
#: Of a place in torch's context parallelism.
CONTEXT = "context parallel"
_USES = (CONTEXT, NORM, "gathered", "communication buffers")
#: Numbers of autograd's nodes from here on are those of leaves.
LEAF = 2**63
#: What the model itself is called, whose name is empty.
ROOT = "(root)"


class CallSite(NamedTuple):
    """A place in a script.

    Args:
        line: ``train.py:88``, the innermost line that is the reader's own; empty where none is on the stack.
        module: the name of the module that runs, from the model's root on; empty outside of all modules.
        phase: ``forward``, ``backward``, ``step`` (of an optimizer), ``evaluation``, or ``between``.
        repeated: whether a backward pass runs a forward again (activation checkpointing).
        objects: the function of torch that sends Python objects as bytes, if one does.
        use: what a sharding library makes here: ``gathered`` or ``communication buffers``; :data:`CONTEXT` in torch's
            context parallelism, :data:`NORM` where gradients become one number.
    """

    line: str
    module: str
    phase: str
    repeated: bool = False
    objects: str = ""
    use: str = ""


class Evaluation(NamedTuple):
    """A model's run without gradients whose output no later loss used; ``cpu_s``: seconds of a core."""

    begin_s: float
    end_s: float
    cpu_s: float


class CallSites(Hooks):
    """Follows which module runs, and says where a script is."""

    also_raised = True

    def __init__(self) -> None:
        super().__init__()
        self._roles: dict[CodeType, str] = {}
        self._stack: list[torch.nn.Module] = []
        #: from this number of autograd's nodes on (the graph is built in order), the module that runs
        self._numbers: list[int] = [0]
        self._owners: list[torch.nn.Module | None] = [None]
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        #: modules that were called from outside of all others, models and losses, in the order of their first calls
        self.roots: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        self._in_steps: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # roots that have not only been evaluated
        #: names of modules whose forward a backward pass ran again; dtypes that autocast or a policy computed in
        self.recomputed: set[str] = set()
        self.computed_in: set[str] = set()
        self.stepping = False
        #: is told an exception that leaves a module's forward
        self.on_raise: Callable[[BaseException], None] = lambda error: None
        self._raised = 0  # its address: the module around that one is left by the same one
        self._forwards: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._evaluation_begin: tuple[float, float] | None = None  # since when a model is evaluated
        #: since the last call of :meth:`take_evaluations`: each with its model's id and what came out
        self._evaluations: list[tuple[Evaluation, int, list[weakref.ref[torch.Tensor]]]] = []

    def here(self) -> CallSite:
        """Returns where the script is now."""
        line, unit, objects, use = "", "", "", ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            role = self._role_of(frame)
            if role == "own":
                line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                break
            if role:
                use = use or (role if role in _USES else "")
                objects = objects or (role if _OF_OBJECTS.match(role) else "")
                unit = unit or _unit(frame)
            frame = frame.f_back
        backward = compat.graph_task() != -1
        module = unit or (self.name(self._stack[-1]) if self._stack else self._of_node() if backward else "")
        phase = "evaluation" if self._evaluation_begin else "forward" if self._stack else "between"
        phase = "backward" if backward else "step" if self.stepping else phase
        return CallSite(line, module, phase, backward and bool(self._stack), objects, use)

    def file_and_line(self) -> str:
        """``/home/me/train.py:88``, for :meth:`here`'s ``train.py:88``; empty where no line is the reader's own."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._role_of(frame) == "own":
                return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _role_of(self, frame: FrameType) -> str:
        role = self._roles.get(frame.f_code)
        if role is None:
            role = self._roles[frame.f_code] = self._role(frame.f_code)
        return role

    def _of_node(self) -> str:
        """Returns the module whose backward runs; empty where a gradient is complete and belongs to no graph."""
        node = compat.autograd_node()
        number = LEAF if node is None else compat.node_number(node)
        if number >= LEAF or number < self._numbers[0]:  # a graph that is older than this step
            return ""
        owner = self._owners[bisect.bisect_right(self._numbers, number) - 1]
        return "" if owner is None else self.name(owner)

    def _runs(self) -> None:
        """Notes that from the next node on the graph is that of the module that runs now."""
        number, owner = compat.sequence_number(), self._stack[-1] if self._stack else None
        if number == self._numbers[-1]:
            self._owners[-1] = owner
        else:
            self._numbers.append(number)
            self._owners.append(owner)

    def forget_graph(self) -> None:
        """Forgets a step's graph, which is gone."""
        if not self._stack:
            self._numbers, self._owners = [compat.sequence_number()], [None]

    def name(self, module: torch.nn.Module) -> str:
        """Returns a module's name from the root on without wrappers' prefixes; its class where it has no name."""
        return self._names.get(module) or type(module).__name__

    def is_root(self, module: torch.nn.Module) -> bool:
        """Whether a module is, or would be by its first call, one that is called from outside of all others."""
        return module in self.roots or module not in self._names

    def note_backward(self) -> None:
        """Notes a backward pass: a model whose output is still alive is a teacher or a reference, not evaluated.

        Its time is the step's. What an evaluation says is gone by then, but for numbers.
        """
        used = {model for _, model, outputs in self._evaluations if any(output() is not None for output in outputs)}
        self._evaluations = [evaluation for evaluation in self._evaluations if evaluation[1] not in used]
        self._in_steps |= {root for root in self.roots if id(root) in used}

    def take_evaluations(self) -> tuple[Evaluation, ...]:
        """Returns the evaluations since the last call."""
        taken, self._evaluations = tuple(evaluation for evaluation, _, _ in self._evaluations), []
        return taken

    def models(self) -> list[torch.nn.Module]:
        """Returns the outermost modules that have run, without copies of one of them.

        A copy has the same parameters by name and shape, and is only evaluated: an average.
        """
        roots = outermost(self.roots)
        shapes = [_shapes(root) for root in roots if root in self._in_steps]
        return [root for root in roots if root in self._in_steps or _shapes(root) not in shapes]

    def copies(self) -> list[torch.nn.Module]:
        """Returns the modules that :meth:`models` leaves out."""
        models = self.models()
        return [root for root in outermost(self.roots) if root not in models]

    def take_forwards(self) -> int:
        """Returns how often a model has run for training since the last call; of several the one that ran most.

        A part of a model that is called by itself is no model: a head may run for a sequence piece by piece.
        """
        most, self._forwards = max(self._forwards.values(), default=0), weakref.WeakKeyDictionary()
        return most

    def _role(self, code: CodeType) -> str:
        path, name = code.co_filename, os.path.basename(code.co_filename)
        if is_script(path):
            return "own"
        if os.path.basename(os.path.dirname(path)) == "_context_parallel":
            return CONTEXT
        if name in _SHARDING:
            return "gathered" if _GATHERS.search(code.co_name) else "communication buffers"
        if _OF_NORMS.search(code.co_name):
            return NORM
        return code.co_name if _OF_OBJECTS.match(code.co_name) else ""

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self._stack:
            if module not in self._names:
                self.roots[module] = None
                for name, part in module.named_modules():
                    self._names[part] = without_wrappers(name)
            if not module.training and not torch.is_grad_enabled():
                self._evaluation_begin = time.monotonic(), time.thread_time()
            else:
                self._in_steps.add(module)
            if compat.graph_task() != -1:
                self.recomputed.add(self.name(module))
            elif torch.is_grad_enabled() and not self._names[module] and next(module.parameters(), None) is not None:
                self._forwards[module] = self._forwards.get(module, 0) + 1
        if torch.is_autocast_enabled("cpu") and compat.graph_task() == -1:  # Accelerate begins it within a model
            self.computed_in.add(dtype_name(torch.get_autocast_dtype("cpu")))
        self._stack.append(module)
        self._runs()

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        while self._stack and self._stack.pop() is not module:  # one that raised has not said that it ended
            pass
        if (error := sys.exception()) is not None and id(error) != self._raised:
            self._raised = id(error)
            self.on_raise(error)
        self._runs()
        if not self._stack and self._evaluation_begin:
            begin_s, begin_cpu_s = self._evaluation_begin
            evaluation = Evaluation(begin_s, time.monotonic(), time.thread_time() - begin_cpu_s)
            outputs = [weakref.ref(tensor) for tensor in tensors_in(output) if tensor.dim()]
            self._evaluations.append((evaluation, id(module), outputs))
            self._evaluation_begin = None


def _shapes(root: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {without_wrappers(name): tuple(parameter.shape) for name, parameter in root.named_parameters()}


def _unit(frame: FrameType) -> str:
    """Returns the module that a frame of FSDP2's works for."""
    if not frame.f_code.co_filename.endswith("_fsdp_param_group.py"):
        return ""
    return without_wrappers(compat.fsdp_unit(frame.f_locals.get("self"))) or ROOT


def without_wrappers(name: str) -> str:
    """``module.layers.0._checkpoint_wrapped_module.mlp`` → ``layers.0.mlp``."""
    wrappers = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
    kept = [part for part in name.split(".") if part not in wrappers]
    while kept and kept[0] in ("module", "_forward_module", "_original_module"):  # DDP's, and Fabric's
        kept.pop(0)
    return ".".join(kept)
