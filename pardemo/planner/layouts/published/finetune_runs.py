"""Reads published fine-tunes, and compares what they took with what the planner says of each.

``data/published_finetunes/finetunes.csv`` has Qwen's 57 measured runs and reports from issues of training tools, which
leave things open: what was filled in by the tool's default stands in the column ``assumed``.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pardemo import project
from pardemo.planner import hardware
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.configurations import shape_of_config
from pardemo.planner.layouts.job import FUSED_NORMS, Job, fine_tune
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.tuning import Tuning

QWEN = "github.com/QwenLM/Qwen/blob/03cd81f/README.md"
A100 = Machine(hardware.gpu("A100-80GB"), 8)  # of which Qwen's times are; of other runs the bytes are told alone
#: LLaMA-7B in full on 8 A800s of one host, 4,096 tokens, 64 samples a step, DeepSpeed 0.14.2 (gist chenyaofo/d4cd6a2):
#: (stage, checkpointing) -> (offload, micro-batch, samples/s).
A800 = {
    (2, True): (("none", 1, 4.19), ("optimizer", 1, 1.81), ("none", 4, 4.69)),
    (3, True): (("none", 2, 4.45), ("optimizer", 2, 2.05), ("optimizer+parameters", 4, 2.06), ("none", 8, 4.73)),
}
#: Of that limit, what a plan may take and not be called tight: of reported fine-tunes that it puts between this and all
#: of it (:data:`pardemo.planner.estimate.FULLEST`), more ended out of memory than ran.
TIGHT = 0.85


@dataclass(frozen=True)
class ReportedRun:
    """A published fine-tune: whether it ran, and the time and memory it took.

    Args:
        outcome: ok or oom. peak_gb: of a GPU; seconds: of a step; None where they are not said. assumed: columns that
            were filled in by the tool's default.
    """

    job: Job
    layout: Layout
    gpu_gb: float
    outcome: str
    peak_gb: float | None
    seconds: float | None
    assumed: tuple[str, ...]
    source: str


def folder() -> Path:
    """Returns the folder with the tables."""
    return project.root() / "data" / "published_finetunes"


def read_fine_tunes(path: Path) -> Iterator[ReportedRun]:
    """Reads the runs of a table.

    Raises:
        ValueError: a row says what cannot be; its line is named.
    """
    with path.open(newline="", encoding="utf-8") as file:
        for line, cells in enumerate(csv.DictReader(file), start=2):
            try:
                yield _run(cells)
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path.name}, line {line}: {error}") from None


def _run(cells: dict[str, str]) -> ReportedRun:
    tuning = Tuning(
        int(cells["rank"] or 0), tuple(filter(None, cells["target"].split("+"))), base=cells["base"],
        embeddings=cells["embeddings"] == "1", optimizer=cells["optimizer"], fused_loss=cells["fused_loss"] == "1",
        adapters_fp32=bool(cells["rank"]) and cells["engine"] == "plain", experts_apart=True,  # of Transformers 4
    )  # fmt: skip
    engine = "fsdp2" if cells["engine"] == "fsdp" else cells["engine"]
    job, layout = fine_tune(
        _shape(cells), A100, tuning, engine, int(cells["gpus"]), int(cells["micro_batch"]), int(cells["sequence"]),
        cells["attention"] == "fused", cells["checkpointing"] == "1", int(cells["accumulation"]), cells["offload"],
        program=FUSED_NORMS,
    )  # fmt: skip
    known, seconds = (float(cells[name]) if cells[name] else None for name in ("peak_gb", "seconds"))
    return ReportedRun(
        job, layout, float(cells["gpu_gb"]), cells["outcome"], known, seconds, tuple(cells["assumed"].split()),
        cells["source"],
    )  # fmt: skip


def _shape(cells: dict[str, str]) -> Shape:
    if not cells["layers"]:
        return replace(shape_of_config(configurations.find_configuration(cells["model"])), name=cells["model"])
    layers, hidden, heads, groups, middle, words, head = (
        int(cells[name] or 0) for name in ("layers", "hidden", "heads", "groups", "middle", "vocabulary", "head")
    )
    gated, tied = cells["gated"] == "1", cells["tied"] == "1"
    return Shape(layers, hidden, heads, groups, middle, words, gated, tied, head, name=cells["model"])


def halves(runs: Sequence[ReportedRun]) -> tuple[list[ReportedRun], list[ReportedRun]]:
    """Splits Qwen's runs: every second one, which the constants of memory were fitted to, and the others."""
    qwens = [run for run in runs if run.source == QWEN]
    return qwens[::2], qwens[1::2]
