"""What ``pardemo measure`` adds: a script's step beside the same one on plain ranks, and how soon the script begins."""

import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch.distributed as dist

from bench.processes import torchrun
from bench.table import BenchRow, compare
from pardemo import World, measure
from pardemo.cluster import Cluster, loopback, tiers
from pardemo.script.step import WARM_UP_STEPS

RANKS, STEPS, ROUNDS = 2, 12, 5
SCRIPT = """
import sys, time
begun = time.time()
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.set_num_threads(1)
layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
model = DDP(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(8, 64, 256)
times = []
try:
    for _ in range({steps}):
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
finally:
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            print(begun, *times[{warm}:], file=file)
"""
#: Layers that wait, 1 MB each, whose gradients two nodes sum over a slow link while the next layer's backward waits.
PADDED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def rows() -> Iterator[BenchRow]:
    """Steps and starts, measured and plain in turn; a step of layers that wait, beside the arithmetic."""
    steps: tuple[list[float], list[float]] = [], []
    starts: tuple[list[float], list[float]] = [], []
    with tempfile.TemporaryDirectory() as folder:
        script, times = Path(folder, "train.py"), Path(folder, "times")
        script.write_text(SCRIPT.format(steps=WARM_UP_STEPS + STEPS, warm=WARM_UP_STEPS), encoding="utf-8")
        with World(RANKS) as world:  # what ranks are forked from is warm from here on
            for _ in range(ROUNDS):
                asked = time.time()
                measure.script(str(script), [str(times)], ranks=RANKS, steps=STEPS)
                begun, step = _read(times)
                steps[0].append(step)
                starts[0].append(begun - asked)
                world.run(_plain, str(script), str(times), loopback.free_port())
                steps[1].append(_read(times)[1])
                asked = time.time()
                torchrun(RANKS, str(script), str(times))
                starts[1].append(_read(times)[0] - asked)
    note = f"DDP on {RANKS} ranks; the peer is the same script on ranks that nobody watches"
    start = "from the call to the script's first line; the peer is torchrun, whose script has torch still to load"
    yield compare("measure.step", *steps, "s", 0.8, note)  # a measured step takes at most 1.25 times the plain one
    yield compare("measure.start", *starts, "s", None, start)
    if tiers.best_tier().name != "none":  # where links can be limited
        yield _padded_layers(layer_s=0.04, between="200 Mbit/s")


def _padded_layers(layer_s: float, between: str) -> BenchRow:
    """A step by arithmetic beside the one whose layers waited, and whose links were limited, for real."""
    from pardemo.script.runtime.launch_lines import Launch  # what they load sets up DeepSpeed
    from pardemo.script.step import measurement, paced_step
    from pardemo.script.step.pace import PaceSettings

    cluster = Cluster(2, 1, between=between)
    ran, computed = [], []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(PADDED, encoding="utf-8")
        for _ in range(ROUNDS):
            measured, seen = measurement.measure_launch(
                Launch("train.py", (), False), ranks=2, cluster=cluster, steps=3, folder=folder, timeout_s=120,
                pace=PaceSettings(layer_s, "", cluster),
            )  # fmt: skip
            ran.append(max(one.step_s for one in measured.time))
            computed.append(paced_step.on_layers(seen, cluster).step_s)
    note = f"DDP's step of 6 layers of {1e3 * layer_s:.0f} ms over {between}; the peer is the same by arithmetic"
    return compare("measure.pace", ran, computed, "s", 0.9, note)


def _plain(script: str, times: str, port: int) -> None:
    """The script on a rank, as ``measure`` would run it, with nothing around it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [script, times]
    runpy.run_path(script, run_name="__main__")
    dist.barrier()


def _read(times: Path) -> tuple[float, float]:
    begun, *steps = map(float, times.read_text(encoding="utf-8").split())
    return begun, median(steps)
