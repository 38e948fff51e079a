"""Constants of fine-tunes: ``python tests/calibration/finetune_fit.py`` fits them to every second of Qwen's runs.

How often a model's activations go through memory where its norms and rotations are no kernels of their own, of which
Qwen's runs do not tell, two of the four runs of LLaMA-7B without offload tell.
It prints the best of a grid, which are those that the planner has, and the errors on all runs; which terms the model
has was decided with all runs in view. These runs do not tell slow products from traffic through memory: that products
reach 0.85 was set before, near nanotron's 0.84. UNPACKED_BYTES of :mod:`pardemo.planner.layouts.fine_tune_step` is the
best of a few on the same half.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median
from unittest import mock

from pardemo.planner import hardware
from pardemo.planner.estimate import FULLEST
from pardemo.planner.layouts import configurations, fine_tune_memory
from pardemo.planner.layouts.configurations import shape_of_config
from pardemo.planner.layouts.fine_tune_memory import predict_peak
from pardemo.planner.layouts.job import FUSED_NORMS, fine_tune
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.programs import Program
from pardemo.planner.layouts.published.finetune_runs import (
    A800,
    QWEN,
    TIGHT,
    ReportedRun,
    folder,
    halves,
    read_fine_tunes,
)
from pardemo.planner.layouts.step import predict_step
from pardemo.planner.layouts.tuning import FULL

#: In GB, by halves: the runs tell no finer.
ALLOCATOR = (0.5, 1.0, 1.5, 2.0, 2.5)
LOGITS_OF_INT4 = (6.0, 7.0, 8.0, 10.0, 12.0)
SMALL = (200, 300, 400)
MOVED = (20, 25, 30, 35, 40, 50, 60)
ADAPTERS = (1.5, 2.0, 2.5, 3.0, 3.5)
LAUNCH = (3e-3, 4e-3, 5e-3)
PLAIN = (60, 80, 100, 120, 140, 160)
GRADIENT = (0.5e-3, 0.6e-3, 0.7e-3, 0.8e-3)

#: GiB that torch reports of a GPU that is sold as so many GB.
REPORTED = {80: 79.25, 48: 47.5, 40: 39.5, 32: 31.7, 24: 23.6, 16: 15.8}


def room(run: ReportedRun) -> float:
    """Bytes that there are for a run."""
    return REPORTED.get(round(run.gpu_gb), 0.985 * run.gpu_gb) * 2**30 * FULLEST


def fits(run: ReportedRun) -> bool:
    """Whether the planner says that it fits."""
    return predict_peak(run.job, run.layout).peak_bytes <= room(run)


def error(run: ReportedRun) -> float | None:
    """Predicted over known peak, less 1."""
    if run.peak_gb is None:
        return None
    return predict_peak(run.job, run.layout).peak_bytes / 1e9 / run.peak_gb - 1


def time_error(run: ReportedRun, program: Program | None = None) -> float | None:
    """Predicted over known seconds of a step on one A100, less 1; with the constants of another program."""
    if run.seconds is None:
        return None
    own = run.job.program
    program = own if program is None else program.but(engine=own.engine, supports=own.supports)
    return predict_step(replace(run.job, program=program), run.layout).seconds / run.seconds - 1


def of_memory(runs: Sequence[ReportedRun]) -> dict[str, float]:
    """The constants of :mod:`.fine_tune_memory` that miss the peaks least."""

    def missed(constants: dict[str, float]) -> float:
        with mock.patch.multiple(fine_tune_memory, **constants):
            return fmean(abs(error(run) or 0.0) for run in runs)

    tried = [
        {"ALLOCATOR_BYTES": allocator * 1e9, "INT4_LOGIT_BYTES": logits}
        for allocator, logits in itertools.product(ALLOCATOR, LOGITS_OF_INT4)
    ]
    return min(tried, key=missed)


def of_time(runs: Sequence[ReportedRun]) -> Program:
    """What misses the times beside 16-bit weights least: of LoRA's runs and of full ones alike."""
    timed = [run for run in runs if run.seconds and run.job.tuning.base == "bf16"]
    tried = [
        FUSED_NORMS.but(tile_loss=small, uncut_passes=moved, cut_passes=moved, adapter_passes=adapters,
                        launch_s=launch, gradient_hook_s=gradient)
        for small, moved, adapters, launch, gradient in itertools.product(SMALL, MOVED, ADAPTERS, LAUNCH, GRADIENT)
    ]  # fmt: skip
    return min(tried, key=lambda one: fmean(abs(time_error(run, one) or 0.0) for run in timed))


def of_plain(found: Program) -> Program:
    """The same with as many passes through memory as LLaMA-7B's runs at stages 2 and 3 tell, each the smallest one."""
    machine, shape = (
        Machine(hardware.gpu("A800-80GB"), 8),
        shape_of_config(configurations.find_configuration("llama2-7b")),
    )
    rows = [(stage, next(run for run in runs if run[0] == "none")) for (stage, _), runs in A800.items()]

    def missed(one: Program) -> float:
        misses = []
        for stage, (_, batch, rate) in rows:
            job = fine_tune(
                shape, machine, FULL, f"zero-{stage}", 8, batch, 4096, accumulation=64 // 8 // batch, program=one
            )
            misses.append(abs(64 / predict_step(*job).seconds / rate - 1))
        return fmean(misses)

    return min((found.but(name="transformers", uncut_passes=moved, cut_passes=moved) for moved in PLAIN), key=missed)


def errors(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Lines on the errors of the peaks and times that are known, and on whether each verdict was right."""
    for name, some in zip(("fitted to", "the others"), halves(runs), strict=True):
        peaks = [abs(each) for run in some if (each := error(run)) is not None]
        times = [abs(each) for run in some if (each := time_error(run)) is not None]
        told = (
            f"{len(of)} {what}, mean {100 * fmean(of):.1f} %, worst {100 * max(of):.0f} %"
            for what, of in (("peaks", peaks), ("times", times))
        )
        yield f"Qwen's, {name}: {'; '.join(told)}"
    reports = [run for run in runs if run.source != QWEN]
    whole = [run for run in reports if not {"sequence", "micro_batch"} & {*run.assumed}]
    for title, some in (("reports that leave nothing open", whole), ("all reports", reports)):
        peaks = [abs(each) for run in some if (each := error(run)) is not None]
        oom, ran = ([run for run in some if run.outcome == outcome] for outcome in ("oom", "ok"))
        yield (
            f"{title}: out of memory {len(oom)}, of which the plan says so of {sum(not fits(run) for run in oom)}; ran "
            f"{len(ran)}, of which it fits {sum(map(fits, ran))}; {len(peaks)} peaks, median error "
            f"{100 * median(peaks):.0f} %"
        )
    near = [run for run in reports if TIGHT * room(run) < predict_peak(run.job, run.layout).peak_bytes <= room(run)]
    died = sum(run.outcome == "oom" for run in near)
    yield f"of {len(near)} reports that it puts between {TIGHT:.0%} and all of the room {died} ran out of memory"


if __name__ == "__main__":
    runs = list(read_fine_tunes(folder() / "finetunes.csv"))
    fitted, _ = halves(runs)
    found = of_time(fitted)
    print(of_memory(fitted))
    names = ("tile_loss", "uncut_passes", "adapter_passes", "launch_s", "gradient_hook_s")
    print(", ".join(f"{name} {getattr(found, name)}" for name in names) + "; cut as whole")
    print(f"where norms and rotations are no kernels of their own: uncut_passes {of_plain(found).uncut_passes}")
    print(*errors(runs), sep="\n")
