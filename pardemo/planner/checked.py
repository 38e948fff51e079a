"""A row of the plan beside a dry run of its engine: ``pardemo plan --dry-run``."""

from dataclasses import dataclass
from typing import Any

from pardemo.planner.estimate import Estimate
from pardemo.planner.footprint import LINES
from pardemo.planner.memory import Curve
from pardemo.planner.table import PlanRow, Request, cut, jobs

#: What both say, in the order in which it is shown; the rest of a GPU's memory is the allocator's and CUDA's.
NEAR = 0.02


@dataclass(frozen=True)
class Beside:
    """``planned`` and ``run``: a GPU's peak by line, by the model and by the engine; ``sent``: bytes of a step."""

    planned: Estimate
    run: Estimate
    sent: tuple[float, float]

    @property
    def tensors(self) -> tuple[float, float]:
        """Bytes of tensors at the peak, planned and run."""
        planned, run = (sum(memory.lines.get(name, 0.0) for name in LINES) for memory in (self.planned, self.run))
        return planned, run

    @property
    def difference(self) -> float:
        """Of the tensors: planned over run, less 1."""
        planned, run = self.tensors
        return planned / run - 1

    def as_json(self) -> dict[str, Any]:
        """Both, for JSON; bytes."""
        return {
            "tensors": round(self.tensors[1]), "planned_tensors": round(self.tensors[0]), "difference": self.difference,
            "peak_bytes": round(self.run.peak_bytes), "phase": self.run.phase,
            "lines": {name: round(value) for name, value in self.run.lines.items()},
            "sent_bytes_per_step": round(self.sent[1]),
        }  # fmt: skip

    def as_text(self) -> str:
        """Some lines: where the two differ."""
        planned, run = self.tensors
        told = [
            f"dry run: {run / 1e9:.2f} GB of tensors in the {self.run.phase} pass, planned {planned / 1e9:.2f} "
            f"({100 * self.difference:+.1f} %); sent {self.sent[1] / 1e9:.3f} GB a step, "
            f"planned {self.sent[0] / 1e9:.3f}"
        ]
        for name in LINES:
            ours, theirs = self.planned.lines.get(name, 0.0), self.run.lines.get(name, 0.0)
            if abs(ours - theirs) > NEAR * run:
                told.append(f"  {name}: {theirs / 1e9:.2f} GB, planned {ours / 1e9:.2f}")
        held = self.run.lines.get("allocator", 0.0)
        added = self.planned.lines.get("allocator", 0.0)
        told.append(f"  torch's allocator would hold {held / 1e9:.2f} GB more, the plan adds {added / 1e9:.0f}")
        return "\n".join(told)


def beside(request: Request, row: PlanRow) -> Beside:
    """Runs the row's engine on fake tensors and puts the two side by side.

    Raises:
        ValueError: weights in few bits, another optimizer than AdamW, or a fused loss: these have no dry run.
    """
    job = request.job
    for name, plain, told in (("base", "bf16", "--base"), ("optimizer", "adamw", "--optimizer")):
        if (value := getattr(job, name)) != plain:
            raise ValueError(f"--dry-run runs {plain} alone; there is no dry run of {told} {value}")
    if job.fused_loss:
        raise ValueError("--dry-run makes whole logits; there is no dry run of --fused-loss")
    from pardemo.planner.timing import step_time

    curve = Curve(jobs(request)[row.engine, row.checkpointing])
    run = curve.estimate(row.batch, *cut(request, row.batch, row.offload), request.cluster.room)
    time = step_time(
        curve.low, row.batch, row.accumulation, request.dp, request.cluster.rates, request.tp, request.pp, row.offload
    )
    return Beside(row.memory, run, (row.time.sent_bytes, time.sent_bytes))
