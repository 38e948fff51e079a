"""Calls a function without a process group, for a test's ranks to compare with: the fixture ``single_process``."""

import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pardemo.world import pickling, waiting

OF_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")


class SingleProcess:
    """Calls a function on rank 0 as in a process without a group; every rank gets what it returned.

    Collective: all ranks call it, in the same order. The function sees no process group, no variables of a rank, and
    random numbers as at the test's begin on rank 0; those of the test go on as if nothing had happened. The result
    travels through a file, so that neither the group nor a meter around the call sees it.

    Args:
        folder: where the ranks exchange files during this test.
    """

    def __init__(self, folder: str):
        self._folder, self._calls = folder, 0

    def __call__(self, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """What ``function(*args, **kwargs)`` returned on rank 0, a copy for each rank.

        Raises:
            What it raised, on rank 0; RuntimeError with the same text on the others.
        """
        __tracebackhide__ = True
        path = os.path.join(self._folder, f"{self._calls}")
        self._calls += 1
        if dist.get_rank() == 0:
            os.makedirs(self._folder, exist_ok=True)
            try:
                with _no_group():
                    reply = pickling.dumps(("ok", function(*args, **kwargs)))
            except BaseException as error:
                _write(path, pickling.dumps(("failed", f"{type(error).__name__}: {error}")))
                raise
            _write(path, reply)
        else:
            reply = _read(path)
        kind, value = pickle.loads(reply)
        if kind == "failed":
            raise RuntimeError(f"single_process failed on rank 0: {value}")
        return value


@contextmanager
def _no_group() -> Iterator[None]:
    """Within the block this process is no rank, and has the random numbers of a test's begin."""
    from pardemo.world.rank import seed

    environment = {name: os.environ.pop(name) for name in OF_RANKS if name in os.environ}
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    group = dist.GroupMember.WORLD
    with torch.random.fork_rng():
        try:
            dist.GroupMember.WORLD = None
            seed(0)
            yield
        finally:
            dist.GroupMember.WORLD = group
            os.environ.update(environment)
            random.setstate(states[0])
            if numpy:
                numpy.random.set_state(states[1])


def _write(path: str, data: bytes) -> None:
    with open(f"{path}.new", "wb") as file:
        file.write(data)
    os.replace(f"{path}.new", path)  # whole, or not there


def _read(path: str) -> bytes:
    wait, since = waiting.Wait(), time.monotonic()
    while not os.path.exists(path):
        time.sleep(0.001)
        if time.monotonic() - since > waiting.PATIENCE_S:
            wait.goes_on("what single_process makes on rank 0")
            since = time.monotonic()
    wait.ends()
    with open(path, "rb") as file:
        return file.read()
