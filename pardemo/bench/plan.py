"""Seconds and MiB of the dry run of Baichuan2-13B with LoRA at batch 8 × 1024, each in a process of its own.

There is nothing to race against: the peer is the limit that is asked for, 5 s and 2 GiB, on two cores; 1 s for a
whole table, which is reckoned without a dry run; and 2 %, by which that may differ from sixty dry runs.
"""

import json
import subprocess
import sys
import time

from pardemo.bench import BenchRow, compare

SECONDS, MIB, ROUNDS = 5.0, 2048.0, 3
TABLE_SECONDS = 1.0
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

_TENSORS = """
import json
from statistics import fmean
import torch
torch.set_num_threads(1)
from pardemo.planner import checked
from pardemo.planner.layouts.price.memory import memory
errors = []
for job, layout, run in (checked.compared(*case) for case in checked.cases()):
    errors.append(100 * abs(memory(job, layout).tensors / run.peak_bytes - 1))
print(json.dumps([fmean(errors), max(errors)]))
"""


def rows() -> list[BenchRow]:
    seconds, mib = zip(*(told(_PROGRAM) for _ in range(ROUNDS)), strict=True)
    mean, worst = told(_TENSORS)
    tables = [_table("llama3-8b") for _ in range(ROUNDS)]
    return [
        compare("plan.dry_run", seconds, [SECONDS] * ROUNDS, "s", 1.0, "the limit for 13B, LoRA, 8 × 1024"),
        compare("plan.memory", mib, [MIB] * ROUNDS, "MiB", 1.0, "the limit, of the whole process"),
        compare("plan.tensors", [mean], [2.0], "%", 1.0, "the limit; tensors of 60 jobs beside dry runs, mean"),
        compare("plan.tensors.worst", [worst], [10.0], "%", 1.0, "the limit; the worst of them"),
        compare(
            "plan.table", tables, [TABLE_SECONDS] * ROUNDS, "s", 1.0, "the limit; llama3-8b in full, 8 GPUs, all rows"
        ),
    ]


def _table(model: str) -> float:
    """Seconds of the command, as a user has them."""
    command = [sys.executable, "-m", "pardemo", "plan", "--model", model, "--full", "--gpus", "8", "--json"]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["rows"]
    return time.perf_counter() - begin


def told(program: str, *arguments: str) -> list[float]:
    """What a program prints as JSON in its last line, of a Python process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
