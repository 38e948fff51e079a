"""Finds a running script's line, module and step by hooks on modules, optimizers and backward passes."""

import bisect
import contextlib
import functools
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pardemo import compat
from pardemo.compat import dtype_name
from pardemo.meters.tensors import tensors_in
from pardemo.script.runtime.libraries import is_script


class Hooks:
    """Calls a subclass's methods of the names below for all modules and optimizers while the block runs.

    ``following``: whatever else is to end with the block. ``also_raised``: whether ``_module_ends`` is called where a
    forward pass raises, too.
    """

    also_raised: ClassVar[bool] = False

    def __init__(self) -> None:
        self.following = contextlib.ExitStack()

    def __enter__(self) -> Self:
        hooks: dict[str, Callable[..., Any]] = {
            "_module_begins": register_module_forward_pre_hook,
            "_module_ends": functools.partial(register_module_forward_hook, always_call=self.also_raised),
            "_step_begins": register_optimizer_step_pre_hook,
            "_step_ends": register_optimizer_step_post_hook,
        }
        for name, register in hooks.items():
            if getattr(type(self), name) is not getattr(Hooks, name):
                self.following.callback(register(getattr(self, name)).remove)
        if type(self)._backward is not Hooks._backward:
            self.following.enter_context(compat.replaced(*compat.engine_replaced(self._backward)))
        return self

    def __exit__(self, *_: object) -> None:
        self.following.close()

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        """A module is called, with these positional arguments."""

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        """A module's forward pass has ended; what is returned takes the output's place, unless it is None."""

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer's ``step`` is called; what is returned takes the arguments' place, unless it is None."""

    def _step_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A backward pass, which ``run(*args, **kwargs)`` runs; those within another one, too."""
        return run(*args, **kwargs)


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
        self._aside: tuple[float, float] | None = None  # since when a model is evaluated
        self._asides: list[
            tuple[Evaluation, int, list[weakref.ref[torch.Tensor]]]
        ] = []  # of which model, what came out

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
        phase = "evaluation" if self._aside else "forward" if self._stack else "between"
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
        """From the next node on the graph is that of the module that runs now."""
        number, owner = compat.sequence_number(), self._stack[-1] if self._stack else None
        if number == self._numbers[-1]:
            self._owners[-1] = owner
        else:
            self._numbers.append(number)
            self._owners.append(owner)

    def forget(self) -> None:
        """Forgets a step's graph, which is gone."""
        if not self._stack:
            self._numbers, self._owners = [compat.sequence_number()], [None]

    def name(self, module: torch.nn.Module) -> str:
        """Returns a module's name from the root on without wrappers' prefixes; its class where it has no name."""
        return self._names.get(module) or type(module).__name__

    def learns(self) -> None:
        """Notes a backward pass: a model whose output is still alive is a teacher or a reference, not evaluated.

        Its time is the step's. What an evaluation says is gone by then, but for numbers.
        """
        used = {model for _, model, outputs in self._asides if any(output() is not None for output in outputs)}
        self._asides = [evaluation for evaluation in self._asides if evaluation[1] not in used]
        self._in_steps |= {root for root in self.roots if id(root) in used}

    def take_aside(self) -> tuple[Evaluation, ...]:
        """Returns the evaluations since the last call."""
        taken, self._asides = tuple(aside for aside, _, _ in self._asides), []
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
                self._aside = time.monotonic(), time.thread_time()
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
        if not self._stack and self._aside:
            aside = Evaluation(self._aside[0], time.monotonic(), time.thread_time() - self._aside[1])
            outputs = [weakref.ref(tensor) for tensor in tensors_in(output) if tensor.dim()]
            self._asides.append((aside, id(module), outputs))
            self._aside = None


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


#: After so many updates by others an optimizer takes no turns with them any more: its phase is over.
TURNS = 16


class Enough(BaseException):
    """Raised when all steps that were asked for are over. Not an Exception: a script's ``except`` must not catch it."""


