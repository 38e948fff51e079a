"""A process that makes dry runs for another one: how it begins, and that it ends with the other."""

import logging
import multiprocessing
import tempfile
import warnings
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from pardemo import compat, project
from pardemo.termination import end_with_parent

IMPORTED = ["pardemo.planner.memory", "pardemo.peers.deepspeed.engine"]  # of it all: torch, Transformers, DeepSpeed

SOCKET_NAME_BYTES = len("pymp-12345678/listener-12345678")  # of the server's socket, below the temporary folder


def server() -> tuple[BaseContext, int]:
    """The context that starts workers, and the id of their parent process, which imports all they need, once.

    It starts with the first call. The caller's own imports take as long, so that it may ask before them.
    """
    context = multiprocessing.get_context("forkserver")  # no thread of this process's can be in the way
    context.set_forkserver_preload(IMPORTED)
    before, tempfile.tempdir = tempfile.tempdir, project.folder_for_sockets(SOCKET_NAME_BYTES)
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = before
    return context, compat.forkserver_pid()


def begin(parent: int) -> None:
    """A worker's beginning. The pool's own processes would wait for a killed kernel's next task for ever."""
    compat.let_go_of_forkserver()  # as long as somebody holds its pipe the server lives, and with it this process
    end_with_parent(parent)
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
