"""This machine's profile: how fast ranks compute, copy and talk. Measured once, used to predict times later."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from pardemo import project
from pardemo.collectives import parameter_server_all_reduce, ring_all_reduce
from pardemo.formulas.communication import all_reduce_steps, shared_host_seconds
from pardemo.project import available_cores, measuring_ranks
from pardemo.world.rank import device

METHODS: dict[str, Callable[..., object]] = {
    "ring": ring_all_reduce, "parameter server": parameter_server_all_reduce, "torch": dist.all_reduce
}  # fmt: skip
SMALL_BYTES, LARGE_BYTES = 4 << 10, 32 << 20


@dataclass(frozen=True)
class MachineProfile:
    """Speeds of a machine, to predict times from; rates of methods are those of ``ranks`` ranks on this one host."""

    cores: int
    memory_bytes: int
    ranks: int
    device: str
    matmul_flops: float  # fp32 operations/s of one rank that has the machine to itself
    matmul_flops_together: float  # of each, when ``ranks`` compute at once
    copy_bytes_per_s: float  # read + written by one rank copying a large tensor
    message_s: dict[str, float]  # per dependent step of a tiny all-reduce, by method
    host_bytes_per_s: dict[str, float]  # all ranks' sent bytes over time in a large all-reduce, by method


def profile_path() -> Path:
    return project.output_dir() / "machine.json"


def predict(profile: MachineProfile, method: str, nbytes: float, ranks: int) -> float:
    """Seconds of an all-reduce on this host, whose cores and memory all ranks share: see ``shared_host_seconds``."""
    return shared_host_seconds(method, nbytes, ranks, profile.host_bytes_per_s[method], profile.message_s[method])


def profile(world_size: int | None = None) -> MachineProfile:
    """The profile saved in the run's folder, or a new one (a few seconds), saved there.

    ``world_size`` is the number of ranks to measure with, by default :func:`pardemo.project.measuring_ranks`.
    """
    path = profile_path()
    ranks = world_size or measuring_ranks()
    try:
        saved = MachineProfile(**json.loads(path.read_text()))
        if saved.ranks == ranks and saved.cores == available_cores():
            return saved
    except (OSError, ValueError, TypeError):
        pass
    return measure(ranks, path)


def measure(ranks: int, path: Path | None = None) -> MachineProfile:
    """Measures this machine with ``ranks`` ranks and saves the profile where ``path`` says."""
    import psutil

    from pardemo.world import World

    with World(1) as alone:
        flops, copied = alone.run(_compute, min)[0]  # the quickest: whatever else runs only makes it slower
    with World(ranks) as world:
        together = [r[0] for r in world.run(_compute)]
        message_s, rates = {}, {}
        for method in METHODS:
            small = max(world.run(all_reduce_seconds, method, SMALL_BYTES, 31))
            large = max(world.run(all_reduce_seconds, method, LARGE_BYTES, 9))
            message_s[method] = small / all_reduce_steps(method, ranks)
            rates[method] = 2 * (ranks - 1) * LARGE_BYTES / (large - small)
        where = world.run(_device_name)[0]
    profile = MachineProfile(
        available_cores(), psutil.virtual_memory().total, ranks, where, flops, median(together), copied,
        message_s, rates,
    )  # fmt: skip
    if path is not None:
        project.write_json(path, asdict(profile))
    return profile


def matmul_s(side: int) -> dict[str, float]:
    """Seconds of a multiplication of two square matrices on this process's CPU, the quickest of several.

    ``fp32``; ``bf16`` by torch's own kernel; and ``through fp32``, as :mod:`pardemo.world.bf16` does it.
    """
    x = torch.randn(side, side)
    low, result = x.bfloat16(), x.bfloat16()
    ways: dict[str, Callable[[], object]] = {
        "fp32": lambda: x @ x,
        "bf16": lambda: result.addmm_(low, low, beta=0),  # in place: also where other calls go through fp32
        "through fp32": lambda: (low.float() @ low.float()).bfloat16(),
    }
    seconds = {}
    for way, multiply in ways.items():
        taken = []
        for _ in range(4):
            begin = time.perf_counter()
            multiply()
            taken.append(time.perf_counter() - begin)
        seconds[way] = min(taken)
    return seconds


def all_reduce_seconds(method: str, nbytes: int, rounds: int) -> float:
    """On every rank: the median time of an all-reduce of ``nbytes`` by ``method``, ranks in step."""
    tensor = torch.ones(max(1, nbytes // 4), device=device())
    return median(times(lambda: METHODS[method](tensor.fill_(1.0)), rounds))


def _compute(reduce: Callable[[list[float]], float] = median) -> tuple[float, float]:
    """Floating-point operations/s of an fp32 matrix product, and bytes/s of a copy (read and written)."""
    n = 768
    a, b = torch.randn(n, n, device=device()), torch.randn(n, n, device=device())
    source = torch.randn(8 << 20, device=device())
    target = torch.empty_like(source)
    product = reduce(times(lambda: a @ b, 15))
    copy = reduce(times(lambda: target.copy_(source), 7))
    return 2 * n**3 / product, 2 * source.numel() * 4 / copy


def times(action: Callable[[], object], rounds: int, warm_up: int = 2) -> list[float]:
    """On every rank: seconds of each of ``rounds`` calls, begun in step, after some that are not counted."""
    seconds = []
    for turn in range(rounds + warm_up):
        dist.barrier()
        begin = time.perf_counter()
        action()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if turn >= warm_up:
            seconds.append(time.perf_counter() - begin)
    return seconds


def _device_name() -> str:
    return torch.cuda.get_device_name() if device().type == "cuda" else "cpu"