@dataclass(frozen=True)
class StepEnd:
    """The moment at which an optimizer's step is over; ``cpu_s``: seconds of a core that this thread had.

    ``backwards``: backward passes since the cut before. ``aside``: when models were evaluated since then.
    ``sent_bytes``, ``received_bytes``: the kernel's counters, of all connections but the store's. ``forwards``: how
    often a model has run since then, 0 where that was not seen. ``updates``: steps of optimizers since then, each after
    a backward pass of its own. ``closures``: backward passes within an optimizer's step, as its closure runs them.
    """

    at_s: float
    cpu_s: float
    backwards: int
    aside: tuple[Evaluation, ...]
    sent_bytes: int
    received_bytes: int
    forwards: int = 0
    updates: int = 1
    closures: int = 0

    @property
    def micro_batches(self) -> int:
        """Backward passes of a whole model for one update.

        A loss that goes backward piece by piece belongs to one of them; an optimizer that evaluates its closure again
        and again (LBFGS) takes no more samples.
        """
        passes = min(self.backwards, self.forwards or self.backwards)
        return max(1, passes // (self.updates * max(1, self.closures)))


class Steps(Hooks):
    """Divides a script's run into steps: one ends with the first optimizer step after a backward pass.

    Libraries step in parts (ZeRO-3 by groups of parameters, a model with two optimizers): those that follow without
    another backward pass belong to the same step, and so do those of other optimizers that take turns with it (a
    generator's and its critic's). From cut to cut each cycle holds each part once.

    Args:
        sites: is told while an optimizer steps.
        enough: the number of cuts after which the script ends, by :class:`Enough`.
        counters: the kernel's bytes sent and received so far.
        on_cut: is told the number of a cut, at its moment. on_backward: is called as a backward pass begins.
    """

    def __init__(
        self,
        sites: CallSites,
        enough: int,
        counters: Callable[[], tuple[int, int]],
        on_cut: Callable[[int], None],
        on_backward: Callable[[], None],
    ):
        super().__init__()
        self.cuts: list[StepEnd] = []
        self._sites, self._enough, self._counters = sites, enough, counters
        self._on_cut, self._on_backward = on_cut, on_backward
        #: is told an exception that leaves a backward pass
        self.on_raise: Callable[[BaseException], None] = lambda error: None
        self._backwards = self._since_update = self._updates = self._closures = 0
        self._first: weakref.ref[Any] | None = None  # the optimizer whose steps end the cycles
        self._others = 0  # updates by others since its last
        self._thread = threading.get_ident()

    @property
    def number(self) -> int:
        """How many steps are over."""
        return len(self.cuts)

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # a checkpoint's is within another, and autograd.grad's is no step's
        is_outer = compat.graph_task() == -1 and bool(kwargs.get("accumulate_grad"))
        if is_outer:
            self._sites.learns()
            self._backwards += 1
            self._since_update += 1
            self._closures += self._sites.stepping
            self._on_backward()
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if is_outer:
                self.on_raise(error)
            raise

    def _step_begins(self, *_: Any) -> None:
        self._sites.stepping = True

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        self._sites.stepping = False
        if self._since_update == 0 or threading.get_ident() != self._thread:
            return
        self._since_update, self._updates = 0, self._updates + 1
        if not self._ends_cycle(optimizer):
            return
        self._on_cut(len(self.cuts) + 1)  # what it costs is part of the step that is over
        sent, received = self._counters()
        aside = self._sites.take_aside()
        self._sites.forget()
        self.cuts.append(StepEnd(
            time.monotonic(), time.thread_time(), self._backwards, aside, sent, received,
            self._sites.take_forwards(), self._updates, self._closures,
        ))  # fmt: skip
        self._backwards = self._updates = self._closures = 0
        if len(self.cuts) == self._enough:
            raise Enough

    def _ends_cycle(self, optimizer: Any) -> bool:
        """Whether it is the first optimizer's update; where that one has stopped, the next one's takes its place."""
        first = self._first() if self._first is not None else None
        if first is optimizer or first is None or self._others >= TURNS:
            self._first, self._others = weakref.ref(optimizer), 0
            return True
        self._others += 1
        return False


def outermost(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Returns modules with parameters that are part of no other one, in the order in which they were met."""
    kept = [root for root in roots if next(root.parameters(), None) is not None]
    within = {id(part) for root in kept for part in root.modules() if part is not root}
    return [root for root in kept if id(root) not in within]


def is_deepspeed(module: torch.nn.Module) -> bool:
    """Whether a module is an engine of DeepSpeed's, and not one of its layers."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(module, deepspeed.DeepSpeedEngine)
