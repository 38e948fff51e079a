"""Published peaks of full fine-tuning beside the planner's: ``python tests/calibration/peaks.py``; minutes, no GPU.

torchtitan reports what torch has reserved, the gist what is allocated; the planner's figure is the same of the two.
"""

from dataclasses import dataclass

from transformers import LlamaConfig

from pardemo.planner.dry_run import memory_curve
from pardemo.planner.dry_run.footprint import LINES
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.layout import Layout

GIST = "LLaMA-7B on 8 A800, DeepSpeed 0.14.2 (gist chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a)"
TITAN = "torchtitan, llama3_h100_202412: Llama-3 8B on 8 H100, FSDP2, full recomputation"


@dataclass(frozen=True)
class Peak:
    """A published peak: ``gib`` of what torch had ``counted``, reserved or allocated."""

    job: RankJob
    gib: float
    counted: str
    source: str


def published() -> list[Peak]:
    llama_7b = LlamaConfig(max_position_embeddings=4096)
    llama3_8b = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131_072,
    )  # fmt: skip
    rows = [Peak(RankJob(llama3_8b, batch=1, sequence=32_768, engine="fsdp2", ranks=8), 83.9, "reserved", TITAN)]
    for stage, checkpointing, batch, gib in (
        (2, False, 1, 44.8), (2, True, 1, 23.5), (2, True, 4, 38.6), (3, False, 2, 75.7), (3, True, 2, 20.4),
        (3, True, 8, 39.1),
    ):  # fmt: skip
        job = RankJob(
            llama_7b, batch=batch, sequence=4096, engine=f"zero-{stage}", ranks=8, checkpointing=checkpointing
        )
        micro_batches = min(2, 64 // 8 // batch)  # of a step's 64 samples; two stand for more
        rows.append(Peak(job.but(accumulation=micro_batches), gib, "allocated", GIST))
    return rows


def planned(peak: Peak) -> float:
    """Bytes of tensors at the peak, and where it is what torch reserved, what its allocator holds beside them."""
    layout = Layout(micro_batch=peak.job.batch, accumulation=peak.job.accumulation)
    lines = memory_curve.Curve(peak.job, scales=False).estimate(layout).lines
    tensors = sum(lines[name] for name in LINES)
    return tensors if peak.counted == "allocated" else tensors + lines["allocator"]


if __name__ == "__main__":
    for peak in published():
        job, gib, held = peak.job, planned(peak) / 2**30, memory_curve.run(peak.job).lines
        lines = ", ".join(f"{name} {held[name] / 2**30:.1f}" for name in LINES if held[name] >= 5e7)
        print(
            f"{job.engine}, checkpointing {'on' if job.checkpointing else 'off'}, {job.batch} × {job.sequence}: "
            f"planned {gib:.1f} GiB {peak.counted}, published {peak.gib} ({100 * (gib / peak.gib - 1):+.0f} %); "
            f"{lines}; {peak.source}",
            flush=True,
        )
