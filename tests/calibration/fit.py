"""``python tests/calibration/fit.py``: the constants of :mod:`pardemo.planner.layouts.programs` from published runs.

A handful of constants for each program, each within what its meaning allows, at which every second run's step time
(and memory, where it is known) is missed least; the rest of the runs are not looked at. (Of few runs all are fitted,
and it says so.) Errors beyond 10 % count with their logarithm, since some runs had other troubles than those that are
modelled.
"""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.programs import Program, find_program
from pardemo.planner.layouts.published import against
from pardemo.planner.layouts.published.against import ComparedRun, Halves, compare, errors
from pardemo.planner.layouts.published.runs import PublishedRun
from pardemo.planner.layouts.step import predict_step
from pardemo.tables import text_table

SOFT = 0.1
_EXPERTS = {
    "fused_routed_passes": (1, 40), "expert_launch_s": (1e-4, 2e-2), "cast_bytes": (0.1, 12),
    "fp8_efficiency": (0.6, 1),
}  # fmt: skip
#: Of each program with enough runs: their file, and the constants that are fitted with the bounds that they may have.
FITTED: dict[str, tuple[str, dict[str, tuple[float, float]]]] = {
    "nanotron": (
        "nanotron_h100.csv",
        {
            "matmul_efficiency": (0.5, 1.1), "tile_loss": (5, 500), "attention_efficiency": (0.4, 1.5),
            "launch_s": (1e-4, 1e-2), "launch_rank_s": (1e-6, 1e-3), "launch_across_hosts_s": (1e-4, 1e-2),
            "exchange_across_hosts_s": (1e-5, 5e-3), "dp_overlap": (0.05, 1), "reduce_s": (1e-4, 1e-1),
            "reduce_efficiency": (0.05, 1), "ring_bytes_per_s": (2e10, 3e11), "bucket_host_s": (1e-6, 1e-3),
        },
    ),
    "megatron-deepspeed": (
        "megatron_deepspeed_a100_1_host.csv",
        {
            "matmul_efficiency": (0.5, 1.05), "tile_loss": (5, 500), "score_passes": (3, 15),
            "launch_s": (1e-4, 1e-2), "launch_rank_s": (5e-5, 1e-3), "exchange_latency": (0.2, 6),
            "send_s": (1e-6, 1e-2), "reduce_efficiency": (0.3, 1),
        },
    ),
    "llm-foundry": (
        "llm_foundry_fsdp.csv",
        {
            "tile_loss": (5, 500), "attention_efficiency": (0.2, 1.5), "dp_overlap": (0.2, 1),
            "reduce_efficiency": (0.1, 1),
        },
    ),
    "megatron-core@26.02": (
        "megatron_bridge.csv",
        {
            "attention_efficiency": (0.4, 2.5), "fp8_efficiency": (0.6, 1), "fp4_efficiency": (0.3, 1),
            "cast_bytes": (0.1, 12), "routed_passes": (1, 40), "fused_routed_passes": (1, 40),
            "expert_launch_s": (1e-4, 2e-2), "expert_bias_passes": (0.1, 40), "mixer_passes": (1, 300),
            "reduce_efficiency": (0.1, 1),
        },
    ),
    # Later releases: what is quicker than in the one before. Dense models in bf16 depend on none of it.
    "megatron-core@26.04": ("newer/megatron_bridge_26.csv", _EXPERTS),
    "megatron-core@26.06": ("newer/megatron_bridge_26.csv", _EXPERTS | {"routed_overlap": (0.05, 1)}),
    "torchtitan-compiled": (
        "tables.csv",
        {
            "attention_efficiency": (0.3, 1.5), "uncut_passes": (4, 100), "cut_passes": (4, 100),
            "fp8_efficiency": (0.6, 0.95),
        },
    ),
    "torchtitan": ("tables.csv", {"uncut_passes": (4, 150)}),
    "megatron-2022": ("tables.csv", {"score_passes": (3, 15)}),
}  # fmt: skip
#: The same for memory, of programs whose tables say what a GPU held.
FITTED_MEMORY: dict[str, tuple[str, dict[str, tuple[float, float]]]] = {
    "nanotron": (
        "nanotron_h100.csv",
        {
            "kept_cut_bytes": (4, 60), "kept_head_bytes": (1, 20), "kept_ffn_bytes": (1, 8), "logit_bytes": (4, 20),
            "program_bytes": (1e8, 2e9),
        },
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the fitted constants beside those of the package; changes nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", choices=FITTED, help="only this one")
    arguments = parser.parse_args(argv)
    for name in [arguments.program] if arguments.program else FITTED:
        file, bounds = FITTED[name]
        _print_fit(name, "step time", file, against.halves(file), bounds, _miss, lambda outcome: outcome.error)
        if name in FITTED_MEMORY:
            file, bounds = FITTED_MEMORY[name]
            by_memory = against.halves(file, "memory")
            _print_fit(name, "memory", file, by_memory, bounds, _miss_memory, lambda outcome: outcome.memory_error)
    return 0


def _print_fit(
    name: str,
    quantity: str,
    file: str,
    split: Halves,
    bounds: Mapping[str, tuple[float, float]],
    miss: Callable[[PublishedRun], float],
    error: Callable[[ComparedRun], float | None],
) -> None:
    """Fits, and prints the program's constants, the fitted ones, and the errors of both on the other runs."""
    program = find_program(name)
    fitted, other = ([one.run for one in half if _is(one.run.job.program, program)] for half in split)
    few, count = not other, len(fitted) + len(other)
    other = other or fitted
    present = {constant: getattr(program, constant) for constant in bounds}
    results = fit(fitted, with_constants, present, bounds, miss=miss)
    rows = [("constant", "has", "fitted")] + [(n, f"{present[n]:.3g}", f"{results[n]:.3g}") for n in bounds]
    print(f"{name}, {quantity}: {count} runs of {file}, {'all of them' if few else 'every second one'} fitted")
    print(text_table(rows))
    for title, constants in (("has", present), ("fitted", results)):
        summary = errors([error(outcome) for outcome in compare(with_constants(run, constants) for run in other)])
        whose = "those that were fitted" if few else "those that were not fitted"
        print(f"  of {whose}, {title}: mean {summary['mean']:.1%}, median {summary['median']:.1%}")


def _is(one: Program, program: Program) -> bool:
    """Whether a run is one of the program's, and of the release that its constants are fitted to."""
    return (one.name, one.fitted_release) == (program.name, program.fitted_release)


def with_constants(run: PublishedRun, constants: Mapping[str, float]) -> PublishedRun:
    """The run with some constants of its program changed."""
    return replace(run, job=replace(run.job, program=replace(run.job.program, **constants)))


def fit(
    runs: Sequence[PublishedRun],
    change: Callable[[PublishedRun, Mapping[str, float]], PublishedRun],
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    rounds: int = 40,
    miss: Callable[[PublishedRun], float] | None = None,
) -> dict[str, float]:
    """The constants within ``bounds`` at which the runs are missed least: their logarithms, by least squares.

    Misses count by Cauchy's loss: their squares while they are below :data:`SOFT`, their logarithms beyond.

    Args:
        change: gives a run other constants. start: the constants to begin with, by name.
        rounds: how often all slopes are computed, at most.
        miss: the logarithm of predicted over known: by default of a step's seconds.
    """
    from scipy.optimize import least_squares

    miss = miss or _miss
    names = list(start)
    low, high = (np.log([bounds[name][side] for name in names]) for side in (0, 1))

    def misses(at: np.ndarray) -> np.ndarray:
        values = dict(zip(names, map(float, np.exp(at)), strict=True))
        return np.array([miss(change(run, values)) for run in runs])

    inside = 1e-6 * (high - low)  # it has to begin between its bounds, and not on one
    at = np.clip(np.log([start[name] for name in names]), low + inside, high - inside)
    solution = least_squares(
        misses, at, bounds=(low, high), loss="cauchy", f_scale=SOFT, max_nfev=rounds,
        diff_step=1e-3 / np.maximum(np.abs(at), 1e-2),  # a thousandth of the constant: predictions have small jumps
    )  # fmt: skip
    return dict(zip(names, map(float, np.exp(solution.x)), strict=True))


def _miss(run: PublishedRun) -> float:
    return math.log(predict_step(run.job, run.layout).seconds / run.seconds)


def _miss_memory(run: PublishedRun) -> float:
    return math.log(predict_memory(run.job, run.layout).peak_bytes / run.peak_bytes)


if __name__ == "__main__":
    sys.exit(main())
