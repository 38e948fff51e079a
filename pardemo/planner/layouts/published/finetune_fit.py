"""Constants of fine-tunes, fitted to every second of Qwen's runs: ``python -m`` this module.

It prints the best of a grid, which are those that the planner has; which terms the model has was decided with all runs
in view. These runs do not tell slow products from traffic through memory: that products reach 0.85 was set before, near
nanotron's 0.84. UNPACKED of :mod:`pardemo.planner.layouts.price.tuned_step` is the best of a few on the same half.
"""

import itertools
import sys
from collections.abc import Sequence
from statistics import fmean

from pardemo.planner.layouts.job.stacks import Stack
from pardemo.planner.layouts.price.tuned_memory import Overheads
from pardemo.planner.layouts.price.tuned_step import TRANSFORMERS
from pardemo.planner.layouts.published.finetune_runs import ReportedRun, folder, halves, read

#: In GB, by halves: the runs tell no finer.
ALLOCATOR = (0.5, 1.0, 1.5, 2.0, 2.5)
LOGITS_OF_INT4 = (6.0, 7.0, 8.0, 10.0, 12.0)
SMALL = (200, 300, 400, 500)
MOVED = (50, 60, 70, 80, 90, 100, 110)
LAUNCH = (3e-3, 4e-3, 5e-3)


def of_memory(runs: Sequence[ReportedRun]) -> Overheads:
    """What misses the peaks least."""
    tried = [Overheads(allocator * 1e9, logits) for allocator, logits in itertools.product(ALLOCATOR, LOGITS_OF_INT4)]
    return min(tried, key=lambda one: fmean(abs(run.error_with(one) or 0.0) for run in runs))


def of_time(runs: Sequence[ReportedRun]) -> Stack:
    """What misses the times of LoRA beside 16-bit weights least."""
    timed = [run for run in runs if run.seconds and run.job.tuning.lora and run.job.tuning.base == "bf16"]
    tried = [
        TRANSFORMERS.but(small=small, whole=moved, cut=moved, launch_s=launch)
        for small, moved, launch in itertools.product(SMALL, MOVED, LAUNCH)
    ]
    return min(tried, key=lambda one: fmean(abs(run.time_error_with(one) or 0.0) for run in timed))


if __name__ == "__main__":
    fitted, _ = halves(list(read(folder() / "finetunes.csv")))
    found = of_time(fitted)
    print(of_memory(fitted))
    print(f"small {found.small}, whole and cut {found.whole}, launch_s {found.launch_s}")
    sys.exit(0)
