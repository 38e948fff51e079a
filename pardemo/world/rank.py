"""Runs inside a rank: joins the process group, executes tasks until the World closes, and leaves the group."""

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist

from pardemo import compat, rank_registry
from pardemo.world import bf16, pickling, waiting
from pardemo.world.errors import Failure
from pardemo.world.rank_environment import RankEnvironment

BASE_SEED = 1000  # plus the rank: different on purpose, since what must agree has to be sent


def main(control_fd: int, stdout_fd: int, stderr_fd: int, stacks_fd: int) -> None:
    """Runs a forked rank: reads its settings, joins the group, executes tasks until the World closes."""
    _take_streams(stdout_fd, stderr_fd)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stacks = os.fdopen(stacks_fd, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    waiting.write_to(stacks.fileno())
    control = Connection(control_fd)
    os.register_at_fork(after_in_child=control.close)  # a data loader's worker must not hold the line open
    settings = pickle.loads(control.recv_bytes())
    control.send_bytes(_attempt(lambda: join_group(settings)))
    while True:
        try:
            task = control.recv_bytes()
        except EOFError:
            return
        if not task:  # the parent closes the World
            leave_group()
            return
        control.send_bytes(_attempt(lambda task=task: _call(task)))
        del task
        gc.collect()  # the next task's memory figures start clean


def join_group(settings: RankEnvironment) -> str:
    """Makes this process a rank: enters its host, sets environment, threads and seeds, joins the process group.

    Returns the backend.
    """
    rank, backend = settings.rank, settings.backend
    if settings.host is not None:
        from pardemo.cluster import namespaces

        namespaces.enter(*settings.host)  # while this process has one thread
    if settings.latency is not None:
        from pardemo.cluster import latency

        latency.delay_messages(*settings.latency)
    with contextlib.suppress(OSError):
        os.chdir(settings.cwd)
    sys.path[:] = settings.path
    for name in set(settings.gone) - settings.env.keys():
        os.environ.pop(name, None)
    os.environ.update(settings.env)
    torch.set_num_threads(settings.threads)
    seed(rank)
    local = int(os.environ["LOCAL_RANK"])
    if backend is None:
        beside = next((int(os.environ[n]) for n in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if n in os.environ), local + 1)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        backend = "nccl" if gpus >= beside else "gloo"  # all ranks of a host choose alike
    if backend == "nccl":
        torch.cuda.set_device(local)
    else:
        bf16.through_fp32_where_slow()
    where: dict[str, Any] = {} if settings.store is None else {"store": dist.FileStore(settings.store, settings.size)}
    timeout = timedelta(seconds=settings.timeout_s)
    dist.init_process_group(backend, rank=rank, world_size=settings.size, timeout=timeout, **where)
    if settings.cluster is not None:
        from pardemo.cluster import pacer

        pace = pacer.start_pacer(settings.cluster, rank, settings.table)
        dist.barrier()  # now every rank has said which connections are its own
        pace.scan()
    return backend


def seed(rank: int) -> None:
    """Seeds a rank's random numbers: torch's on all devices, Python's, numpy's."""
    torch.manual_seed(BASE_SEED + rank)
    random.seed(BASE_SEED + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(BASE_SEED + rank)


def device() -> torch.device:
    """The device of this rank: its GPU under nccl, the CPU otherwise."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def leave_group() -> None:
    """Ends the process group in an orderly way; libraries that registered exit functions get to run them."""

    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
    with contextlib.suppress(Exception):
        compat.run_exit_functions()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def end(status: int = 0) -> NoReturn:
    """Leaves the group and ends the process at once, without taking Python down.

    A thread of gloo's lets go of the last collective's tensors in its own time, and needs Python for it. Where Python
    is being taken down just then, the process aborts ("terminate called without an active exception"), which a
    launcher takes for a failed job, and the other hosts' agents wait for it for minutes.
    """
    leave_group()
    os._exit(status)


def _call(task: bytes):
    function, args, kwargs = pickle.loads(task)
    return function(*args, **kwargs)


def _attempt(action) -> bytes:
    """Runs ``action`` and packs ('ok', result) or ('failed', Failure) for the parent."""
    try:
        result = action()
    except BaseException as error:
        return _pack_failure(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the function may have closed it
                stream.flush()
    try:
        return pickling.dumps(("ok", result))
    except Exception as error:
        reason = f"the result, of type {type(result).__name__}, cannot be sent back: {error}"
        return _pack_failure(TypeError(reason))


def _pack_failure(error: BaseException) -> bytes:
    try:
        text = "".join(traceback.format_exception(_without_our_frames(error)))
        message = f"exit status {error.code}" if isinstance(error, SystemExit) else str(error)
    except Exception as reason:  # an exception that cannot even be printed
        text, message = "", f"(its text cannot be had: {type(reason).__name__})"
    failure = Failure(type(error).__name__, message, text, error)
    try:
        packed = cloudpickle.dumps(("failed", failure))
        pickle.loads(packed)  # some exceptions pickle but do not unpickle; find out here
        return packed
    except Exception:
        return cloudpickle.dumps(("failed", Failure(type(error).__name__, message, text)))


def _without_our_frames(error: BaseException) -> BaseException:
    """Drops the frames above the user's code from a traceback."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and rank_registry.is_hidden(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return error.with_traceback(tb)


def _take_streams(stdout_fd: int, stderr_fd: int) -> None:
    """Points this process's file descriptors 0, 1, 2 (C code's too) and sys.std* at the parent's pipes."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
