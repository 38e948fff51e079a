"""Published fine-tunes: did they fit, and how much did they take? Beside what the planner says of each.

``python -m pardemo.planner.layouts.published.finetune_runs`` prints both. ``data/published_finetunes/finetunes.csv``
has Qwen's 57 measured runs and reports from issues of training tools, which leave things open: what was filled in by
the tool's default stands in the column ``assumed``.
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from pardemo import project
from pardemo.planner import hardware
from pardemo.planner.estimate import RESERVE
from pardemo.planner.layouts.job.engines import FUSED_NORMS, fine_tune
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.job.machines import Machine
from pardemo.planner.layouts.job.stacks import Stack
from pardemo.planner.layouts.model import sizes
from pardemo.planner.layouts.model.configurations import of
from pardemo.planner.layouts.model.shape import Shape
from pardemo.planner.layouts.model.tuning import Tuning
from pardemo.planner.layouts.price.step import step
from pardemo.planner.layouts.price.tuned_memory import OVERHEADS, Overheads, peak

QWEN = "github.com/QwenLM/Qwen/blob/03cd81f/README.md"
#: GiB that torch reports of a GPU that is sold as so many GB.
REPORTED = {80: 79.25, 48: 47.5, 40: 39.5, 32: 31.7, 24: 23.6, 16: 15.8}
A100 = Machine(hardware.gpu("A100-80GB"), 8)  # of which Qwen's times are; of other runs the bytes are told alone
#: LLaMA-7B in full on 8 A800s of one host, 4,096 tokens, 64 samples a step, DeepSpeed 0.14.2 (gist chenyaofo/d4cd6a2):
#: (stage, checkpointing) -> (offload, micro-batch, samples/s).
A800 = {
    (2, True): (("none", 1, 4.19), ("optimizer", 1, 1.81), ("none", 4, 4.69)),
    (3, True): (("none", 2, 4.45), ("optimizer", 2, 2.05), ("optimizer+parameters", 4, 2.06), ("none", 8, 4.73)),
}
#: Of the room, what a plan may take and not be called tight: of reported fine-tunes that it puts between this and the
#: whole room, more ended out of memory than ran.
TIGHT = 0.85


@dataclass(frozen=True)
class ReportedRun:
    """A fine-tune and what came of it.

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

    @property
    def room(self) -> float:
        """Bytes that there are for it."""
        return REPORTED.get(round(self.gpu_gb), 0.985 * self.gpu_gb) * 2**30 * (1 - RESERVE)

    @property
    def fits(self) -> bool:
        """Whether the planner says that it fits."""
        return peak(self.job, self.layout).peak_bytes <= self.room

    @property
    def error(self) -> float | None:
        """Predicted over known peak, less 1."""
        return self.error_with(OVERHEADS)

    def error_with(self, overheads: Overheads) -> float | None:
        """The same with other constants."""
        return (
            None if self.peak_gb is None else peak(self.job, self.layout, overheads).peak_bytes / 1e9 / self.peak_gb - 1
        )

    @property
    def time_error(self) -> float | None:
        """Predicted over known seconds of a step on one A100, less 1."""
        return self.time_error_with(self.job.stack)

    def time_error_with(self, program: Stack) -> float | None:
        """The same with other constants."""
        if self.seconds is None:
            return None
        job = replace(self.job, stack=program.but(engine=self.job.stack.engine, can=self.job.stack.can))
        return step(job, self.layout).seconds / self.seconds - 1


def folder() -> Path:
    """Where the tables are."""
    return project.root() / "data" / "published_finetunes"


def read(path: Path) -> Iterator[ReportedRun]:
    """The runs of a table.

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
        return replace(of(sizes.find(cells["model"])), name=cells["model"])
    layers, hidden, heads, groups, middle, words, head = (
        int(cells[name] or 0) for name in ("layers", "hidden", "heads", "groups", "middle", "vocabulary", "head")
    )
    gated, tied = cells["gated"] == "1", cells["tied"] == "1"
    return Shape(layers, hidden, heads, groups, middle, words, gated, tied, head, name=cells["model"])


def halves(runs: Sequence[ReportedRun]) -> tuple[list[ReportedRun], list[ReportedRun]]:
    """Qwen's runs: those that the constants of memory were fitted to, every second one, and the others."""
    own = [run for run in runs if run.source == QWEN]
    return own[::2], own[1::2]


def as_text(runs: Sequence[ReportedRun]) -> str:
    """Errors of the peaks that are known, and whether each verdict was right."""
    told = []
    fitted, others = halves(runs)
    for name, of_them in (("Qwen's, fitted to", fitted), ("Qwen's, the others", others)):
        errors = [abs(run.error) for run in of_them if run.error is not None]
        late = [abs(run.time_error) for run in of_them if run.time_error is not None]
        told.append(
            f"{name}: {len(errors)} peaks, mean {100 * fmean(errors):.1f} %, worst {100 * max(errors):.0f} %; "
            f"{len(late)} times, mean {100 * fmean(late):.1f} %, worst {100 * max(late):.0f} %"
        )
    reports = [run for run in runs if run.source != QWEN]
    for title, of_them in (
        (
            "reports that leave nothing open",
            [run for run in reports if not {"sequence", "micro_batch"} & {*run.assumed}],
        ),
        ("all reports", reports),
    ):
        errors = [abs(run.error) for run in of_them if run.error is not None]
        oom = [run for run in of_them if run.outcome == "oom"]
        ran = [run for run in of_them if run.outcome == "ok"]
        told.append(
            f"{title}: out of memory {len(oom)}, of which the plan says so of {sum(not run.fits for run in oom)}; ran "
            f"{len(ran)}, of which it fits {sum(run.fits for run in ran)}; {len(errors)} peaks, median error "
            f"{100 * median(errors):.0f} %"
        )
    near = [run for run in reports if TIGHT * run.room < peak(run.job, run.layout).peak_bytes <= run.room]
    died = sum(run.outcome == "oom" for run in near)
    told.append(f"of {len(near)} reports that it puts between {TIGHT:.0%} and all of the room {died} ran out of memory")
    return "\n".join(told)


if __name__ == "__main__":
    print(as_text(list(read(folder() / "finetunes.csv"))))
    sys.exit(0)
