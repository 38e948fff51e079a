"""Derives what cut layers need of other ranks from the shapes where modules begin and end, not from collectives.

Each passage of a cut module says what has to travel: a row-cut layer's output is a sum over the group's ranks, a
column-cut layer's input is whole on each of them, and so on (Shoeybi et al. 2019, 3; Korthikanti et al. 2022, 4.2).
What was sent is then held against that. Layers are those of torch's ``parallelize_module``, and Megatron-core's.
"""

import contextlib
import functools
import statistics
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pardemo import compat
from pardemo.compat import local_part
from pardemo.formulas import communication as formulas
from pardemo.script.runtime.call_sites import CallSites
from pardemo.script.runtime.hooks import Hooks

Ranks = tuple[int, ...]
KEYS = "keys and values of the other parts of the sequence"
HOPS = "gradients of keys and values, which visit each rank and come home"
GATHERED = "inputs of column-cut layers, gathered"
SUMMED = "outputs of row-cut layers, summed"
GRADIENTS = "gradients of column-cut layers' inputs, summed"
REGATHERED = "gradients of row-cut layers' outputs, gathered"
REPLICATED = "gradients of parameters that each rank has and whose inputs are cut"
LOSS = "a loss on the cut vocabulary: maximum, sum and target's logit of each token"
#: The axis of a sequence in queries, keys and values: samples, heads, tokens, features of a head.
SEQUENCE = 2


@dataclass(frozen=True)
class Term:
    """A formula's prediction for one kind of traffic.

    Args:
        parallelism: ``TP``, ``CP``, ``EP``. ranks: of the group.
        kind: the collective. phase: of the step; empty where it may be any.
        elements: of the whole tensor of one call; 0 where calls differ.
        what: in words. width: of the last axis, where that says what the tensor is.
        loss: only meant where an embedding has as many rows as ``width``.
        parameter: whose traffic it is, where terms of several parameters are reported as one.
        repeated: whether a forward that runs again in the backward pass needs it.
    """

    parallelism: str
    ranks: Ranks
    kind: str
    phase: str
    elements: int
    what: str
    width: int = 0
    loss: bool = False
    parameter: str = ""
    repeated: bool = False


@dataclass
class ExpectedTraffic:
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
    """A term's bytes in one step: those that a rank sends, and those that modules add which take the same input.

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


class Reader:
    """Adds to :class:`Shapes` what cut layers of one library have to send."""

    def __init__(self, shapes: "Shapes"):
        self._shapes = shapes

    def begins(self, passage: Passage, args: tuple[Any, ...]) -> None:
        """A module is called; nothing of its hooks has run yet."""

    def ends(self, passage: Passage, args: tuple[Any, ...], output: Any) -> None:
        """A module's forward has returned; its own hooks have not run yet. ``args`` are those that reached it."""


class Shapes(Hooks):
    """Adds up, step by step, the terms of all formulas whose shapes it sees while the block runs.

    Args:
        sites: names of modules. step: the number of the step that runs. readers: of layers, kinds of :class:`Reader`.
    """

    also_raised = True

    def __init__(self, sites: CallSites, step: Callable[[], int], *readers: Callable[["Shapes"], "Reader"]):
        super().__init__()
        self._sites, self._step = sites, step
        self._sums: dict[Term, dict[int, Sum]] = {}
        self._stack: list[Passage] = []
        self._readers = [reader(self) for reader in readers]
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
        self, passage: Passage, term: Term, itemsize: int, *, times: float = 1, again: str = "",
        sent: float | None = None,
    ) -> None:  # fmt: skip
        """Adds calls of a module that runs to a term of this step.

        In a forward that runs again, what is forward is the backward pass's.

        Args:
            itemsize: bytes of an element. times: how many calls. again: another module that took the same input.
            sent: bytes by a rank in a call, where no ring sends it.
        """
        ranks = len(term.ranks)
        if not passage.counts or (term.phase == "backward" and not passage.backward) or ranks < 2:
            return
        if passage.repeated and term.phase == "forward":
            term = replace(term, phase="backward", repeated=True)
        total = self._sums.setdefault(term, {}).setdefault(self._step(), Sum())
        nbytes = times * (sent_by(term.kind, term.elements * itemsize, ranks) if sent is None else sent)
        if again:
            total.again_bytes += nbytes
            total.same[self.name(passage.module)] = again
        else:
            total.bytes += nbytes

    def once(self, term: Term, nbytes: float) -> None:
        """Adds a term that a step has once, however often it is seen."""
        self._sums.setdefault(term, {})[self._step()] = Sum(nbytes)

    def traffic(self, first: int, vocabularies: Iterable[int]) -> dict[tuple[str, Ranks], list[ExpectedTraffic]]:
        """Returns the median step's traffic from step ``first`` on, by parallelism and group."""
        known = set(vocabularies)
        of_group: dict[tuple[str, Ranks], list[ExpectedTraffic]] = {}
        for term, by_step in self._sums.items():
            seen = [by_step.get(step, Sum()) for step in range(first, self._step())]
            if not seen or (term.loss and term.width not in known):
                continue
            nbytes = statistics.median(total.bytes for total in seen)
            predicted = of_group.setdefault((term.parallelism, term.ranks), [])
            key = term.kind, term.phase, term.what, term.elements
            known_calls = [t for t in predicted if term.parameter and (t.kind, t.phase, t.what, t.elements) == key]
            if known_calls:
                known_calls[0].bytes += nbytes
            elif nbytes:
                again_bytes = statistics.median(total.again_bytes for total in seen)
                same = {name: before for total in seen for name, before in total.same.items()}
                predicted.append(ExpectedTraffic(
                    term.ranks, term.kind, term.what, nbytes, term.elements, term.phase, term.repeated, again_bytes,
                    same, term.width,
                ))  # fmt: skip
        return {group: predicted for group, predicted in of_group.items() if predicted}

    def times(self, name: str, first: int) -> float:
        """Returns how often the median step from step ``first`` on runs a module that FSDP2 wraps."""
        by_step = self.runs.get(name, {})
        return statistics.median([by_step.get(step, 0) for step in range(first, self._step())] or [0])

    def median(self, by_step: dict[int, list[int]], first: int) -> tuple[float, int]:
        """Returns the median step's bytes, and a call's elements, of a stage's :attr:`outputs`."""
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
        for reader in self._readers:
            reader.begins(passage, args)

    def _module_ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        while self._stack[-1:] and self._stack[-1].module is not module:  # one that raised has not said that it ended
            self._stack.pop()
        if not self._stack:
            return
        passage = self._stack[-1]
        for reader in self._readers:
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
        shapes.add(passage, Term("CP", ranks, kind, phase, elements, carried), size, sent=once)
    hop = elements // n * (4 if in_float32 else size)
    shapes.add(passage, Term("CP", ranks, "all-to-all", "backward", elements // n, HOPS), size, sent=hop, times=n)
