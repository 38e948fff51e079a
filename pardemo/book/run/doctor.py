"""Reports what this machine has, and what the collection can therefore show on it."""

import json
import platform
import shutil
import sys
from importlib import metadata
from typing import Any

from pardemo import extras, project

PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "peft", "papermill", "jupyterlab")


def examine() -> list[dict[str, Any]]:
    """Rows of ``what, found, ok``; ``ok`` is False where something is missing that a notebook could use."""
    import psutil
    import torch

    from pardemo.meters.wire import kernel_counts
    from pardemo.peers.deepspeed import deepspeed_disk

    disk, disk_text = deepspeed_disk.readiness()
    cores = project.available_cores()
    memory = psutil.virtual_memory()
    gpus = torch.cuda.device_count()
    counts = kernel_counts()
    gib = 2**30
    rows = [
        _row("system", f"{platform.system()} {platform.release()}, {platform.machine()}", sys.platform == "linux"),
        _row("Python", platform.python_version(), sys.version_info >= (3, 11)),
        _row("cores", f"{cores} usable: {cores} ranks may be timed, more only counted", cores >= 2),
        _row(
            "memory", f"{memory.available / gib:.1f} of {memory.total / gib:.1f} GiB free", memory.available > 4 * gib
        ),
        _bf16(),
        _row("GPUs", f"{gpus}: " + ("nccl, a GPU per rank" if gpus else "ranks run on the CPU with gloo"), True),
        _row("bytes on the wire", "counted by the kernel" if counts else "computed from the collectives", counts),
        _row("emulated cluster", *_links()),
        _row("C++ compiler", shutil.which("g++") or "none: DeepSpeed does without its own operations", True),
        _row("DeepSpeed on disk (NVMe)", disk_text, disk),
    ]
    for package in PACKAGES:
        try:
            rows.append(_row(package, metadata.version(package), True))
        except metadata.PackageNotFoundError:
            rows.append(_row(package, f"not installed: {extras.install(package)}", False))
    return rows + [_row(name, *_fits(name, cores, gpus)) for name in project.notebooks()]


def examine_deepspeed(path: str, ranks: int) -> str:
    """Looks through a DeepSpeed configuration file before any rank is started with it.

    Raises:
        ValueError: it is no JSON, or has a setting that DeepSpeed would ignore or refuse; the key is named.
    """
    import torch

    from pardemo.peers.deepspeed import deepspeed_settings

    with open(path, encoding="utf-8") as file:
        try:
            settings = json.load(file)
        except (ValueError, RecursionError) as error:  # nested without end
            raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: a configuration is an object in braces")
    deepspeed_settings.check_settings(settings, ranks, on_cpu=not torch.cuda.is_available())
    return f"{path}: DeepSpeed will take it, on {ranks} ranks"


def _row(name: str, value: str, ok: bool) -> dict[str, Any]:
    return {"what": name, "found": value, "ok": bool(ok)}


def _bf16() -> dict[str, Any]:
    """What a matrix multiplication in bf16 takes on this CPU, measured, and which way ranks take."""
    from pardemo import machine
    from pardemo.world import bf16

    ms = {way: f"{1e3 * seconds:.2g} ms" for way, seconds in machine.matmul_s(256).items()}
    text = f"256 × 256 matrices multiplied in {ms['bf16']}, in fp32 in {ms['fp32']}"
    if bf16.slow():
        text += f"; so ranks multiply through fp32: {ms['through fp32']}"
    return _row("bf16", text, True)


def _fits(name: str, cores: int, gpus: int) -> tuple[str, bool]:
    from pardemo.book.run.parameters import parameters_of

    wanted = parameters_of(project.notebooks()[name]).get("world_size", 1)
    room = max(cores, gpus)
    text = f"world_size {wanted} as it stands; timed with up to {room} ranks"
    return text + (f"; a GPU each: -p world_size {gpus}" if gpus > 1 else ""), True


def _links() -> tuple[str, bool]:
    """How links of an emulated cluster can be limited here, tried; and what would give the better way."""
    from pardemo.cluster import tiers

    tier = tiers.probe()
    texts = {
        "namespaces": "each node a network namespace, its network card limited by the kernel",
        "pacing": f"each connection paced by the kernel; {tier.missing}",
        "none": tier.missing,
    }
    return texts[tier.name], tier.name != "none"
