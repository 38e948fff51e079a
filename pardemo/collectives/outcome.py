"""Raises an error of one rank on every rank, so that none of them waits for one that has given up."""

import builtins
import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def same_outcome(group: dist.ProcessGroup) -> Iterator[None]:
    """The block ends well on every rank of ``group``, or raises on every rank. Collective: a small message at its end.

    The block itself must not exchange anything: a rank that fails within an exchange leaves it to the others.

    Raises:
        Exception: on a rank whose block failed, what it raised. Elsewhere the first failed rank's error with its number
            in front, of the same type where that is one of Python's own, else a RuntimeError.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    outcomes: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    mine = None if error is None else (type(error).__name__, str(error))
    dist.all_gather_object(outcomes, mine, group=group)
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            raise _kind(outcome[0])(f"rank {rank}: {outcome[1]}")


def _kind(name: str) -> type[Exception]:
    """Python's own exception of this name; RuntimeError for others, and for those that are not made of a message."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (UnicodeError, ExceptionGroup)):
        return kind
    return RuntimeError
