"""Writes the planner's errors into documents: ``python tests/calibration/error_tables.py``."""

import re
from pathlib import Path

from pardemo import project
from pardemo.planner.layouts.published import against, published

FOLDER = project.root() / "data" / "published_runs"
PLACE = re.compile(r"(<!-- layouts -->\n).*?(<!-- /layouts -->)", re.DOTALL)
PAGES = ("docs/records/planner-error.md", "README.md")
#: Of each table: its file, its name, the least MFU of the runs that count, and the mean error aimed at, in %.
ROWS = (
    ("nanotron_h100.csv", "nanotron, H100, 8 to 256 GPUs, MFU of 5 % and more", 0.05, 15),
    ("megatron_deepspeed_a100_1_host.csv", "Megatron-DeepSpeed, A100, 2 to 8 GPUs", 0.0, 12),
    ("llm_foundry_fsdp.csv", "LLM-Foundry, FSDP, A100 and H100, 8 to 512 GPUs", 0.0, 10),
    ("megatron_bridge.csv", "Megatron-core, H100 to GB300, bf16 to NVFP4, 8 to 1,024 GPUs", 0.0, 12),
    ("tables.csv", "torchtitan's and Megatron's tables, up to 1T on 512 GPUs", 0.0, 10),
)


def markdown() -> str:
    """The table: of each file the errors of time, of memory, and what the planner's choice costs."""
    lines = [
        "| published runs | runs | step time, mean error | median | within 15 % | aim | memory "
        "| its choice over the best one: median, mean, worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for file, name, least_mfu, aim in ROWS:
        outcomes = against.compare(published.load(FOLDER / file))
        time = against.errors([outcome.error for outcome in against.usable(outcomes, least_mfu)])
        memory_errors = [
            error for outcome in outcomes if (error := outcome.memory_error) is not None and not outcome.run.wrong
        ]
        memory = f"{against.errors(memory_errors)['mean']:.0%}".replace("%", " %") if memory_errors else "–"
        regrets = sorted(choice.regret for choice in against.choices(outcomes))
        cost = _cost(regrets)
        cells = (
            name, f"{time['runs']:,}", f"{100 * time['mean']:.1f} %", f"{100 * time['median']:.1f} %",
            f"{100 * time['within 15 %']:.0f} %", f"{aim} %", memory, cost,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cost(regrets: list[float]) -> str:
    if not regrets:
        return "–"
    values = regrets[len(regrets) // 2], sum(regrets) / len(regrets), regrets[-1]
    return ", ".join(f"{100 * value:.0f} %" for value in values) + f" of {len(regrets)} jobs"


def update(path: Path) -> None:
    """Puts the table into its place in a page.

    Raises:
        ValueError: the page has no place for it.
    """
    text = path.read_text(encoding="utf-8")
    if not PLACE.search(text):
        raise ValueError(f"{path.name} has no place for the table of layouts: <!-- layouts --> and <!-- /layouts -->")
    table = markdown()
    project.write_atomically(
        path, lambda target: target.write_text(PLACE.sub(lambda m: m[1] + table + m[2], text), encoding="utf-8")
    )


if __name__ == "__main__":
    for page in PAGES:
        update(project.root() / page)
