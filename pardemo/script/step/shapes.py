"""Derives what cut layers need of other ranks from the shapes where modules begin and end, not from collectives.

Each passage of a cut module says what has to travel: a row-cut layer's output is a sum over the group's ranks, a
column-cut layer's input is whole on each of them, and so on (Shoeybi et al. 2019, 3; Korthikanti et al. 2022, 4.2).
What was sent is then held against that. Layers are those of torch's ``parallelize_module``, and Megatron-core's.
"""

import contextlib
import functools
import statistics
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pardemo import compat
from pardemo.formulas import communication as formulas
from pardemo.script.runtime.call_sites import CallSites, local_part
from pardemo.script.runtime.hooks import Hooks

Ranks = tuple[int, ...]
KEYS = "keys and values of the other parts of the sequence"
HOPS = "gradients of keys and values, which visit each rank and come home"
#: The axis of a sequence in queries, keys and values: samples, heads, tokens, features of a head.
SEQUENCE = 2


@dataclass(frozen=True)
class Term:
    """A formula's prediction for one kind of traffic.

    Args:
        parallelism: ``TP``, ``CP``, ``EP``. ranks: of the group.
        kind: the collective. phase: of the step; empty where it may be any.
        repeated: whether a forward that runs again in the backward pass needs it.
        elements: of the whole tensor of one call; 0 where calls differ.
        what: in words. width: of the last axis, where that says what the tensor is.
        loss: only meant where an embedding has as many rows as ``width``.
        of: what tells it from others that are told together.
    """

    parallelism: str
    ranks: Ranks
    kind: str
    phase: str
    repeated: bool
    elements: int
    what: str
    width: int = 0
    loss: bool = False
    of: str = ""


@dataclass
class Traffic:
    """The calls of one kind in the median step, and the bytes that a rank sends by them as a formula predicts.

    Args:
        kind, what, elements, phase, repeated, width: as of a :class:`Term`.
        again_bytes: those beside ``bytes`` that modules add which take the same input as another one; ``same``: of each
            of these modules the one before.
        whole: bytes of the whole tensor. optimizers: how many have it gathered, each for itself.
    """

    ranks: Ranks
    kind: str
    what: str
    bytes: float
    elements: int = 0
    phase: str = ""
    repeated: bool = False
    again_bytes: float = 0.0
    same: dict[str, str] = field(default_factory=dict)
    width: int = 0
    whole: int | None = None
    optimizers: int | None = None


@dataclass
class Sum:
    """What a term says of one step: bytes that a rank sends, and those that modules add which take the same input.

    ``same``: of each of these the module that took the input before.
    """

    bytes: float = 0.0
    again_bytes: float = 0.0
    same: dict[str, str] = field(default_factory=dict)


@dataclass
class Passage:
    """A running forward of a module. ``begun``: what it took; ``repeated``: whether a backward pass runs it again."""

    module: torch.nn.Module
    counts: bool
    repeated: bool
    backward: bool
    begun: tuple[Any, ...] = ()
    ended: Any = None
    hook: Any = None


