"""Seconds and MiB of the dry run of Baichuan2-13B with LoRA at batch 8 × 1024, each in a process of its own.

There is nothing to race against: the peer is the limit that is asked for, 5 s and 2 GiB, on two cores.
"""

import json
import subprocess
import sys

from pardemo.bench import Row, compare

SECONDS, MIB, ROUNDS = 5.0, 2048.0, 3
_PROGRAM = """
import json, resource, time
import torch
torch.set_num_threads(2)
from pardemo.planner import cuda_truth
from pardemo.planner.dryrun import dry_run
found = dry_run(cuda_truth.job())
print(json.dumps([found.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def rows() -> list[Row]:
    found = []
    for _ in range(ROUNDS):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
    seconds, mib = zip(*found, strict=True)
    return [
        compare("plan.dry_run", seconds, [SECONDS] * ROUNDS, "s", 1.0, "the limit for 13B, LoRA, 8 × 1024"),
        compare("plan.memory", mib, [MIB] * ROUNDS, "MiB", 1.0, "the limit, of the whole process"),
    ]
