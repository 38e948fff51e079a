"""Counts the collectives that a rank calls, and the bytes that they move in theory."""

from collections import Counter

import torch.distributed as dist

from pardemo import compat
from pardemo.collectives import links
from pardemo.formulas import communication as formulas
from pardemo.meters.figures import Figures
from pardemo.meters.tensors import tensors_in

#: torch's operator names -> the collective that they are
_NAMES = (
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
)
_NO_EXCHANGE = {"barrier", "wait_tensor", "wrap_tensor_autograd"}


class CallMeter(Figures, compat.TorchDispatchMode):
    """Counts the collectives that this rank calls while the block runs, torch's and pardemo's rings alike.

    >>> with CallMeter() as calls:                       # doctest: +SKIP
    ...     dist.all_reduce(tensor)
    >>> calls.counts                                      # doctest: +SKIP
    {'all_reduce': 1}

    A ring of one rank counts as called, and moves nothing.

    Args:
        bytes_too: also add up what each one moves in theory (``pardemo.formulas.communication``); a collective
            without a rule then raises RuntimeError.

    Attributes: ``counts`` (after the block: name -> calls), ``sent_bytes`` and ``received_bytes`` of torch's own; None
    without ``bytes_too``, where nobody counted. A meter that a rank returns comes home with these figures.
    """

    shown = ("counts", "sent_bytes", "received_bytes")

    def __init__(self, bytes_too: bool = False) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.sent_bytes: int | None = 0 if bytes_too else None
        self.received_bytes: int | None = self.sent_bytes
        self._torch: Counter[str] = Counter()

    def __enter__(self) -> "CallMeter":
        self._rings_before = Counter(links.calls)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.counts = dict(self._torch + (links.calls - self._rings_before))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            name = compat.op_name(func).strip("_")
            if name not in _NO_EXCHANGE:
                self._torch[next((known for start, known in _NAMES if name.startswith(start)), name)] += 1
            if self.sent_bytes is not None and self.received_bytes is not None:
                moved = bytes_of_call(func, args, kwargs)
                self.sent_bytes += round(moved.sent)
                self.received_bytes += round(moved.received)
        return func(*args, **kwargs)


def bytes_of_call(func, args: tuple, kwargs: dict) -> formulas.Traffic:
    """Computes the bytes that a collective of torch moves in theory; ``func``: the operator as a dispatch mode sees it.

    Raises:
        RuntimeError: there is no rule for it.
    """
    name = compat.op_name(func).strip("_")
    arguments = dict(zip((a.name for a in compat.op_schema(func).arguments), args, strict=False)) | kwargs
    group = arguments.get("process_group", arguments.get("group_name"))
    if group is None:
        return formulas.Traffic(0, 0)
    group = compat.resolve_process_group(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
    rule = formulas.BYTES_OF_COLLECTIVE.get(name)
    if rule is None:
        raise RuntimeError(f"cannot tell how many bytes {name} moves: no kernel counts them here")
    nbytes = max(
        (sum(t.numel() * t.element_size() for t in tensors_in(value)) for value in arguments.values()), default=0
    )
    root = arguments.get("root_rank", arguments.get("src", 0))  # as torch's functional collectives call it
    return rule(nbytes, group.size(), group.rank() == root)
