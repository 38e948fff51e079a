"""Measures this machine's rates with ranks that all work at once, for ``pardemo plan --gpu FILE``.

On one host ``pardemo plan --measure FILE`` starts them. On several hosts they are torchrun's::

    torchrun --nnodes 2 --nproc-per-node 8 … -m pardemo.world pardemo.planner.measure_profile:write FILE

Ranks without a GPU measure fp32 on their cores, which they share: numbers of that machine, and of no GPU.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from pardemo import project
from pardemo.cluster import Cluster
from pardemo.machine import times
from pardemo.planner import hardware, profile
from pardemo.planner.profile import four_digits
from pardemo.world.rank import device

#: By whether there is a GPU: sizes of products, seconds that the largest is repeated, bytes of a copy and of a message.
SIZES = {True: (1024, 2048, 4096, 8192, 16384), False: (128, 256, 512, 1024)}
WARM_S = {True: 5.0, False: 0.5}
COPY_BYTES = {True: 1 << 30, False: 64 << 20}
LARGE_BYTES = {True: 256 << 20, False: 8 << 20}
SMALL_BYTES = 4096


def measure(path: Path, ranks: int, cluster: Cluster | None = None) -> dict[str, Any]:
    """Measures with ranks of this machine, writes the profile to ``path`` and returns it."""
    from pardemo.world import World

    with World(ranks, cluster=cluster) as world:
        fields = world.run(on_rank)[0]
    _write(path, fields)
    return fields


def write(path: str) -> dict[str, Any]:
    """Measures as a rank of torchrun's job; rank 0 writes the profile to ``path``."""
    fields = on_rank()
    if dist.get_rank() == 0:
        _write(Path(path), fields)
    return fields


def _write(path: Path, fields: dict[str, Any]) -> None:
    profile.parse_profile(fields)
    project.write_json(path, fields)


