"""What a scene's process is: forked from the stage with the libraries loaded, and otherwise as a shell starts one."""

import contextlib
import dataclasses
import faulthandler
import json
import os
import pkgutil
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pardemo.cluster import keeper
from pardemo.soak.scene import Lost, NotReached, Scene, Skipped, Wrong
from pardemo.soak.sockets import left_open, open_sockets
from pardemo.world import nursery
from pardemo.world.nursery_process import end_with

CLONE_NEWNS = 0x20000
OUTPUT = "output.txt"  # what a scene prints, in its folder
LATE = "its signal came before the work or after it"


def load(group: str) -> None:
    """What scenes of a group would load one by one. With one thread: torch's own pools are made by what runs, later.

    Raises:
        ModuleNotFoundError: the group needs an extra that is not installed.
    """
    import cloudpickle  # noqa: F401
    import numpy.random  # noqa: F401
    import torch

    import pardemo.collectives
    import pardemo.meters
    import pardemo.world.rank

    torch.compiler.reset()  # which loads Dynamo
    if group in ("runner", "measure"):  # a signal is to meet the command at work, not the loading of its modules
        pkgutil.resolve_name("pardemo.cli:main")
    if group == "runner":
        import ipykernel.kernelapp
        import ipykernel.zmqshell  # noqa: F401
        import matplotlib.pyplot  # noqa: F401
        import pandas  # noqa: F401
    elif group == "finetune":
        import pardemo.finetune.train
        import pardemo.peers.deepspeed.engine  # noqa: F401


def live(play: Callable[[Scene], object], scene: Scene, folder: Path, write: int, parent: int) -> NoReturn:
    """The life of a scene's process: it plays, says how it went, and ends as ``os._exit`` does, or with its parent."""

    def say(**message: str | bool | list[str]) -> None:
        short = {name: value[:1500] if isinstance(value, str) else value for name, value in message.items()}
        os.write(write, json.dumps(short).encode() + b"\n")

    try:
        end_with(parent)
        _settle_in(scene, folder)
        before = open_sockets(os.getpid())
        try:
            verdict = _verdict(play, dataclasses.replace(scene, begin=lambda: say(begun=True)))
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:  # between the two lines
            verdict = {"not_reached": LATE}
        if "told" in verdict:  # what failed has objects in its traceback that hold sockets
            say(sockets=left_open(before)[:10])
        say(**verdict)
    except BaseException as error:
        traceback.print_exc()
        say(wrong=f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _verdict(play: Callable[[Scene], object], scene: Scene) -> dict[str, str]:
    """What became of the scene: one of ``told``, ``skipped``, ``not_reached``, ``lost``, ``wrong``, and why."""
    try:
        told = play(scene)
    except Skipped as reason:
        return {"skipped": str(reason)}
    except NotReached as reason:
        return {"not_reached": str(reason)}
    except Lost as reason:
        return {"lost": str(reason)}
    except Wrong as reason:
        return {"wrong": str(reason)}
    except KeyboardInterrupt:  # none that the scene awaited
        return {"not_reached": LATE}
    return {"told": "" if told is None else str(told)}


def _settle_in(scene: Scene, folder: Path) -> None:
    """A process as a shell starts one: its own session, streams, temporary folder, signals and random numbers."""
    os.setsid()
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = open(1, "w", 1, closefd=False), open(2, "w", 1, closefd=False)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(
        TMPDIR=str(folder / "t"),
        PARDEMO_KEY=str(scene.shared / "key"),  # not the user's own
        TORCHINDUCTOR_CACHE_DIR=str(scene.shared / "inductor"),  # a cache is no leak
    )
    os.environ.pop("PARDEMO_OUT", None)
    tempfile.tempdir = None
    os.chdir(scene.folder)
    random.seed(f"{scene.seed} {scene.kind} {scene.number} else")
    with contextlib.suppress(OSError):  # what it mounts is gone with its last process; where that is not allowed
        keeper.unshare(CLONE_NEWNS)  # parts.small_disk() says so
    nursery.fork_here()
