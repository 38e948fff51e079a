"""Constants of fine-tunes: ``python -m`` this module fits them to every second of Qwen's runs.

How often a model's activations go through memory where its norms and rotations are no kernels of their own, of which
Qwen's runs do not tell, two of the four runs of LLaMA-7B without offload tell.
It prints the best of a grid, which are those that the planner has; which terms the model has was decided with all runs
in view. These runs do not tell slow products from traffic through memory: that products reach 0.85 was set before, near
nanotron's 0.84. UNPACKED of :mod:`pardemo.planner.layouts.price.tuned_step` is the best of a few on the same half.
"""

import itertools
import sys
from collections.abc import Sequence
from statistics import fmean

from pardemo.planner import hardware
from pardemo.planner.layouts.job.engines import FUSED_NORMS, fine_tune
from pardemo.planner.layouts.job.machines import Machine
from pardemo.planner.layouts.job.stacks import Stack
from pardemo.planner.layouts.model import sizes
from pardemo.planner.layouts.model.configurations import of
from pardemo.planner.layouts.model.tuning import FULL
from pardemo.planner.layouts.price.step import step
from pardemo.planner.layouts.price.tuned_memory import Overheads
from pardemo.planner.layouts.published.finetune_runs import A800, ReportedRun, folder, halves, read

#: In GB, by halves: the runs tell no finer.
ALLOCATOR = (0.5, 1.0, 1.5, 2.0, 2.5)
LOGITS_OF_INT4 = (6.0, 7.0, 8.0, 10.0, 12.0)
SMALL = (200, 300, 400)
MOVED = (20, 25, 30, 35, 40, 50, 60)
ADAPTERS = (1.5, 2.0, 2.5, 3.0, 3.5)
LAUNCH = (3e-3, 4e-3, 5e-3)
PLAIN = (60, 80, 100, 120, 140, 160)
GRADIENT = (0.5e-3, 0.6e-3, 0.7e-3, 0.8e-3)


def of_memory(runs: Sequence[ReportedRun]) -> Overheads:
    """What misses the peaks least."""
    tried = [Overheads(allocator * 1e9, logits) for allocator, logits in itertools.product(ALLOCATOR, LOGITS_OF_INT4)]
    return min(tried, key=lambda one: fmean(abs(run.error_with(one) or 0.0) for run in runs))


def of_time(runs: Sequence[ReportedRun]) -> Stack:
    """What misses the times beside 16-bit weights least: of LoRA's runs and of full ones alike."""
    timed = [run for run in runs if run.seconds and run.job.tuning.base == "bf16"]
    tried = [
        FUSED_NORMS.but(small=small, whole=moved, cut=moved, adapters=adapters, launch_s=launch, gradient_s=gradient)
        for small, moved, adapters, launch, gradient in itertools.product(SMALL, MOVED, ADAPTERS, LAUNCH, GRADIENT)
    ]
    return min(tried, key=lambda one: fmean(abs(run.time_error_with(one) or 0.0) for run in timed))


def of_plain(found: Stack) -> Stack:
    """The same with as many passes through memory as LLaMA-7B's runs at stages 2 and 3 tell, each the smallest one."""
    machine, shape = Machine(hardware.gpu("A800-80GB"), 8), of(sizes.find("llama2-7b"))
    rows = [(stage, next(run for run in runs if run[0] == "none")) for (stage, _), runs in A800.items()]

    def missed(one: Stack) -> float:
        errors = []
        for stage, (_, batch, rate) in rows:
            job = fine_tune(
                shape, machine, FULL, f"zero-{stage}", 8, batch, 4096, accumulation=64 // 8 // batch, program=one
            )
            errors.append(abs(64 / step(*job).seconds / rate - 1))
        return fmean(errors)

    return min((found.but(name="transformers", whole=moved, cut=moved) for moved in PLAIN), key=missed)


if __name__ == "__main__":
    fitted, _ = halves(list(read(folder() / "finetunes.csv")))
    found = of_time(fitted)
    print(of_memory(fitted))
    names = ("small", "whole", "adapters", "launch_s", "gradient_s")
    print(", ".join(f"{name} {getattr(found, name)}" for name in names) + "; cut as whole")
    print(f"where norms and rotations are no kernels of their own: whole {of_plain(found).whole}")
    sys.exit(0)
