"""Records the operations of one step as a GPU would run them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from pardemo import compat
from pardemo.meters.operation_costs import FLOPS, memory_bytes, traffic
from pardemo.meters.tensors import tensors_in
from pardemo.script.runtime.call_sites import CallSites
from pardemo.script.runtime.collectives import Call

#: Elements of 2 bytes: a GPU's matrix units multiply them at the rate of its datasheet.
LOW = (torch.bfloat16, torch.float16)
#: Results that the script's Python reads: the processor waits until the GPU is there.
_READ = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero"}
_ATTENTION = ("attention", "flash")


class Operation(NamedTuple):
    """An operation that a GPU would launch.

    Args:
        product: ``16`` or ``32`` (bits of its factors), ``attention16``, ``attention32``; empty where it multiplies no
            matrices. flops: of a product. sizes: of a product of two matrices, rows, depth and columns; of several at
            once none. bytes: what it reads and writes.
        after: numbers of the step's collectives whose results it uses.
        read: whether the script's Python waits for its result. module: whose; in a backward pass, too. phase: of it;
            ``recomputed`` where a backward pass runs a forward again.
    """

    product: str
    flops: float
    sizes: tuple[int, ...]
    bytes: float
    after: tuple[int, ...]
    read: bool
    module: str
    phase: str


class RecordedCollective(NamedTuple):
    """The beginning of a collective.

    Args:
        number: of this collective in the step. call: its number among all calls of the rank.
        operations: how many operations were launched when the last of those began whose results it sends.
        after: earlier collectives whose results it sends. waits: whether what is launched next waits for it.
    """

    number: int
    call: int
    operations: int
    after: tuple[int, ...]
    waits: bool


class StepWork(NamedTuple):
    """A rank's second step: its operations and exchanges in order.

    ``tf32``: whether fp32 products may be TF32's. ``layers``: names of the equal layers that the model consists of.
    """

    list: list[Operation | RecordedCollective]
    tf32: bool
    layers: tuple[str, ...]


class OperationRecorder(compat.TorchDispatchMode):
    """Notes the operations of a step, in the order in which the script launches them.

    Args:
        sites: where the script is. calls: the rank's collectives so far, to which each adds itself.
    """

    def __init__(self, sites: CallSites, calls: Callable[[], list[Call]]):
        super().__init__()
        self.list: list[Operation | RecordedCollective] = []
        self._sites, self._calls = sites, calls
        self._last: dict[int, tuple[int, int]] = {}  # storage -> (collective, operations) that wrote it last
        self._operations = self._exchanges = 0
        self._recording = False

    def begin(self) -> None:
        """Starts to record a step."""
        self.list.clear()
        self._last.clear()
        self._operations = self._exchanges = 0
        self._recording = True

    def note_wait(self) -> None:
        """Notes that the script waits for a collective: for the last one, where nothing was launched since."""
        last = self.list[-1] if self._recording and self.list else None
        if isinstance(last, RecordedCollective) and not self._calls()[last.call].site.use:
            self.list[-1] = last._replace(waits=True)  # not FSDP's, which has streams of its own

    def step(self, roots: Iterable[torch.nn.Module]) -> StepWork:
        """Ends the recording; returns the work of a step of a script with these models."""
        self._recording = False
        return StepWork(
            self.list, torch.get_float32_matmul_precision() != "highest", equal_layers(roots, self._sites.name)
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations, on its part, come by here
        kwargs = kwargs or {}
        before = len(self._calls())
        out = func(*args, **kwargs)
        if self._recording:
            made = range(before, len(self._calls()))
            if made:
                self._exchanged(func, args, kwargs, out, made)
            else:
                self._launched(func, args, kwargs, out)
        return out

    def _launched(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = compat.op_schema(func).name
        read, written = tensors_in((args, kwargs)), tensors_in(out)
        count = FLOPS.get(compat.op_packet(func))
        after = {wrote[0] for tensor in read if (wrote := self._last.get(_key(tensor))) is not None and wrote[0] >= 0}
        if count is not None:
            flops, moved = float(count(*args, **kwargs, out_val=out)), float(sum(map(memory_bytes, [*read, *written])))
            low = any(tensor.dtype in LOW for tensor in read)
            if _causal(func, args, kwargs):
                flops /= 2  # a kernel of a GPU leaves out the half that the mask takes away
            product = ("attention" if any(word in name for word in _ATTENTION) else "") + ("16" if low else "32")
        else:
            flops, moved, product = 0.0, float(sum(traffic(func, args, out))), ""
        waits = name in _READ
        if not (moved or flops or waits):  # a view, or memory without content
            for key in set(map(_key, written)) - set(map(_key, read)):  # an address may have been another storage's
                self._last[key] = -1, self._operations
            return
        site = self._sites.here()
        self._operations += 1
        phase = "recomputed" if site.repeated else site.phase
        sizes = _sizes(read) if flops else ()
        self.list.append(Operation(product, flops, sizes, moved, tuple(sorted(after)), waits, site.module, phase))
        changed = read if compat.op_schema(func).is_mutable else []
        for tensor in (*written, *changed):
            self._last[_key(tensor)] = -1, self._operations

    def _exchanged(self, func: Any, args: Any, kwargs: Any, out: Any, made: range) -> None:
        read, written = tensors_in((args, kwargs)), tensors_in(out)
        if "recv" in compat.op_schema(func).name:
            written = read
        wrote = [self._last[key] for key in map(_key, read) if key in self._last]
        after = tuple(sorted({number for number, _ in wrote if number >= 0}))
        operations = max((count for _, count in wrote), default=0)
        for call in made:
            self.list.append(RecordedCollective(self._exchanges, call, operations, after, False))
            self._exchanges += 1
        for tensor in written:
            self._last[_key(tensor)] = self._exchanges - 1, operations


def _key(tensor: torch.Tensor) -> int:
    return compat.storage_address(tensor.untyped_storage())


def _causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation is attention with a causal mask of its own."""
    names = [argument.name for argument in compat.op_schema(func).arguments]
    if "is_causal" not in names:
        return False
    at = names.index("is_causal")
    return bool(args[at] if at < len(args) else kwargs.get("is_causal", False))


def _sizes(factors: list[torch.Tensor]) -> tuple[int, ...]:
    """Rows, depth and columns of a product of matrices; its factors come last, behind what is added to it."""
    matrices = [tensor.shape for tensor in factors if tensor.dim() == 2]
    if len(matrices) < 2 or any(tensor.dim() > 2 for tensor in factors) or matrices[-2][1] != matrices[-1][0]:
        return ()
    return int(matrices[-2][0]), int(matrices[-2][1]), int(matrices[-1][1])


def equal_layers(roots: Iterable[torch.nn.Module], name: Callable[[torch.nn.Module], str]) -> tuple[str, ...]:
    """The names of the modules of one class that stand in one list, of the list that holds most parameters."""
    largest: tuple[int, tuple[str, ...]] = (0, ())
    for holder in (part for root in roots for part in root.modules()):
        if isinstance(holder, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)):
            parts = list(holder.children())
            if parts and len({type(part) for part in parts}) == 1:
                size = sum(parameter.numel() for part in parts for parameter in part.parameters())
                largest = max(largest, (size, tuple(name(part) for part in parts)))
    return largest[1]
