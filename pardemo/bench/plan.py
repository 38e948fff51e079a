"""Seconds and MiB of the dry run of Baichuan2-13B with LoRA at batch 8 × 1024, each in a process of its own.

There is nothing to race against: the peer is the limit that is asked for, 5 s and 2 GiB, on two cores. Two more rows
race a dry run told from few layers against the one of all, whose peak is the same. The last one is a whole table
beside an aim that is out of reach while the engines themselves are run (docs/planner.md).
"""

import json
import subprocess
import sys
import time

from pardemo.bench import BenchRow, compare

SECONDS, MIB, ROUNDS = 5.0, 2048.0, 3
TABLE_SECONDS = 10.0
_PROGRAM = """
import json, time
import torch
torch.set_num_threads(2)
from pardemo.planner import cuda_truth
from pardemo.planner.dryrun import dry_run
found = dry_run(cuda_truth.job())
with open("/proc/self/status") as status:  # getrusage's would be that of the process which started this one, if larger
    kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps([found.seconds, kib / 1024]))
"""


#: Llama-3 70B in full: 80 layers.
_LAYERS = """
import json, sys, time
import torch
torch.set_num_threads(1)
from pardemo.planner import layers, models
from pardemo.planner.dryrun import dry_run
from pardemo.planner.job import RankJob
job = RankJob(models.find("llama3-70b"), batch=2, engine=sys.argv[1], ranks=8)
found, seconds = [], []
for made in (lambda: layers.stretched(job).footprint(2), lambda: dry_run(job)):
    begin = time.perf_counter()
    found.append(made())
    seconds.append(time.perf_counter() - begin)
assert found[0].lines == found[1].lines, "two peaks"
print(json.dumps(seconds))
"""


def rows() -> list[BenchRow]:
    seconds, mib = zip(*(_told(_PROGRAM) for _ in range(ROUNDS)), strict=True)
    layers, engine = (zip(*(_told(_LAYERS, name) for _ in range(ROUNDS)), strict=True) for name in ("fsdp2", "zero-2"))
    table = _table("llama3-8b")
    return [
        compare("plan.dry_run", seconds, [SECONDS] * ROUNDS, "s", 1.0, "the limit for 13B, LoRA, 8 × 1024"),
        compare("plan.memory", mib, [MIB] * ROUNDS, "MiB", 1.0, "the limit, of the whole process"),
        compare("plan.layers", *layers, "s", 3.0, "70B in full, FSDP2: from 4 and 5 layers, and all 80"),
        compare("plan.engine", *engine, "s", 1.0, "the same under stage 2, its engine run with all 80"),
        compare("plan.table", [table], [TABLE_SECONDS], "s", None, "the aim; llama3-8b in full on 8 GPUs, all rows"),
    ]


def _table(model: str) -> float:
    """Seconds of the command, as a user has them."""
    command = [sys.executable, "-m", "pardemo", "plan", "--model", model, "--full", "--gpus", "8", "--json"]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["rows"]
    return time.perf_counter() - begin


def _told(program: str, *arguments: str) -> list[float]:
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
