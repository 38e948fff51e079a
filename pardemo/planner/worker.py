"""A process that makes dry runs for another one: how it begins, and that it ends with the other."""

import logging
import multiprocessing
import os
import warnings
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

IMPORTED = ["pardemo.planner.layers", "pardemo.peers.deepspeed"]  # of it all: torch, Transformers, DeepSpeed


def server() -> tuple[BaseContext, int]:
    """Where workers come from, and what they end with: a process that imports all they need, once.

    It begins to with the first call. The caller's own imports take as long, so that it may ask before them.
    """
    context = multiprocessing.get_context("forkserver")  # no thread of this process's can be in the way
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    return context, forkserver._forkserver._forkserver_pid


def begin(parent: int) -> None:
    """A worker's beginning. The pool's own processes would wait for a killed kernel's next task for ever."""
    from pardemo.world.rank import end_with_parent

    alive = forkserver._forkserver._forkserver_alive_fd
    if alive is not None:  # as long as somebody holds it the server lives, and with it this process
        os.close(alive)
        forkserver._forkserver._forkserver_alive_fd = None
    end_with_parent()
    if os.getppid() != parent:  # killed before this process asked to end with it
        os._exit(1)
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
