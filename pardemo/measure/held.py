"""What a step holds at its peak: tensor by tensor, by kind, with the line and the module that made each."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pardemo import compat
from pardemo.measure.places import Place, Places
from pardemo.meters.inside import plain_tensors
from pardemo.meters.memory import MemoryMeter

#: What a peak is told by. The meter's activations are told apart by what they are for.
KINDS = (
    "parameters", "gradients", "optimizer states", "activations", "gathered", "logits", "communication buffers",
    "temporaries", "random states", "held between steps",
)  # fmt: skip
#: Rows of an embedding from which on a dimension of that size is taken for the vocabulary; below, it may be any.
LEAST_VOCABULARY = 256


@dataclass(eq=False)
class Storage:
    """One storage that was alive: bytes, where it was made, and between which changes it lived."""

    nbytes: int
    place: Place
    shape: tuple[int, ...]
    dtype: str
    born: int
    phase: int
    use: str = ""
    died: int | None = None
    short: bool = False


class Held(MemoryMeter):
    """A :class:`MemoryMeter` for a whole script: all modules and optimizers that it meets, and where tensors come from.

    Attributes: ``storages`` (those that lived since the last :meth:`begin`), ``vocabularies`` (sizes of embeddings).

    What was there before the step and outlives it, and is nothing of the model's or an optimizer's, is **held between
    steps**: data, and copies of parameters as an average has them.
    """

    def __init__(self, places: Places):
        super().__init__(meets=True)
        self._places = places
        self.storages: dict[Any, Storage] = {}
        self._earlier: list[tuple[Any, Storage]] = []  # lives of storages that gave their memory back, and grew again
        self.vocabularies: set[int] = set()
        self._widths: set[int] = set()  # of what weights multiply: a tensor of such a width may be any layer's
        self._change = self._peak_change = self._phase = 0
        self._in_backward = False
        self._latest: Any = None  # the record of the storage that came last
        self._tensor: torch.Tensor | None = None  # which is being noted
        self.peak_place: Place | None = None

    def __enter__(self) -> "Held":
        super().__enter__()
        self._hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: self._note_gradients(optimizer)))
        self._reductions = compat.before_fsdp2_reduces(lambda gradient: self._note(gradient, "gradients"))
        self._reductions.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._reductions.__exit__(None, None, None)
        super().__exit__(*error)

    def begin(self) -> None:
        """The peak and the count of changes begin anew, with what is alive now; what has died before is forgotten."""
        self.storages = {record: one for record, one in self.storages.items() if one.died is None}
        for one in self.storages.values():
            one.born = 0
        self._earlier.clear()
        self._change = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        super().reset_peak()
        self._peak_change = self._change
        made = self.storages.get(self._latest)
        self.peak_place = made.place if made else None

    def used(self, kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """A collective's tensors: what it gathers is gathered, what it sums and is no gradient a buffer."""
        of = {"all-gather": ("", "gathered"), "all-reduce": ("communication buffers", "")}
        of_inputs, of_outputs = of.get(kind, ("communication buffers", "communication buffers"))
        for tensors, use in ((inputs, of_inputs), (outputs, of_outputs)):
            for part in (p for tensor in tensors if use for p in plain_tensors(tensor)):
                with self._lock:
                    made = self.storages.get(self._records.get(part.untyped_storage()))
                    if made is not None and not made.use:
                        made.use = use

    def at_peak(self) -> tuple[dict[str, int], list[tuple[str, Storage]]]:
        """Bytes by kind of :data:`KINDS` at the peak, and its storages with their kinds, the largest first."""
        kinds = dict.fromkeys(KINDS, 0)
        alive = []
        for record, one in (*self._earlier, *self.storages.items()):
            if one.born <= self._peak_change and (one.died is None or one.died > self._peak_change):
                kind = self._kind(record.kind, one)
                kinds[kind] += one.nbytes
                alive.append((kind, one))
        return kinds, sorted(alive, key=lambda item: -item[1].nbytes)

    def all(self) -> list[tuple[str, Storage]]:
        """Every storage since :meth:`begin`, with its kind, in the order in which they came."""
        lives = (*self._earlier, *self.storages.items())
        return sorted(((self._kind(record.kind, one), one) for record, one in lives), key=lambda item: item[1].born)

    def _kind(self, kind: str, one: Storage) -> str:
        if kind == "parameters" and one.use == "gathered" and one.born:
            return "gathered"  # a module that runs has its parameters whole for a moment; what stays whole is its own
        if (
            kind == "gradients"
            and one.place.use == "communication buffers"
            and one.nbytes > 2 * self.live["parameters"]
        ):
            return "communication buffers"  # DeepSpeed's bucket, in which it puts gradients one after the other
        if kind != "activations":
            return kind
        if one.use:
            return one.use
        if one.born == 0 and one.died is None:
            return "held between steps"
        widths = self.vocabularies - self._widths
        if one.shape and one.shape[-1] in widths and len(one.shape) > 1 and "float" in one.dtype:
            return "logits"
        return "temporaries" if one.short else "activations"

    def _note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer is about to use as gradients: FSDP sets them, and no hook of theirs says so."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, torch.nn.Parameter):
                    self._note(parameter.grad, "gradients")

    def _meet(self, module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings >= LEAST_VOCABULARY:
            self.vocabularies.add(module.num_embeddings)
        super()._meet(module, inputs)
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                self._widths.add(parameter.shape[-1])
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
        tensor = self._tensor
        shape = tuple(tensor.shape) if tensor is not None else ()
        dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
        place = self._places.here()
        made = Storage(
            record.nbytes, place, shape, dtype, self._change, self._phase, place.use if place.use in KINDS else ""
        )
        self.storages[record] = made
        self._latest = record
