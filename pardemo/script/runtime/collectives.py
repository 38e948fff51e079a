"""Records every collective that a script calls: its bytes, its times and its call site; slows nothing else.

torch's operators of ``c10d`` are asked at the dispatcher, where those that DDP's reducer, FSDP and DTensor call from
C++ pass as well: at the key BackendSelect, below autograd and above all devices. A ``TorchDispatchMode`` would see
them, too, and cost a call of Python for each operator of the step.
"""

import contextlib
import functools
import itertools
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pardemo import compat
from pardemo.compat import dtype_name
from pardemo.formulas import communication as formulas
from pardemo.meters.tensors import tensors_in
from pardemo.script.hangs.journal import BEGINS, Journal, LoggedCall, headline
from pardemo.script.runtime.call_sites import CallSite, CallSites
from pardemo.script.runtime.libraries import script_line

#: torch's operators -> the collective that they are. All but the monitored barrier return a Work, alone or as the last
#: of their results.
KINDS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_coalesced_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
}


@dataclass
class Call(LoggedCall):
    """A call as its rank logs it, and what its bytes are computed from.

    Args:
        site: where the script is.
        sent: what this rank sends of the array where least is sent, as on nccl's ring.
        gloo_bytes: what it sends by gloo's own, which sums where it has to scatter sums, and sends trees.
        shapes: of its tensors, the first eight. logged: its number among all of the rank's, in the journal.
    """

    site: CallSite = field(kw_only=True)
    sent: float = 0.0
    gloo_bytes: float = 0.0
    shapes: tuple[tuple[int, ...], ...] = ()
    logged: int = -1


