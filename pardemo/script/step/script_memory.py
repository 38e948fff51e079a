"""Records the tensors that are alive in a step, at its peak and over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pardemo import compat
from pardemo.compat import dtype_name
from pardemo.meters.memory import MemoryMeter
from pardemo.meters.snapshot import Block
from pardemo.meters.tensors import local_tensors
from pardemo.script.runtime.call_sites import CallSite, CallSites

#: Kinds by which a peak is reported. What the meter calls activations is split by its use.
KINDS = (
    "parameters", "gradients", "optimizer states", "activations", "gathered", "logits", "communication buffers",
    "temporaries", "random states", "held between steps",
)  # fmt: skip
HELD = "held between steps"
#: Rows of an embedding from which on a dimension of that size is taken for the vocabulary; below, it may be any.
LEAST_VOCABULARY = 256


@dataclass(eq=False)
class Storage:
    """A storage: its bytes, where it was made, and its first and last change in the count of all changes."""

    nbytes: int
    site: CallSite
    shape: tuple[int, ...]
    dtype: str
    born: int
    phase: int
    use: str = ""
    died: int | None = None
    short: bool = False


class ScriptMemoryMeter(MemoryMeter):
    """A :class:`MemoryMeter` for a whole script, which also notes from which line and module each tensor comes.

    Attributes: ``storages`` (those that lived since the last :meth:`begin`), ``vocabularies`` (of what has run).

    What was there before the step and outlives it, and is nothing of the model's or an optimizer's, is **held between
    steps**: data, and copies of parameters as an average has them.
    """

    def __init__(self, sites: CallSites):
        super().__init__(meets=True)
        self._sites = sites
        self.storages: dict[Any, Storage] = {}
        self._earlier: list[tuple[Any, Storage]] = []  # lives of storages that gave their memory back, and grew again
        self._embeddings: set[int] = set()  # their rows: of words, and of positions
        self._widths: set[int] = set()  # of what weights multiply: a tensor of such a width may be any layer's
        self._products: set[int] = set()  # widths of what comes out
        self._change = self._peak_change = self._phase = 0
        self._in_backward = False
        self._latest: Any = None  # the record of the storage that came last
        self._tensor: torch.Tensor | None = None  # which is being noted
        self.peak_site: CallSite | None = None

    def __enter__(self) -> "ScriptMemoryMeter":
        super().__enter__()
        self._hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: self._note_gradients(optimizer)))
        self._reductions = compat.before_fsdp2_reduces(lambda gradient: self._note(gradient, "gradients"))
        self._reductions.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._reductions.__exit__(None, None, None)
        super().__exit__(*error)

    @property
    def vocabularies(self) -> set[int]:
        """Rows of embeddings that some layer has as its width; of none, as where the head is no module, the most rows.

        An embedding of positions has as many as attention's scores are wide, which are no logits.
        """
        return self._embeddings & self._products or {max(self._embeddings, default=0)} - {0}

    def begin(self) -> None:
        """Starts the peak and the count of changes anew with what is alive now, and forgets what has died."""
        self.storages = {record: life for record, life in self.storages.items() if life.died is None}
        for storage in self.storages.values():
            storage.born = 0
        self._earlier.clear()
        self._change = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        super().reset_peak()
        self._peak_change = self._change
        made = self.storages.get(self._latest)
        self.peak_site = made.site if made else None

    def used(self, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Marks a collective's tensors as gathered, or as a communication buffer where it sums no gradient."""
        kinds = {"all-gather": ("", "gathered"), "all-reduce": ("communication buffers", "")}
        of_inputs, of_outputs = kinds.get(kind, ("communication buffers", "communication buffers"))
        for tensors, use in ((inputs, of_inputs), (outputs, of_outputs)):
            for part in (p for tensor in tensors if use for p in local_tensors(tensor)):
                with self._lock:
                    made = self.storages.get(self._records.get(part.untyped_storage()))
                    if made is not None and not made.use:
                        made.use = use

    def at_peak(self) -> tuple[dict[str, int], list[tuple[str, Storage]]]:
        """Returns bytes by kind of :data:`KINDS` at the peak, and its storages with their kinds, the largest first."""
        kinds = dict.fromkeys(KINDS, 0)
        alive, copies = [], self._copies()
        for record, life in (*self._earlier, *self.storages.items()):
            if life.born <= self._peak_change and (life.died is None or life.died > self._peak_change):
                kind = HELD if record in copies else self._shown_kind(record.kind, life)
                kinds[kind] += life.nbytes
                alive.append((kind, life))
        return kinds, sorted(alive, key=lambda item: -item[1].nbytes)

    def all(self) -> list[tuple[str, Storage]]:
        """Returns every storage since :meth:`begin` with its kind, in the order in which they came."""
        lives, copies = (*self._earlier, *self.storages.items()), self._copies()
        shown = ((HELD if record in copies else self._shown_kind(record.kind, life), life) for record, life in lives)
        return sorted(shown, key=lambda item: item[1].born)

    def _copies(self) -> set[Any]:
        """Returns the records of the parameters and buffers of copies that the script calls, as it does an average."""
        return {
            self._records.get(part.untyped_storage())
            for copy in self._sites.copies()
            for tensor in (*copy.parameters(), *torch.nn.Module.buffers(copy))
            for part in local_tensors(tensor)
        }

    def _shown_kind(self, kind: str, storage: Storage) -> str:
        if kind == "parameters" and storage.use == "gathered" and storage.born:
            return "gathered"  # a module that runs has its parameters whole for a moment; what stays whole is its own
        buffer = storage.site.use == "communication buffers" and storage.nbytes > 2 * self.live["parameters"]
        if kind == "gradients" and buffer:
            return "communication buffers"  # DeepSpeed's bucket, in which it puts gradients one after the other
        if kind != "activations":
            return kind
        if storage.use:
            return storage.use
        if storage.born == 0 and storage.died is None:
            return HELD
        widths = self.vocabularies - self._widths
        if storage.shape and storage.shape[-1] in widths and len(storage.shape) > 1 and "float" in storage.dtype:
            return "logits"
        return "temporaries" if storage.short else "activations"

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes as gradients what an optimizer is about to use: no hook reports those that FSDP sets."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, torch.nn.Parameter):
                    self._note(parameter.grad, "gradients")

    def _meet(self, module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings >= LEAST_VOCABULARY:
            self._embeddings.add(module.num_embeddings)
        super()._meet(module, inputs)
        for parameter in module.parameters(recurse=False):
            shape = getattr(parameter, "ds_shape", parameter.shape)  # DeepSpeed's, of which a rank has a shard
            if len(shape) > 1:
                self._widths.add(shape[-1])
                self._products |= set() if isinstance(module, torch.nn.Embedding) else {shape[0]}
            self._note(getattr(parameter, "ds_tensor", None), "parameters")  # DeepSpeed's shard

    def _note(self, tensor: torch.Tensor | None, kind: str | None = None) -> None:
        self._tensor = tensor
        try:
            super()._note(tensor, kind)
        finally:
            self._tensor = None  # it would live on

    def _changed(self, storage: torch.UntypedStorage | None, record: Any, nbytes: int) -> None:
        self._change += 1
        backward = compat.graph_task() != -1
        if backward != self._in_backward:
            self._in_backward, self._phase = backward, self._phase + 1
        known = self.storages.get(record)
        if storage is None or (known is not None and record.nbytes == 0):  # gone, or its memory given back
            if known is not None and known.died is None:
                known.died, known.short = self._change, known.phase == self._phase
            return
        if known is not None and known.died is None:
            known.nbytes = record.nbytes
            self._latest = record
            return
        if known is not None:
            self._earlier.append((record, known))
        tensor, site = self._tensor, self._sites.here()
        shape, dtype = ((), "") if tensor is None else (tuple(tensor.shape), dtype_name(tensor.dtype))
        use = site.use if site.use in KINDS else ""
        self.storages[record] = Storage(record.nbytes, site, shape, dtype, self._change, self._phase, use)
        self._latest = record


#: A picture has no room for more.
COLUMNS = 300


class MemoryColumns(NamedTuple):
    """A step's memory in columns of equally many changes; each column shows its fullest moment.

    Args:
        columns: bytes by kind. peak_bytes: the largest sum. peak_column: where it is.
        phases: what ran, from which column to which, in parts of columns.
    """

    columns: list[dict[str, int]]
    peak_bytes: int
    peak_column: int
    phases: list[tuple[str, float, float]]


def block_changes(blocks: Sequence[Block]) -> list[tuple[int, str, int]]:
    """Returns of each birth and death of a block its time, its kind and its bytes, negative where it died."""
    changes = [(block.born, block.kind, block.bytes) for block in blocks]
    changes += [(block.died, block.kind, -block.bytes) for block in blocks if block.died is not None]
    return sorted(changes, key=lambda change: change[0])


def memory_timeline(blocks: Sequence[Block], columns: int = COLUMNS) -> MemoryColumns:
    """Makes the timeline of a step's blocks."""
    changes = block_changes(blocks)
    per_column = (1 + max((at for at, _, _ in changes), default=0)) / columns
    live: dict[str, int] = {}
    made: list[dict[str, int]] = []
    most = peak = peak_column = 0
    for at, kind, nbytes in changes:
        column = int(at / per_column)
        while len(made) <= column:  # what is held stays held where nothing changes
            made.append(dict(live))
            most = sum(live.values())
        live[kind] = live.get(kind, 0) + nbytes
        if (now := sum(live.values())) >= most:
            made[column], most = dict(live), now
        if now > peak:
            peak, peak_column = now, column
    return MemoryColumns(made, peak, peak_column, _phases(blocks, per_column))


def _phases(blocks: Sequence[Block], per_column: float) -> list[tuple[str, float, float]]:
    """Stretches of blocks that came in one phase, as columns; what was there before the step came in none of them."""
    joined: list[tuple[str, int, int]] = []
    for block in sorted((block for block in blocks if block.born), key=lambda block: block.born):
        if joined and joined[-1][0] == block.phase:
            joined[-1] = block.phase, joined[-1][1], block.born
        else:
            joined.append((block.phase, block.born, block.born))
    return [(phase, begin / per_column, (end + 1) / per_column) for phase, begin, end in joined]