def on_rank() -> dict[str, Any]:
    """On every rank: the fields of :mod:`pardemo.planner.profile`, of all ranks' means."""
    rank_device = device()
    gpu = rank_device.type == "cuda"
    name, memory = _device(rank_device)
    rates = {size: _product(size, rank_device) for size in SIZES[gpu]}
    best = max(rates.values())
    peak_flops, source = find_peak_flops(name, best)
    tensor = torch.empty(COPY_BYTES[gpu] // 4, device=rank_device)
    target = torch.empty_like(tensor)
    copied = _mean(2 * COPY_BYTES[gpu] / median(times(lambda: target.copy_(tensor), 7)))
    fields: dict[str, Any] = {
        "name": name, "memory_gib": four_digits(memory / 2**30), "peak_tflops": four_digits(peak_flops / 1e12),
        "reachable_tflops": {str(size): four_digits(rate / 1e12) for size, rate in rates.items()},
        "sustained": four_digits(min(1.0, _warm(SIZES[gpu][-1], WARM_S[gpu], rank_device) / rates[SIZES[gpu][-1]])),
        "memory_gb_per_s": four_digits(copied / 1e9), "bf16": gpu and torch.cuda.is_bf16_supported(),
    }  # fmt: skip
    return (
        fields
        | _links(gpu)
        | {"source": f"measured with torch {torch.__version__}, {dist.get_world_size()} ranks; {source}"}
    )


def _product(n: int, rank_device: torch.device) -> float:
    """Operations/s of a product of n × n × n: bf16 on a GPU, fp32 on cores."""
    a, b, c = _matrices(n, rank_device)
    return _mean(2 * n**3 / median(times(lambda: torch.mm(a, b, out=c), 9)))


def _warm(n: int, seconds: float, rank_device: torch.device) -> float:
    """Operations/s of such a product after ``seconds`` without a pause: the chip is warm, its power is shared."""
    a, b, c = _matrices(n, rank_device)
    dist.barrier()
    begin = time.perf_counter()
    ends = [begin]
    while ends[-1] - begin < seconds:
        torch.mm(a, b, out=c)
        if rank_device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    later = [end for end in ends if end - begin >= seconds / 2]
    rounds = len(ends) - ends.index(later[0]) - 1
    return _mean(2 * n**3 * max(1, rounds) / (ends[-1] - (later[0] if rounds else ends[-2])))


def _matrices(n: int, rank_device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kind = torch.bfloat16 if rank_device.type == "cuda" else torch.float32
    a = torch.randn(n, n, device=rank_device).to(kind)
    return a, a.clone(), torch.empty_like(a)


def _links(gpu: bool) -> dict[str, Any]:
    """Returns the links inside and between hosts, of all-reduces that all groups of a kind make at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    host_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    hosts = size // host_ranks
    fields: dict[str, Any] = {"host_gpus": host_ranks}
    inside = [dist.new_group(range(host * host_ranks, (host + 1) * host_ranks)) for host in range(hosts)]
    between = [dist.new_group(range(local, size, host_ranks)) for local in range(host_ranks)]
    if host_ranks > 1:
        fields["inside"] = _link(inside[rank // host_ranks], host_ranks, 1, gpu)
    if hosts > 1:  # each GPU's ring has its part of the adapters
        fields["between"] = _link(between[rank % host_ranks], hosts, host_ranks, gpu)
    return fields


def _link(group: dist.ProcessGroup, ranks: int, rings: int, gpu: bool) -> dict[str, float]:
    small, large = (_all_reduce(nbytes, group) for nbytes in (SMALL_BYTES, LARGE_BYTES[gpu]))
    moved = 2 * (ranks - 1) / ranks * (LARGE_BYTES[gpu] - SMALL_BYTES)
    rate = rings * moved / max(large - small, 1e-9)
    return {
        "gb_per_s": four_digits(rate / 1e9),
        "latency_us": four_digits(1e6 * small / math.log2(ranks)),
    }


def _all_reduce(nbytes: int, group: dist.ProcessGroup) -> float:
    """Seconds of an all-reduce: the slowest group's, since all of them begin together."""
    tensor = torch.ones(nbytes // 4, device=device())
    seconds = median(times(lambda: dist.all_reduce(tensor.fill_(1.0), group=group), 7))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    return max(every)


def _device(rank_device: torch.device) -> tuple[str, float]:
    """Returns the device's name, and the bytes of its memory: of cores, a rank's part of the machine's."""
    if rank_device.type == "cuda":
        return torch.cuda.get_device_name(rank_device), torch.cuda.get_device_properties(rank_device).total_memory
    import psutil

    return "cpu", psutil.virtual_memory().total / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def find_peak_flops(name: str, best: float) -> tuple[float, str]:
    """Returns the datasheet's peak of the GPU of the device's name, and its source; else the best measured product."""
    words = set(name.upper().replace("-", " ").split())
    try:
        matches = [hardware.gpu(name)]
    except ValueError:  # another memory or board than the table's, which has the same peak
        matches = [gpu for gpu in hardware.GPUS.values() if words.issuperset(gpu.name.upper().split("-"))]
    if matches and matches[0].flops >= best:
        return matches[0].flops, f"its peak: {matches[0].source}"
    return best, "its peak is the best product"


def _mean(value: float) -> float:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return fmean(every)


def measure_machine(file: str, ranks: int | None, as_json: bool) -> int:
    """Runs ``pardemo plan --measure`` with a rank for each GPU, or with two to four on the cores."""
    path = Path(file)
    if not path.parent.is_dir():
        raise ValueError(f"no folder {path.parent} to write {path.name} into")
    ranks = ranks or torch.cuda.device_count() or project.measuring_ranks()
    print(f"plan: {ranks} ranks measure products, memory and links …", file=sys.stderr, flush=True)
    fields = measure(path, ranks)
    print(json.dumps(fields, indent=1))
    if not as_json:
        print(f"written to {path}; pardemo plan --gpu {path} plans with it")
    return 0
