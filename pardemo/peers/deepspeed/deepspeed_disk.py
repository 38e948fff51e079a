"""DeepSpeed's states on disk (ZeRO-Infinity): whether its operators are there, building them once, what was swapped.

Nothing here starts DeepSpeed but :func:`build_operators`, which does so in a process of its own.
"""

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from pardemo import compat, project
from pardemo.peers import launchers
from pardemo.world.errors import RankError

#: DeepSpeed's asynchronous files, and the pinned memory that they load first.
OPERATORS = ("pin_memory", "async_io")
STAMP = "pardemo-operators.json"
_COMPILE = """import os
os.environ.setdefault("DS_ACCELERATOR", "cpu")
from deepspeed.ops.op_builder import AsyncIOBuilder
AsyncIOBuilder().load(verbose=False)"""
YOUNG_S = 30  # a build has its lock a moment before its compilers run
COMPILERS = ("ninja", "g++", "c++", "cc1plus")


def operators_folder() -> Path:
    """Returns where torch keeps the extensions that it has compiled for this Python and device."""
    if (folder := os.environ.get("TORCH_EXTENSIONS_DIR")) is not None:
        return Path(folder)
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    cuda = "cpu" if torch.version.cuda is None else "cu" + torch.version.cuda.replace(".", "")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{cuda}"  # as torch.utils.cpp_extension names it


def readiness() -> tuple[bool, str]:
    """Whether states can go to disk at once, without compiling anything; and in words what is there or missing."""
    if all(_library(name).is_file() for name in OPERATORS) and _stamp() == _versions():
        return True, "compiled"
    if sys.platform != "linux":
        return False, "asynchronous files of this kind exist on Linux only"
    tools = {"g++": _has("g++"), "ninja": _has("ninja"), "libaio-dev": _has_header()}
    if missing := [name for name, installed in tools.items() if not installed]:
        return False, f"not installed: {' and '.join(missing)}; NVMe offload cannot run here"
    return False, "not compiled yet: `pardemo doctor --build` does it (some minutes, once)"


def build_operators(timeout_s: float = 900) -> None:
    """Compiles DeepSpeed's file operators, once; a lock that a killed build left behind is taken away first.

    Raises:
        RuntimeError: something that the build needs is missing, it failed, or it took longer than ``timeout_s``.
    """
    ready, reason = readiness()
    if ready:
        return
    if "doctor --build" not in reason:
        raise RuntimeError(reason)
    folder = operators_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "pardemo.lock", "w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        clear_stale_locks()
        command = [sys.executable, "-c", _COMPILE]
        try:
            launchers.together({"the compilation of DeepSpeed's operators": command}, timeout_s)
        except RankError as error:
            name, *lines = str(error).splitlines()
            reasons = [line.strip() for line in lines if "rror" in line] or ["no word about it"]
            raise RuntimeError(f"{name} {reasons[-1]}") from None
        finally:
            clear_stale_locks()
    project.write_json(folder / STAMP, _versions())


def use() -> None:
    """Hands the compiled operators to DeepSpeed in this process; its own way asks for a compiler each time.

    Raises:
        RuntimeError: they are not there, or were compiled for other versions.
    """
    ready, reason = readiness()
    if not ready:
        raise RuntimeError(f"DeepSpeed's file operators: {reason}")
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)  # the second finds symbols of the first
    try:
        for name in OPERATORS:
            if name not in compat.deepspeed_loaded_ops:
                folder = str(_library(name).parent)
                compat.deepspeed_loaded_ops[name] = compat.load_library(name, folder, is_python_module=True)
    finally:
        sys.setdlopenflags(flags)


def clear_stale_locks() -> list[str]:
    """Takes away the locks of builds that nobody works on any more, which torch would wait for without end.

    torch's build runs with its folder as working directory; a lock of some age in a folder where no process works is a
    dead one.
    Returns the operators whose lock was stale, any that torch compiles in this folder, DeepSpeed's or not.
    """
    old = [lock for lock in sorted(operators_folder().glob("*/lock")) if _age_s(lock) > YOUNG_S]
    if not old:
        return []
    at_work, hidden = set(), False
    for process in psutil.process_iter(["cwd", "name"]):
        at_work.add(process.info["cwd"])
        hidden |= process.info["cwd"] is None and process.info["name"] in COMPILERS  # another user's: it may be here
    stale = [lock for lock in old if not hidden and str(lock.parent.resolve()) not in at_work]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return [lock.parent.name for lock in stale]


def to_disk(folder: str | Path) -> dict[str, Any]:
    """Keys of ``zero_optimization`` (stage 3) that keep optimizer states below ``folder``.

    Call :func:`use` on each rank. What is smaller than max(1 MiB, aio.block_size) stays in memory, without a word (of
    the optimizer's states a rank's part of a whole sub-group, of gradients each one's): count with :func:`swapped`.
    """
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}


def swapped(folder: str | Path) -> dict[str, tuple[int, int]]:
    """Swap files below ``folder`` by what they hold (DeepSpeed's own names): how many, and bytes of all ranks."""
    sizes: dict[str, list[int]] = {}
    for path in Path(folder).rglob("*.swp"):
        sizes.setdefault(path.parent.parent.name, []).append(path.stat().st_size)
    return {kind: (len(sizes[kind]), sum(sizes[kind])) for kind in sorted(sizes)}


def _age_s(path: Path) -> float:
    """Since when ``path`` is as it is; -inf, where it is gone by now."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return -math.inf


def _library(name: str) -> Path:
    return operators_folder() / name / f"{name}.so"


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("torch", "deepspeed")}


def _stamp() -> dict[str, str] | None:
    """The versions that the operators were compiled for."""
    try:
        return json.loads((operators_folder() / STAMP).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _has(tool: str) -> bool:
    beside = Path(sys.executable).parent / tool  # ninja comes with the environment
    return shutil.which(tool) is not None or beside.is_file()


def _has_header() -> bool:
    if not _has("g++"):
        return Path("/usr/include/libaio.h").is_file()
    probe = ["g++", "-x", "c++", "-fsyntax-only", "-"]
    return not subprocess.run(probe, input=b"#include <libaio.h>\n", capture_output=True, timeout=60).returncode