class Calls:
    """Notes each collective of this rank while the block runs.

    Args:
        sites: where the script is. step: the number of the step that runs. journal: a file that takes a line for each
            call as it begins, and one as it is over: what a rank did last can be read there where it hangs.
        on_tensors: is told the tensors of each collective, and its kind.
    """

    def __init__(
        self,
        sites: CallSites,
        step: Callable[[], int],
        journal: str,
        on_tensors: Callable[[str, list[torch.Tensor], list[torch.Tensor]], None] | None = None,
    ):
        self.list: list[Call] = []
        self._sites, self._step, self._on_tensors = sites, step, on_tensors
        self._numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
        #: messages that are not over, by the Work's id: no future tells when they are, only a ``wait``
        self._messages: dict[int, tuple[dist.Work, Call, int]] = {}
        self._journal = Journal(journal)
        self._begun = itertools.count()
        self._following = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._outputs: dict[int, int] = {}  # of functional collectives that no future ends: address -> id of the Work
        #: when this rank stood still in a Work's ``wait``
        self.waits: list[tuple[float, float]] = []
        #: called as it begins to
        self.on_wait: Callable[[], None] = lambda: None

    def __enter__(self) -> "Calls":
        kernels = {"c10d": {name: self._asked(name) for name in KINDS}}
        kernels["_c10d_functional"] = {"wait_tensor": self._waited_for()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel of c10d is replaced, which is meant
            for name, of_name in kernels.items():
                library = torch.library.Library(name, "IMPL")
                self._following.callback(compat.end_library, library)
                for operator, kernel in of_name.items():
                    library.impl(operator, kernel, "BackendSelect", with_keyset=True)
        self._following.enter_context(compat.replaced(dist.Work, "wait", self._waited(dist.Work.wait)))
        self._following.enter_context(compat.around_new_group(self._makes_group))
        return self

    def __exit__(self, *_: object) -> None:
        self._following.close()
        self._journal.close()

    def to_the_end(self, script: Callable[[], str]) -> str:
        """Runs a script that says how it ended, and notes that, or what it raised."""
        try:
            ended = script()
        except BaseException as error:
            self._journal.ends("raised", headline(error), script_line(error))
            raise
        self._journal.ends(ended)
        return ended

    def raised(self, error: BaseException) -> None:
        """Notes an exception that left a forward or a backward pass: a script may go on after it."""
        if type(error).__module__ == "torch.utils.checkpoint":  # with which it ends what it runs again
            return
        self._journal.raised(headline(error), script_line(error))

    def _asked(self, name: str) -> Callable:
        operator = getattr(torch.ops.c10d, name).default
        below = compat.dispatch_keys_after(compat.DispatchKey.BackendSelect)
        names = [argument.name for argument in compat.op_schema(operator).arguments]

        def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
            noted = self._note(name, dict(zip(names, args, strict=False)) | kwargs)
            try:
                result = operator.redispatch(keys & below, *args, **kwargs)
            except RuntimeError:
                self._journal.failed(noted.logged, time.monotonic())
                raise
            if result is None:
                self._over(noted)
            else:
                self._watch(noted, result[-1] if isinstance(result, tuple) else result, args)
            return result

        return call

    def _note(self, name: str, arguments: dict[str, Any]) -> Call:
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        ranks = tuple(dist.get_process_group_ranks(group))
        kind, root = KINDS[name], int(arguments.get("root_rank", 0))
        tensors = {key: tensors_in(value) for key, value in arguments.items()}
        nbytes = max((sum(t.numel() * t.element_size() for t in of_key) for of_key in tensors.values()), default=0)
        rank, site = group.rank(), self._sites.here()
        if kind == "send":
            ranks = (ranks[rank], ranks[int(arguments["dst"])])
        elif kind == "receive":
            ranks = (ranks[int(arguments["src"])] if "src" in arguments else -1, ranks[rank])
        sent = formulas.BYTES_OF_COLLECTIVE[_formula_name(name)](nbytes, group.size(), rank == root).sent
        of_gloo = formulas.gloo_sent(kind.replace("-", "_"), nbytes, group.size(), (rank - root) % group.size())
        if kind == "all-to-all":  # each rank its own part, which need not be equal parts
            sent = of_gloo = _all_to_all_sent(arguments, rank)
        first = next((of_key for of_key in tensors.values() if of_key), [])
        inputs = [t for key in ("input", "input_tensor", "inputs", "input_tensors") for t in tensors.get(key, [])]
        given = inputs or first
        # one tensor's shape, or of several their sizes: what the same call on another rank has to agree with
        shape = tuple(given[0].shape) if len(given) == 1 else tuple(t.numel() for t in given[:8])
        nbytes, shape = (0, ()) if kind == "barrier" else (nbytes, shape)
        call = Call(
            kind, ranks, self._number(group.group_name, ranks), group.group_name, nbytes, shape,
            dtype_name(first[0].dtype) if first else "", *site[:3], self._step(), time.monotonic(), site=site,
            sent=sent, gloo_bytes=of_gloo, shapes=tuple(tuple(t.shape) for t in first[:8]),
        )  # fmt: skip
        self.list.append(call)
        self._log(call)
        if self._on_tensors is not None:
            outputs = [t for key, of_key in tensors.items() if key.startswith("output") for t in of_key]
            self._on_tensors(kind, inputs or tensors.get("tensors", []), outputs)
        return call

    def _number(self, group: str, ranks: tuple[int, ...]) -> int:
        with self._lock:
            self._numbers[group, ranks] += 1
            return self._numbers[group, ranks] - 1

    def _log(self, call: Call) -> None:
        """Writes a call down as it begins."""
        call.logged = next(self._begun)
        self._journal.begins(call.logged, *(getattr(call, name) for name in BEGINS))

    def _makes_group(self, make: Callable[[], Any], ranks: list[int] | None, alone: bool) -> Any:
        """Logs a new group, which all ranks make together; ``alone``: its own ranks do."""
        world = tuple(range(dist.get_world_size()))
        members = world if ranks is None else tuple(ranks)
        callers = members if alone else world
        number, site = self._number("new_group", callers), self._sites.here()
        call = Call(
            "new_group", callers, number, "new_group", 0, members, "", *site[:3], self._step(), time.monotonic(),
            site=site,
        )  # fmt: skip
        self._log(call)
        with self._until_over(call):
            return make()

    @contextlib.contextmanager
    def _until_over(self, call: Call | None) -> Iterator[None]:
        """Logs that a call is over at the end of the block, or has failed."""
        try:
            yield
        except RuntimeError:
            if call is not None:
                self._journal.failed(call.logged, time.monotonic())
            raise
        if call is not None:
            self._over(call)

    def _over(self, call: Call) -> None:
        call.end_s = time.monotonic()
        self._journal.over(call.logged, call.end_s)

    def _waited(self, plain: Callable) -> Callable:
        @functools.wraps(plain)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            _, call, address = self._messages.pop(id(work), (None, None, 0))
            self._outputs.pop(address, None)
            return self._stand_still(call, lambda: plain(work, *args, **kwargs))

        return wait

    def _waited_for(self) -> Callable:
        """Notes a wait for DTensor's collectives, which wait by their tensor in C++, not by ``Work.wait``."""
        operator = compat.functional_wait.default
        below = compat.dispatch_keys_after(compat.DispatchKey.BackendSelect)

        def wait(keys: Any, tensor: torch.Tensor) -> torch.Tensor:
            known = self._messages.pop(self._outputs.pop(_address(tensor), -1), None)
            if known is None:
                return operator.redispatch(keys & below, tensor)
            return self._stand_still(known[1], lambda: operator.redispatch(keys & below, tensor))

        return wait

    def _stand_still(self, call: Call | None, wait: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        self.on_wait()
        try:
            with self._until_over(call):
                return wait()
        finally:
            self.waits.append((begin, time.monotonic()))

    def _watch(self, call: Call, boxed: Any, arguments: tuple[Any, ...]) -> None:
        """Notes when the exchange is over, in the thread of the backend that ends it."""

        def over(future: torch.futures.Future) -> None:
            with contextlib.suppress(RuntimeError), self._until_over(call):
                future.value()

        work = dist.Work.unbox(boxed)
        try:
            work.get_future().add_done_callback(over)
        except RuntimeError:  # a message's work has none
            if work.is_completed():
                self._over(call)
                return
            into = next(iter(tensors_in(arguments[0])), None) if arguments else None  # what is written stands first
            address = 0 if into is None or call.kind in ("send", "receive") else _address(into)
            self._messages[id(work)] = work, call, address
            if address:
                self._outputs[address] = id(work)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _all_to_all_sent(arguments: dict[str, Any], sender: int) -> float:
    """Returns the bytes of an all-to-all that leave the rank: its input without its own part."""
    if "input_tensors" in arguments:
        return sum(t.nbytes for rank, t in enumerate(arguments["input_tensors"]) if rank != sender)
    nbytes, splits = arguments["input"].nbytes, list(arguments.get("input_split_sizes") or ())
    size = dist.ProcessGroup.unbox(arguments["process_group"]).size()
    kept = splits[sender] / max(sum(splits), 1) if splits else 1 / size
    return nbytes * (1 - kept)


def _formula_name(name: str) -> str:
    rules = {"monitored_barrier_": "barrier", "recv_": "recv", "recv_any_source_": "recv", "alltoall_": "alltoall_base"}
    return rules.get(name, name.strip("_").replace("allgather_coalesced", "allgather"))
