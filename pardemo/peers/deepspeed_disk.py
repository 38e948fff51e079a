"""DeepSpeed's states on disk (ZeRO-Infinity): whether its operators are there, building them once, what was swapped.

Nothing here starts DeepSpeed but :func:`build`, which does so in a process of its own.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

#: DeepSpeed's asynchronous files, and the pinned memory that they load first.
OPERATORS = ("pin_memory", "async_io")


def operators_folder() -> Path:
    """Where torch keeps the extensions that it has compiled for this Python and device."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen is not None:
        return Path(chosen)
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    cuda = "cpu" if torch.version.cuda is None else "cu" + torch.version.cuda.replace(".", "")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{cuda}"  # as torch.utils.cpp_extension names it


def readiness() -> tuple[bool, str]:
    """Whether states can go to disk at once, without compiling anything; and in words what is there or missing."""
    missing = [name for name in OPERATORS if not (operators_folder() / name / f"{name}.so").is_file()]
    if not missing:
        clear_stale_locks()
        return True, "compiled"
    if sys.platform != "linux":
        return False, "asynchronous files of this kind exist on Linux only"
    wants = [what for what, there in (("g++", _has_compiler()), ("libaio-dev", _has_header())) if not there]
    if wants:
        return False, f"{' and '.join(wants)} not installed: NVMe offload cannot run here"
    return False, "not compiled yet: `pardemo doctor --build` does it (some minutes, once)"


def build(timeout_s: float = 900) -> None:
    """Compiles DeepSpeed's file operators, once; a lock that a killed build left behind is taken away first.

    Raises:
        RuntimeError: something that the build needs is missing, it failed, or it took longer than ``timeout_s``.
    """
    ready, told = readiness()
    if ready:
        return
    if "doctor --build" not in told:
        raise RuntimeError(told)
    folder = operators_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "pardemo.lock", "w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        clear_stale_locks()
        code = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(verbose=False)"
        environment = {**os.environ, "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}
        with tempfile.TemporaryFile("w+") as log:
            compiler = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=subprocess.STDOUT,
                                        env=environment, start_new_session=True)  # fmt: skip
            try:
                status = compiler.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"compiling DeepSpeed's operators took longer than {timeout_s:g} s") from None
            finally:
                _end(compiler)
                clear_stale_locks()
            log.seek(0)
            if status:
                lines = [line.strip() for line in log if "rror" in line] or ["no word about it"]
                raise RuntimeError(f"DeepSpeed's operators did not compile: {lines[-1]}")


def clear_stale_locks() -> list[str]:
    """Takes away the locks of builds that nobody works on any more, which torch would wait for without end.

    torch's build runs with its folder as working directory; a lock in a folder where no process works is a dead one.
    Returns the operators whose lock was stale.
    """
    locks = [operators_folder() / name / "lock" for name in OPERATORS]
    present = [lock for lock in locks if lock.exists()]
    if not present:
        return []
    at_work = set()
    for process in psutil.process_iter(["cwd"]):
        at_work.add(process.info["cwd"])
    stale = [lock for lock in present if str(lock.parent) not in at_work]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return [lock.parent.name for lock in stale]


def to_disk(folder: str | Path, parameters: bool = False, buffer_numel: int = 1 << 22) -> dict[str, Any]:
    """Keys of ``zero_optimization`` (stage 3) that keep optimizer states, and ``parameters`` too, below ``folder``.

    A tensor of less than max(1 MiB, aio.block_size) stays in memory, without a word: count with :func:`swapped`.
    ``buffer_numel`` is the largest parameter that can be read back, in elements.
    """
    where = {"device": "nvme", "nvme_path": str(folder)}
    both = {"offload_optimizer": where}
    if parameters:
        both["offload_param"] = {**where, "buffer_size": buffer_numel}
    return both


def swapped(folder: str | Path) -> dict[str, tuple[int, int]]:
    """Swap files below ``folder`` by what they hold (DeepSpeed's own names): how many, and bytes of all ranks."""
    files, sizes = Counter(), Counter()
    for path in Path(folder).rglob("*.swp"):
        kind = path.parent.parent.name
        files[kind] += 1
        sizes[kind] += path.stat().st_size
    return {kind: (files[kind], sizes[kind]) for kind in sorted(files)}


def _has_compiler() -> bool:
    return shutil.which("g++") is not None


def _has_header() -> bool:
    probe = ["g++", "-x", "c++", "-fsyntax-only", "-"]
    if not _has_compiler():
        return Path("/usr/include/libaio.h").is_file()
    done = subprocess.run(probe, input=b"#include <libaio.h>\n", capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def _end(process: subprocess.Popen) -> None:
    """The process that we started, and the compilers that it did."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