class Shapes(Hooks):
    """Adds up, step by step, the terms of all formulas whose shapes it sees while the block runs.

    Args:
        sites: names of modules. step: the number of the step that runs.
    """

    also_raised = True

    def __init__(self, sites: CallSites, step: Callable[[], int]):
        super().__init__()
        self._sites, self._step = sites, step
        self._sums: dict[Term, dict[int, Sum]] = {}
        self._stack: list[Passage] = []
        self._dtensors, self._megatron = DTensors(self), Megatron(self)
        self._graphless: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._wrapped: dict[type, bool] = {}
        #: by step, how often modules that FSDP2 wraps run in the forward, by name
        self.runs: dict[str, dict[int, int]] = {}
        #: bytes, and elements of a call, that modules which are called from outside of all others return, by step
        self.outputs: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, list[int]]] = weakref.WeakKeyDictionary()

    def __enter__(self) -> "Shapes":
        self.following.enter_context(_ring_attention(self))
        return super().__enter__()

    @property
    def passage(self) -> Passage | None:
        """The innermost module that runs."""
        return self._stack[-1] if self._stack else None

    def name(self, module: torch.nn.Module) -> str:
        """Returns a module's name from the root on."""
        return self._sites.name(module)

    def outer(self) -> Iterable[Passage]:
        """Modules that run around the innermost, from the inside."""
        return reversed(self._stack[:-1])

    def add(
        self, passage: Passage, of: str, ranks: Ranks, kind: str, phase: str, elements: int, itemsize: int, what: str,
        *, times: float = 1, again: str = "", width: int = 0, loss: bool = False, sent: float | None = None,
    ) -> None:  # fmt: skip
        """Adds calls of a parallelism ``of`` this kind to a term of this step.

        ``elements``: of the whole tensor; ``again``: another module that took the same input; ``sent``: bytes by a
        rank, where no ring sends it. In a forward that runs again, what is forward is the backward pass's.
        """
        repeated = passage.repeated and phase == "forward"
        if not passage.counts or (phase == "backward" and not passage.backward) or len(ranks) < 2:
            return
        term = Term(of, ranks, kind, "backward" if repeated else phase, repeated, elements, what, width, loss)
        total = self._sums.setdefault(term, {}).setdefault(self._step(), Sum())
        nbytes = times * (sent_by(kind, elements * itemsize, len(ranks)) if sent is None else sent)
        if again:
            total.again_bytes += nbytes
            total.same[self.name(passage.module)] = again
        else:
            total.bytes += nbytes

    def once(self, term: Term, nbytes: float) -> None:
        """Adds a term that a step has once, however often it is seen."""
        self._sums.setdefault(term, {})[self._step()] = Sum(nbytes)

    def traffic(self, first: int, vocabularies: Iterable[int]) -> dict[tuple[str, Ranks], list[Traffic]]:
        """Returns the median step's traffic from step ``first`` on, by parallelism and group."""
        known = set(vocabularies)
        of_group: dict[tuple[str, Ranks], list[Traffic]] = {}
        for term, by_step in self._sums.items():
            seen = [by_step.get(step, Sum()) for step in range(first, self._step())]
            if not seen or (term.loss and term.width not in known):
                continue
            nbytes = statistics.median(total.bytes for total in seen)
            predicted = of_group.setdefault((term.parallelism, term.ranks), [])
            key = term.kind, term.phase, term.what, term.elements
            known_calls = [t for t in predicted if term.of and (t.kind, t.phase, t.what, t.elements) == key]
            if known_calls:
                known_calls[0].bytes += nbytes
            elif nbytes:
                again_bytes = statistics.median(total.again_bytes for total in seen)
                same = {name: before for total in seen for name, before in total.same.items()}
                predicted.append(Traffic(
                    term.ranks, term.kind, term.what, nbytes, term.elements, term.phase, term.repeated, again_bytes,
                    same, term.width,
                ))  # fmt: skip
        return {group: predicted for group, predicted in of_group.items() if predicted}

    def times(self, name: str, first: int) -> float:
        """Returns how often the median step from step ``first`` on runs a module that FSDP2 wraps."""
        by_step = self.runs.get(name, {})
        return statistics.median([by_step.get(step, 0) for step in range(first, self._step())] or [0])

    def median(self, by_step: dict[int, list[int]], first: int) -> tuple[float, int]:
        """Of :attr:`outputs` the median step's bytes, and elements of a call."""
        seen = [by_step.get(step, [0, 0]) for step in range(first, self._step())] or [[0, 0]]
        return statistics.median(nbytes for nbytes, _ in seen), seen[-1][1]

    def _module_begins(self, module: torch.nn.Module, args: Any) -> None:
        grad, backward = torch.is_grad_enabled(), compat.graph_task() != -1
        counts = self._stack[0].counts if self._stack else module.training or grad
        if not backward and not grad:
            self._graphless.add(module)  # a checkpoint that builds its graph in the backward pass
        elif not backward:
            self._graphless.discard(module)
        passage = Passage(module, counts, backward, grad and (not backward or module in self._graphless))
        self._stack.append(passage)
        kind = type(module)
        if kind not in self._wrapped:
            self._wrapped[kind] = compat.fsdp_state(module) is not None
        if self._wrapped[kind] and counts and not backward:
            by_step = self.runs.setdefault(self.name(module), {})
            by_step[self._step()] = by_step.get(self._step(), 0) + 1
        self._dtensors.begins(passage, args)

    def _module_ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        while self._stack[-1:] and self._stack[-1].module is not module:  # one that raised has not said that it ended
            self._stack.pop()
        if not self._stack:
            return
        passage = self._stack[-1]
        for reader in (self._dtensors, self._megatron):
            reader.ends(passage, args, output)
        self._stack.pop()
        if not self._stack and passage.counts and not passage.repeated:
            floats = [t for t in compat.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            by_step = self.outputs.setdefault(module, {}).setdefault(self._step(), [0, 0])
            by_step[0] += sum(local_part(t).nbytes for t in floats)
            by_step[1] = floats[0].numel() if floats else 0


def sent_by(kind: str, nbytes: float, ranks: int) -> float:
    """Returns the bytes that a rank sends of a whole of ``nbytes`` by the algorithm that sends least."""
    if kind == "all-reduce":
        return formulas.ring_all_reduce(nbytes, ranks).sent
    return formulas.ring_half(nbytes, ranks).sent


def ranks_of(group: Any) -> Ranks:
    """Returns a process group's ranks."""
    return tuple(dist.get_process_group_ranks(group))


@contextlib.contextmanager
def _ring_attention(shapes: Shapes) -> Iterator[None]:
    """Within the block attention is looked at below torch's context parallelism, which has made DTensors of it."""
    attention: Any = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def seen(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(key, DTensor) and key.device_mesh.ndim == 1 and key.placements[0].is_shard(SEQUENCE):
            _add_ring(shapes, key, value)
        return attention(query, key, value, *args, **kwargs)

    with compat.replaced(functional, "scaled_dot_product_attention", seen):
        yield


def _add_ring(shapes: Shapes, key: DTensor, value: DTensor) -> None:
    """Adds what context parallelism brings from other ranks for keys and values cut along the sequence."""
    ranks, grad = ranks_of(key.device_mesh.get_group()), torch.is_grad_enabled()
    passage = shapes.passage or Passage(torch.nn.Identity(), True, compat.graph_task() != -1, grad)
    elements, size = key.numel() + value.numel(), key.element_size()
    gathers, in_float32 = compat.context_parallel_options()
    kind, n = "all-gather" if gathers else "all-to-all", len(ranks)
    once = sent_by("all-gather", elements * size, n)
    for phase, carried in (("forward", KEYS), ("backward", f"{KEYS} again")):
        shapes.add(passage, "CP", ranks, kind, phase, elements, size, carried, sent=once)
    hop = elements // n * (4 if in_float32 else size)
    shapes.add(passage, "CP", ranks, "all-to-all", "backward", elements // n, size, HOPS, sent=hop, times=n)


WHOLE, SHARD, SUM, UNKNOWN = "whole", "shard", "sum", "unknown"
GATHERED = "inputs of column-cut layers, gathered"
SUMMED = "outputs of row-cut layers, summed"
GRADIENTS = "gradients of column-cut layers' inputs, summed"
REGATHERED = "gradients of row-cut layers' outputs, gathered"
REPLICATED = "gradients of parameters that each rank has and whose inputs are cut"
LOSS = "a loss on the cut vocabulary: maximum, sum and target's logit of each token"


@dataclass
class Input:
    """One input of a module: how it comes, as which DTensor it goes on, and whether its gradient is a sum."""

    ranks: Ranks
    comes: str
    goes: str
    ratio: int
    itemsize: int
    summed: bool = False


class DTensors:
    """Reads layouts: of what a module is called with, of what reaches its forward, of what that returns, and of what
    the module returns in the end. Only meshes of one dimension are read; the others stay without a formula."""

    def __init__(self, shapes: Shapes):
        self._shapes = shapes
        #: of modules that take or return DTensors their inputs, by position
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, Input]] = weakref.WeakKeyDictionary()
        self._taken: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def begins(self, passage: Passage, args: tuple[Any, ...]) -> None:
        """A module is called; nothing of its hooks has run yet."""
        known = self._known.get(passage.module)
        if known is None:
            return
        passage.begun = tuple((_layout(a), a.numel()) if isinstance(a, torch.Tensor) else None for a in args)
        passage.hook = passage.module.register_forward_hook(lambda module, args, output: self._left(passage, output))
        for position, taken in known.items():
            if position < len(args) and isinstance(args[position], torch.Tensor):
                self._input(passage, taken, args[position])

    def _input(self, passage: Passage, taken: Input, raw: torch.Tensor) -> None:
        """What has to travel before, and after, a module's input is used: known since it was called before."""
        if taken.goes != WHOLE:
            return
        again = next((first for ref, first in self._taken if ref() is raw), "")
        if not again and (taken.comes == SHARD or taken.summed):
            self._taken.append((weakref.ref(raw), self._shapes.name(passage.module)))

        def add(kind: str, phase: str, carried: str) -> None:
            elements = raw.numel() * taken.ratio
            self._shapes.add(passage, "TP", taken.ranks, kind, phase, elements, taken.itemsize, carried, again=again)

        if taken.comes == SHARD:
            add("all-gather", "forward", GATHERED)
        if taken.summed and raw.requires_grad and taken.comes == SHARD:
            add("reduce-scatter", "backward", GRADIENTS)
        elif taken.summed and raw.requires_grad and not isinstance(raw, DTensor):
            add("all-reduce", "backward", GRADIENTS)  # a DTensor stays a sum, and the module that made it sums it

    def ends(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        """A module's forward has returned; its own hooks have not run yet. ``args`` are those that reached it."""
        first = output[0] if isinstance(output, tuple) and output else output
        some = any(isinstance(a, DTensor) for a in args)
        if passage.module not in self._known:
            if some or isinstance(first, DTensor):
                self._known[passage.module] = {}
            return
        known = self._known[passage.module]
        for position, arg in enumerate(args):
            if isinstance(arg, DTensor) and position < len(passage.begun) and passage.begun[position] is not None:
                self._learn(passage, known, position, arg)
        if isinstance(first, DTensor) and (ranks := _ranks(first)):
            traits = first.numel(), first.element_size(), first.requires_grad, first.shape
            passage.ended = ranks, _layout(first), *traits
        if not list(self._shapes.outer()):
            self._taken = []

    def _learn(self, passage: Passage, known: dict[int, Input], position: int, arg: DTensor) -> None:
        ranks = _ranks(arg)
        if not ranks:
            return
        layout, numel = passage.begun[position]
        ratio = max(arg.numel() // max(numel, 1), 1)
        comes = layout if layout != WHOLE or ratio == 1 else SHARD if ratio == len(ranks) else UNKNOWN
        taken = Input(ranks, comes, _layout(arg), ratio, arg.element_size(), _column(passage.module))
        before = known.get(position)
        if before is not None and before.summed:
            taken.summed = True
        known[position] = taken
        if taken.summed and isinstance(arg, DTensor) and layout == WHOLE and ratio == 1:
            self._around(ranks)
        if taken.goes == SHARD and arg.requires_grad and passage.backward:
            self._replicated(passage, ranks)

    def _around(self, ranks: Ranks) -> None:
        """A column-cut layer takes what is whole: the gradient of a module's around it is a sum, if it made it so."""
        for outer in self._shapes.outer():
            for taken in self._known.get(outer.module, {}).values():
                if taken.ranks == ranks and taken.goes == WHOLE:
                    taken.summed = True
                    return

    def _replicated(self, passage: Passage, ranks: Ranks) -> None:
        """Parameters that all ranks have, of a module whose input is cut: their gradients are sums over the ranks."""
        parameters = [p for p in passage.module.parameters(recurse=False) if isinstance(p, DTensor) and p.requires_grad]
        if not passage.counts or not parameters or any(_layout(p) != WHOLE or _ranks(p) != ranks for p in parameters):
            return
        for number, parameter in enumerate(parameters):
            label = f"{self._shapes.name(passage.module)} {number}"
            term = Term("TP", ranks, "all-reduce", "", False, parameter.numel(), REPLICATED, of=label)
            self._shapes.once(term, sent_by("all-reduce", parameter.numel() * parameter.element_size(), len(ranks)))

    def _left(self, passage: Passage, output: Any) -> None:
        """A module's last hook: what its output has become."""
        passage.hook.remove()
        first = output[0] if isinstance(output, tuple) and output else output
        if passage.ended is None or not isinstance(first, torch.Tensor):
            return
        ranks, layout, elements, itemsize, grad, shape = passage.ended
        if isinstance(first, DTensor):
            became = _layout(first)
        else:
            became = WHOLE if first.numel() == elements else SHARD if first.numel() * len(ranks) == elements else ""
        module = self._shapes.name(passage.module)

        def add(kind: str, phase: str, carried: str) -> None:
            self._shapes.add(passage, "TP", ranks, kind, phase, elements, itemsize, carried, width=shape[-1])

        if layout == SUM and became == WHOLE:
            add("all-reduce", "forward", SUMMED)
        elif layout == SUM and became == SHARD:
            add("reduce-scatter", "forward", SUMMED)
            if grad:
                add("all-gather", "backward", REGATHERED)
        elif layout == SHARD and became == WHOLE:
            add("all-gather", "forward", f"outputs of {module}, gathered whole")
        elif layout == WHOLE and became == SHARD and grad:
            add("all-gather", "backward", f"gradients of outputs of {module}, gathered")
        elif layout == SHARD and isinstance(first, DTensor) and _column(passage.module):
            width = shape[-1]
            self._shapes.add(
                passage, "TP", ranks, "all-reduce", "", elements // width, itemsize, LOSS, times=3, width=width,
                loss=True,
            )  # fmt: skip


def _column(module: torch.nn.Module) -> bool:
    """Whether it is a linear layer whose output's features are cut: the gradient of its input is a sum over ranks."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, torch.nn.Linear) or not isinstance(weight, DTensor):
        return False
    return any(p.is_shard(0) for p in weight.placements)


def _layout(tensor: torch.Tensor) -> str:
    """Says how a DTensor over one dimension lies: whole, a shard, or a partial sum. Any other tensor is whole."""
    if not isinstance(tensor, DTensor):
        return WHOLE
    (placement,) = tensor.placements if len(tensor.placements) == 1 else (None,)
    if placement is None:
        return UNKNOWN
    return WHOLE if placement.is_replicate() else SHARD if placement.is_shard() else SUM


def _ranks(tensor: DTensor) -> Ranks:
    """Returns the ranks of a mesh of one dimension; none of others."""
    return ranks_of(tensor.device_mesh.get_group()) if tensor.device_mesh.ndim == 1 else ()


AGAIN = "inputs of column-cut layers, gathered again: sequence parallelism keeps only its shard"
TOKENS = "tokens to experts of other ranks, and back"


class Megatron:
    """Reads Megatron-core's tensor-parallel layers, its language models' losses, and its layers of experts."""

    def __init__(self, shapes: Shapes):
        self._shapes = shapes
        self._roles: dict[type, Callable | None] = {}

    def ends(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        """A module's forward has returned."""
        kind = type(passage.module)
        if kind not in self._roles:
            self._roles[kind] = self._role(kind)
        role = self._roles[kind]
        if role is not None and output is not None:
            role(passage, args, output)
        for outer in self._shapes.outer():  # experts are any class: they are a layer's, by name
            if passage.module is getattr(outer.module, "experts", None) and args and isinstance(outer.ended, dict):
                outer.ended["received"] = args[0].shape[0]
            break

    def _role(self, kind: type) -> Callable | None:
        layers = sys.modules.get("megatron.core.tensor_parallel.layers")
        if layers is None or not any(base.__module__.startswith("megatron.core.") for base in kind.__mro__):
            return None
        roles = {
            "ColumnParallelLinear": self._column, "RowParallelLinear": self._row,
            "VocabParallelEmbedding": self._vocabulary, "LanguageModelEmbedding": self._embedding,
            "GPTModel": self._loss, "TopKRouter": self._routed, "MoELayer": self._experts,
        }  # fmt: skip
        return next((roles[base.__name__] for base in kind.__mro__ if base.__name__ in roles), None)

    def _tp(
        self, passage: Passage, ranks: Ranks, kind: str, phase: str, elements: int, tensor: torch.Tensor, carried: str
    ) -> None:  # fmt: skip
        if phase == "forward" or tensor.requires_grad:
            self._shapes.add(passage, "TP", ranks, kind, phase, elements, tensor.element_size(), carried)

    def _column(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        layer: Any = passage.module
        taken, made = args[0], output[0]
        ranks = ranks_of(layer.tp_group)
        if layer.explicit_expert_comm:
            return
        if layer.sequence_parallel:
            elements, frozen = taken.numel() * len(ranks), layer.weight is not None and not layer.weight.requires_grad
            self._tp(passage, ranks, "all-gather", "forward", elements, taken, GATHERED)
            if made.requires_grad:
                if not frozen:
                    self._tp(passage, ranks, "all-gather", "backward", elements, made, AGAIN)
                self._tp(passage, ranks, "reduce-scatter", "backward", elements, made, GRADIENTS)
        elif layer.allreduce_dgrad:
            self._tp(passage, ranks, "all-reduce", "backward", taken.numel(), made, GRADIENTS)
        if layer.gather_output:
            carried = f"outputs of {self._shapes.name(layer)}, gathered whole"
            self._tp(passage, ranks, "all-gather", "forward", made.numel(), made, carried)

    def _row(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        layer: Any = passage.module
        made = output[0]
        ranks = ranks_of(layer.tp_group)
        if layer.explicit_expert_comm:
            return
        if not layer.input_is_parallel:
            carried = "gradients of row-cut layers' inputs, gathered"
            self._tp(passage, ranks, "all-gather", "backward", args[0].numel(), made, carried)
        self._summed(passage, ranks, made, layer.sequence_parallel)

    def _vocabulary(self, passage: Passage, args: tuple[Any, ...], output: torch.Tensor) -> None:
        layer: Any = passage.module
        self._summed(passage, ranks_of(layer.tp_group), output, layer.reduce_scatter_embeddings)

    def _summed(self, passage: Passage, ranks: Ranks, made: torch.Tensor, scattered: bool) -> None:
        if scattered:
            self._tp(passage, ranks, "reduce-scatter", "forward", made.numel() * len(ranks), made, SUMMED)
            self._tp(passage, ranks, "all-gather", "backward", made.numel() * len(ranks), made, REGATHERED)
        else:
            self._tp(passage, ranks, "all-reduce", "forward", made.numel(), made, SUMMED)

    def _embedding(self, passage: Passage, args: tuple[Any, ...], output: torch.Tensor) -> None:
        layer: Any = passage.module
        scattered = layer.scatter_to_sequence_parallel and not layer.reduce_scatter_embeddings
        if layer.config.sequence_parallel and scattered:
            ranks = ranks_of(layer.word_embeddings.tp_group)
            carried = "gradients of the embedding's output, gathered"
            self._tp(passage, ranks, "all-gather", "backward", output.numel() * len(ranks), output, carried)

    def _loss(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        model: Any = passage.module
        ranks = ranks_of(model.pg_collection.tp)
        if isinstance(output, torch.Tensor) and output.dim() == 2 and model.post_process:
            if not model.config.cross_entropy_loss_fusion:  # the fused one sends the same by other calls
                self._shapes.add(passage, "TP", ranks, "all-reduce", "forward", output.numel(), 4, LOSS, times=3)
            if model.config.sequence_parallel:
                self._norms(model, ranks)

    def _norms(self, model: torch.nn.Module, ranks: Ranks) -> None:
        """Parameters that each rank has, of layers between the cut ones, which see a shard of the sequence."""
        some: list[Any] = [p for p in model.parameters() if getattr(p, "sequence_parallel", False) and p.requires_grad]
        elements = sum(p.numel() for p in some)
        size = some[0].main_grad.element_size() if some and hasattr(some[0], "main_grad") else 4
        term = Term("TP", ranks, "all-reduce", "", False, elements, REPLICATED)
        self._shapes.once(term, sent_by("all-reduce", elements * size, len(ranks)))

    def _routed(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        """Which tokens go to which experts: a router returns probabilities and a map of tokens × experts."""
        for outer in self._shapes.outer():
            if self._roles.get(type(outer.module), self._role(type(outer.module))) == self._experts:
                outer.ended = {"counts": output[1].sum(dim=0), "probability_bytes": output[0].element_size()}
            break

    def _experts(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        layer: Any = passage.module
        routed = passage.ended
        dispatcher, hidden = layer.token_dispatcher, args[0]
        if not isinstance(routed, dict) or "received" not in routed or dispatcher.tp_size > 1:
            return  # with tensor-parallel experts tokens are gathered as well
        if layer.config.moe_expert_capacity_factor is not None:
            return  # some tokens are dropped, others padded
        ranks, size = ranks_of(dispatcher.ep_group), hidden.element_size()
        width, probability = hidden.shape[-1], routed["probability_bytes"]

        def add(kind: str, phase: str, elements: int, itemsize: int, carried: str, sent: float | None = None) -> None:
            self._shapes.add(passage, "EP", ranks, kind, phase, elements, itemsize, carried, sent=sent)

        if type(dispatcher).__name__ == "MoEAlltoAllTokenDispatcher":
            kept = int(routed["counts"][layer.local_expert_indices].sum())
            leave, come = int(routed["counts"].sum()) - kept, routed["received"] - kept
            add("all-to-all", "forward", 0, size, TOKENS, leave * (width * size + probability) + come * width * size)
            add("all-to-all", "backward", 0, size, TOKENS, come * (width * size + probability) + leave * width * size)
        elif type(dispatcher).__name__ == "MoEAllGatherTokenDispatcher":
            numel = hidden.numel() * len(ranks)
            chances = numel // width * layer.config.num_moe_experts
            for kind, other in (("all-gather", "reduce-scatter"), ("reduce-scatter", "all-gather")):
                add(kind, "forward", numel, size, TOKENS)
                add(other, "backward", numel, size, TOKENS)
            carried = "each token's probabilities, to all ranks"
            add("all-gather", "forward", chances, probability, carried)
            add("reduce-scatter", "backward", chances, probability, carried)
            add("all-gather", "forward", chances, 1, "each token's experts")
