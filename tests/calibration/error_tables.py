"""Writes the planner's errors into documents: ``python tests/calibration/error_tables.py``."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pardemo import project
from pardemo.planner.layouts.intervals import of_seconds
from pardemo.planner.layouts.published import against, loaders
from pardemo.planner.layouts.published.against import ComparedRun

FOLDER = project.root() / "data" / "published_runs"
PAGES = ("docs/records/planner-error.md", "README.md")
#: Of each table: its file, its name, the least MFU of the runs that count, and the mean error aimed at, in %.
ROWS = (
    ("nanotron_h100.csv", "nanotron, H100, 8 to 256 GPUs, MFU of 5 % and more", 0.05, 15),
    ("megatron_deepspeed_a100_1_host.csv", "Megatron-DeepSpeed, A100, 2 to 8 GPUs", 0.0, 12),
    ("llm_foundry_fsdp.csv", "LLM-Foundry, FSDP, A100 and H100, 8 to 512 GPUs", 0.0, 10),
    ("megatron_bridge.csv", "Megatron-core, H100 to GB300, bf16 to NVFP4, 8 to 1,024 GPUs", 0.0, 12),
    ("tables.csv", "torchtitan's and Megatron's tables, up to 1T on 512 GPUs", 0.0, 10),
    ("newer/megatron_bridge_26.csv", "Megatron-core, releases 26.04 and 26.06, H100 to GB300", 0.0, 12),
    ("newer/simumax_b200_dense_runs.csv", "SimuMax's, 8 slow B200s: never fitted", 0.0, None),
)
#: SimuMax's B200s: of the data sheet's operations/s, what their large matrix multiplications reach alone
#: (data/published_runs/README.md).
SLOW = 0.48


def markdown() -> str:
    """The table: of each file the errors of time, of memory, and what the planner's choice costs."""
    lines = [
        "| published runs | runs | step time, mean error | median | within 15 % | aim | memory "
        "| its choice over the best one: median, mean, worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for file, name, least_mfu, aim in ROWS:
        outcomes = against.compare(loaders.load(FOLDER / file, left_out=[]))
        time = against.errors([outcome.error for outcome in against.usable(outcomes, least_mfu)])
        memory_errors = [
            error for outcome in outcomes if (error := outcome.memory_error) is not None and not outcome.run.wrong
        ]
        memory = f"{against.errors(memory_errors)['mean']:.0%}".replace("%", " %") if memory_errors else "–"
        regrets = sorted(choice.regret for choice in against.choices(outcomes))
        cost = _cost(regrets)
        cells = (
            name, f"{time['runs']:,}", f"{100 * time['mean']:.1f} %", f"{100 * time['median']:.1f} %",
            f"{100 * time['within 15 %']:.0f} %", f"{aim} %" if aim else "–", memory, cost,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def releases() -> str:
    """The table: by how much each release's constants miss NVIDIA's runs of that release and of later ones."""
    lines = [
        "| constants of | runs of | dense: runs | mean error | median, signed | experts: runs | mean error "
        "| median, signed | in the interval |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[ComparedRun]] = defaultdict(list)
    for release in ("26.02", "26.04", "26.06"):
        file = "megatron_bridge.csv" if release == "26.02" else "newer/megatron_bridge_26.csv"
        kept = [one for one in against.halves(file)[1] if one.run.job.program.fitted_release == release]
        groups[release, f"{release}, kept back" if release != "26.02" else "25.09 to 26.02, kept back"] = kept
    for earlier, one in against.later_runs():
        groups[earlier.fitted_release, loaders.nvidia_program(one.run.job.program.release).fitted_release].append(one)
    for (constants, of), outcomes in sorted(groups.items()):
        cells = [constants, of]
        for experts in (False, True):
            errors = against.errors([x.error for x in outcomes if bool(x.run.job.shape.experts) == experts])
            cells += [str(errors["runs"]), f"{100 * errors['mean']:.1f} %", f"{100 * errors['bias']:+.1f} %"]
        intervals = [(of_seconds(x.run.job, x.run.layout, x.step.seconds), x.run.seconds) for x in outcomes]
        inside = sum(interval.low <= (seconds or 0) <= interval.high for interval, seconds in intervals)
        lines.append(f"| {' | '.join(cells)} | {100 * inside / len(intervals):.0f} % |")
    return "\n".join(lines) + "\n"


def slow_card() -> str:
    """A sentence on SimuMax's runs: by how much they are missed as planned, and with their card's rate told."""
    runs = loaders.load(FOLDER / "newer/simumax_b200_dense_runs.csv")
    gpu = runs[0].job.machine.gpu
    told = replace(gpu, reachable=SLOW * gpu.flops, sustained=1.0, measured=True)  # as a profile tells it
    slower = [replace(run, job=replace(run.job, machine=replace(run.job.machine, gpu=told))) for run in runs]
    plain, known = (against.errors([one.error for one in against.compare(rows)]) for rows in (runs, slower))
    return (
        f"SimuMax's {len(runs)} runs on 8 B200s are missed by {100 * plain['mean']:.1f} % (median "
        f"{100 * plain['bias']:+.1f} %): that machine's products reach {SLOW:g} of the data sheet, and "
        f"{gpu.reachable * gpu.sustained / gpu.flops:.2f} are assumed. With its rate told in a profile they are missed "
        f"by {100 * known['mean']:.1f} % (median {100 * known['bias']:+.1f} %).\n"
    )


#: By its name on the pages, what is written there.
PLACES: dict[str, Callable[[], str]] = {"layouts": markdown, "releases": releases, "slow card": slow_card}


def _cost(regrets: list[float]) -> str:
    if not regrets:
        return "–"
    values = regrets[len(regrets) // 2], sum(regrets) / len(regrets), regrets[-1]
    return ", ".join(f"{100 * value:.0f} %" for value in values) + f" of {len(regrets)} jobs"


def update(path: Path) -> None:
    """Puts the tables into their places in a page.

    Raises:
        ValueError: the page has no place for any.
    """
    text, found = path.read_text(encoding="utf-8"), False
    for name, written in PLACES.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if place.search(text):
            found, new = True, written()
            text = place.sub(lambda match, new=new: match[1] + new + match[2], text)
    if not found:
        raise ValueError(f"{path.name} has no place for the table of layouts: <!-- layouts --> and <!-- /layouts -->")
    project.write_text(path, text)


if __name__ == "__main__":
    for page in PAGES:
        update(project.root() / page)
