"""What ``pardemo measure`` adds: a script's step beside the same one on plain ranks, and how soon the script begins."""

import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch.distributed as dist

from pardemo import World, measure
from pardemo.bench import BenchRow, compare
from pardemo.cluster import Cluster, loopback, tiers
from pardemo.script.step import rank

RANKS = 2
STEPS = 12
ROUNDS = 5
#: A measured step takes at most 1.25 times the plain one.
STEP_TARGET = 0.8

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
PACED = """
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
LAYER_S = 0.04
BETWEEN = "200 Mbit/s"
#: A step by arithmetic is at least 0.9 of the one whose layers waited, and whose links were limited, for real.
PACE_TARGET = 0.9


def rows() -> list[BenchRow]:
    """Steps and starts, measured and plain in turn; a step of layers that wait, beside the arithmetic."""
    steps: tuple[list[float], list[float]] = [], []
    starts: tuple[list[float], list[float]] = [], []
    with tempfile.TemporaryDirectory() as folder:
        script, told = Path(folder, "train.py"), Path(folder, "times")
        script.write_text(SCRIPT.format(steps=rank.WARM + STEPS, warm=rank.WARM), encoding="utf-8")
        with World(RANKS) as world:  # the nursery is warm from here on
            for _ in range(ROUNDS):
                asked = time.time()
                measure.script(str(script), [str(told)], ranks=RANKS, steps=STEPS)
                begun, step = _read(told)
                steps[0].append(step)
                starts[0].append(begun - asked)
                world.run(_plain, str(script), str(told), loopback.free_port())
                steps[1].append(_read(told)[1])
                asked = time.time()
                _torchrun(script, told)
                starts[1].append(_read(told)[0] - asked)
    note = f"DDP on {RANKS} ranks; the peer is the same script on ranks that nobody watches"
    start = "from the call to the script's first line; the peer is torchrun, whose script has torch still to load"
    return [
        compare("measure.step", *steps, "s", STEP_TARGET, note),
        compare("measure.start", *starts, "s", None, start),
        *_paced(),
    ]


def _paced() -> list[BenchRow]:
    """Nothing where links cannot be limited."""
    from pardemo.script.runtime.launch_lines import Launch
    from pardemo.script.step import measurement, pace

    if tiers.found().name == "none":
        return []
    cluster = Cluster(2, 1, between=BETWEEN)
    ran, reckoned = [], []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(PACED, encoding="utf-8")
        for _ in range(ROUNDS):
            measured, seen = measurement.measured(
                Launch("train.py", (), False), ranks=2, cluster=cluster, steps=3, folder=folder, timeout_s=120,
                work=True, layer_s=LAYER_S,
            )  # fmt: skip
            ran.append(max(one.step_s for one in measured.time))
            reckoned.append(pace.on_layers(seen, cluster).step_s)
    note = f"DDP's step of 6 layers of {1e3 * LAYER_S:.0f} ms over {BETWEEN}; the peer is the same by arithmetic"
    return [compare("measure.pace", ran, reckoned, "s", PACE_TARGET, note)]


def _plain(script: str, told: str, port: int) -> None:
    """The script on a rank, as ``measure`` would run it, with nothing around it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [script, told]
    runpy.run_path(script, run_name="__main__")
    dist.barrier()


def _torchrun(script: Path, told: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    subprocess.run([*command, str(script), str(told)], check=True, capture_output=True, timeout=300)


def _read(told: Path) -> tuple[float, float]:
    begun, *times = map(float, told.read_text(encoding="utf-8").split())
    return begun, median(times)
