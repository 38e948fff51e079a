"""Four ranks that agree on a sum: a warm World, a new World, ``torch.multiprocessing.spawn``, torchrun."""

import os
import subprocess
import sys
import tempfile
import time

from pardemo.bench import BenchRow, compare

RANKS = 4
ROUNDS = 3
TARGET = 50.0


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def _spawned(rank: int, store: str) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    _expect(sum_of_ranks())
    dist.destroy_process_group()


def _expect(total: float) -> None:
    if total != RANKS * (RANKS - 1) / 2:
        raise RuntimeError(f"the ranks' sum is {total}")


def _spawn_s() -> float:
    import torch.multiprocessing as mp

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_spawned, args=(os.path.join(folder, "store"),), nprocs=RANKS)
    return time.perf_counter() - begin


def _torchrun_s() -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    begin = time.perf_counter()
    subprocess.run(
        [*command, "-m", "pardemo.world", "pardemo.bench.launch:sum_of_ranks"],
        check=True, capture_output=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return time.perf_counter() - begin


def rows() -> list[BenchRow]:
    from pardemo import World

    with World(RANKS, preload=[__name__]) as world:  # the nursery is warm from here on
        world.run(sum_of_ranks)
        warm, new, spawn, torchrun = [], [], [], []
        for _ in range(ROUNDS):
            spawn.append(_spawn_s())
            torchrun.append(_torchrun_s())
            begin = time.perf_counter()
            with World(RANKS, preload=[__name__]) as fresh:
                _expect(fresh.run(sum_of_ranks)[0])
                new.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            _expect(world.run(sum_of_ranks)[0])
            warm.append(time.perf_counter() - begin)
    return [
        compare("launch.new_world", new, spawn, "s", TARGET, "mp.spawn, 4 ranks, torch alone"),
        compare("launch.new_world.torchrun", new, torchrun, "s", None, "torchrun, 4 ranks"),
        compare("launch.warm_run", warm, spawn, "s", TARGET, "mp.spawn, 4 ranks, torch alone"),
        compare("launch.warm_run.torchrun", warm, torchrun, "s", None, "torchrun, 4 ranks"),
    ]
