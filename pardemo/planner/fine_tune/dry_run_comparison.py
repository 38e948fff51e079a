"""Compares a row of the plan with a dry run of its engine (``pardemo plan --dry-run``)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pardemo.meters.snapshot import Block, of_sums
from pardemo.planner.dry_run.footprint import LINES, Footprint
from pardemo.planner.dry_run.memory_curve import Curve
from pardemo.planner.estimate import Memory
from pardemo.planner.fine_tune.plan_table import PlanRow, Request
from pardemo.planner.layouts.fine_tune_step import reductions, tensor_bytes

SHOWN_FROM = 0.02  # of the tensors: lines that differ by less are not shown


@dataclass(frozen=True)
class DryRunComparison:
    """The peak of a GPU by line, ``planned`` and in the engine's dry ``run``; ``sent``: bytes of a step in both."""

    planned: Memory
    run: Memory
    sent: tuple[float, float]

    @property
    def tensors(self) -> tuple[float, float]:
        """Bytes of tensors at the peak, as planned and in the dry run."""
        return self.planned.tensors, self.run.tensors

    @property
    def difference(self) -> float:
        """Planned bytes of tensors over those of the dry run, less 1."""
        planned, run = self.tensors
        return planned / run - 1

    def as_json(self) -> dict[str, Any]:
        """Returns both for JSON, in bytes."""
        return {
            "tensors": round(self.tensors[1]), "planned_tensors": round(self.tensors[0]), "difference": self.difference,
            "peak_bytes": round(self.run.peak_bytes), "phase": self.run.phase,
            "lines": {name: round(value) for name, value in self.run.lines.items()},
            "sent_bytes_per_step": round(self.sent[1]),
        }  # fmt: skip

    def as_text(self) -> str:
        """Says in some lines where the two differ."""
        planned, run = self.tensors
        lines = [
            f"dry run: {run / 1e9:.2f} GB of tensors in the {self.run.phase} pass, planned {planned / 1e9:.2f} "
            f"({100 * self.difference:+.1f} %); sent {self.sent[1] / 1e9:.3f} GB a step, "
            f"planned {self.sent[0] / 1e9:.3f}"
        ]
        for name in LINES:
            planned_bytes, run_bytes = self.planned.lines.get(name, 0.0), self.run.lines.get(name, 0.0)
            if abs(planned_bytes - run_bytes) > SHOWN_FROM * run:
                lines.append(f"  {name}: {run_bytes / 1e9:.2f} GB, planned {planned_bytes / 1e9:.2f}")
        held = self.run.lines.get("allocator", 0.0)
        added = self.planned.lines.get("allocator", 0.0)
        lines.append(f"  torch's allocator would hold {held / 1e9:.2f} GB more, the plan adds {added / 1e9:.0f}")
        return "\n".join(lines)


def compare_with_dry_run(request: Request, row: PlanRow) -> DryRunComparison:
    """Runs the row's engine on fake tensors and compares its peak and traffic with the plan's.

    Raises:
        ValueError: weights in few bits, another optimizer than AdamW, or a fused loss: these have no dry run.
    """
    tuning = request.job.tuning
    for name, plain, option in (("base", "bf16", "--base"), ("optimizer", "adamw", "--optimizer")):
        if (value := getattr(tuning, name)) != plain:
            raise ValueError(f"--dry-run runs {plain} alone; there is no dry run of {option} {value}")
    if tuning.embeddings:
        raise ValueError("--dry-run trains adapters alone; there is no dry run of --embeddings")
    if tuning.fused_loss:
        raise ValueError("--dry-run makes whole logits; there is no dry run of --fused-loss")
    curve = _curve(request, row)
    run = curve.estimate(row.layout, request.machine.most_bytes)
    return DryRunComparison(row.memory, run, (row.sent_bytes, _sent(request, row, curve.low)))


def _curve(request: Request, row: PlanRow) -> Curve:
    """Makes the row's dry runs."""
    # two micro-batches stand for any more: gradients are kept from the second on
    accumulation = min(2, max(1, request.samples_per_step // (request.dp * min(request.micro_batches))))
    recomputes = row.layout.recompute == "full"
    return Curve(
        request.job.but(engine=row.engine, ranks=request.dp, checkpointing=recomputes, accumulation=accumulation)
    )


def _sent(request: Request, row: PlanRow, run: Footprint) -> float:
    """Returns bytes that a rank sends in the row's step: the engine's calls, and tensor parallelism's by formula."""
    reduction_bytes, once = run.data_parallel_bytes(request.dp, request.tp * request.pp)
    return reductions(row.layout) * reduction_bytes + once + row.layout.accumulation * tensor_bytes(row.job, row.layout)


def blocks_of_row(request: Request, row: PlanRow, peak: Memory) -> list[Block]:
    """Returns a block for each tensor of the row's dry run, and blocks that stay for the rest of a GPU's memory.

    What is alive at most at one time is the ``peak`` of that run, rounded to whole bytes. The allocator's block is what
    it reserves at most beyond the tensors of that time, rounding included.
    """
    run, nbytes = _curve(request, row).events(row.layout)
    tensors, most = _tensors(run, nbytes)
    beside = {name: round(value) for name, value in peak.lines.items() if name not in (*LINES, "allocator")}
    beside["allocator"] = round(peak.peak_bytes) - most - sum(beside.values())
    return [*of_sums(beside, "beside torch's tensors"), *tensors]


def _tensors(run: Footprint, nbytes: np.ndarray) -> tuple[list[Block], int]:
    """Returns a block for each storage of a dry run's step, and the most bytes of them at one time.

    A storage that grows or shrinks is another block from then on.
    """
    storages, first = run.changes[:, 0], run.first_event
    at_first = np.bincount(storages[:first], nbytes[:first], len(run.lives))
    size = dict.fromkeys(range(len(run.lives)), 0.0)
    born: dict[int, int] = {}
    blocks: list[Block] = []
    changes = [(storage, at_first[storage], 1) for storage in np.flatnonzero(at_first).tolist()]
    changes += [
        (s, n, 2 + k) for k, (s, n) in enumerate(zip(storages[first:].tolist(), nbytes[first:].tolist(), strict=True))
    ]
    total = most = 0
    for storage, change, when in changes:
        before, size[storage] = round(size[storage]), size[storage] + change
        after = round(size[storage])
        if before == after:
            continue
        total += after - before
        most = max(most, total)
        if before:
            blocks[born[storage]] = blocks[born[storage]]._replace(died=when)
        if after:
            life = run.lives[storage]
            born[storage] = len(blocks)
            blocks.append(
                Block(after, LINES[run.line_of[storage]], f"{life.origin}, {life.phase}", life.module, when, None,
                      life.phase)
            )  # fmt: skip
    return blocks, most
