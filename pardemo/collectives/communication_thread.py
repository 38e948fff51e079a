"""A thread that runs collectives while the caller computes, strictly in the order of their submission."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from pardemo import compat


class CommunicationThread(ThreadPoolExecutor):
    """Runs functions one after the other in a thread of its own, under the caller's meters.

    One thread, so that a group's ring is used by one collective at a time and in the order that all ranks agree on.
    """

    def __init__(self, name: str):
        super().__init__(1, thread_name_prefix=name)

    def submit(self, function: Callable, /, *args: object) -> Future:  # type: ignore[override]
        """Starts ``function(*args)`` as soon as what was submitted before has ended."""
        return super().submit(_under, [compat.modes(), function, args])  # meters: they belong to a thread


def _under(task: list) -> object:
    modes, function, args = task
    task.clear()  # the executor keeps it a moment longer than the caller waits: no tensor may hang on to it
    for mode in modes:
        compat.push_mode(mode)
    try:
        return function(*args)
    finally:
        for _ in modes:
            compat.pop_mode()


_of_group: "weakref.WeakKeyDictionary[dist.ProcessGroup, CommunicationThread]" = weakref.WeakKeyDictionary()


def communication_thread_of(group: dist.ProcessGroup) -> CommunicationThread:
    """The thread that all users of a group's ring share, so that collectives keep one order. It ends with the group."""
    if group not in _of_group:
        _of_group[group] = CommunicationThread("group-communication")
    return _of_group[group]
