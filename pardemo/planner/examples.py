"""Small models of three architectures, planned and run side by side: the planner's memory against the allocator's."""

from collections.abc import Sequence

from pardemo import extras

with extras.needed_by(__name__):
    from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from pardemo.baichuan2 import Baichuan2Config
from pardemo.formulas import memory
from pardemo.planner.dryrun import dry_run
from pardemo.planner.footprint import Footprint
from pardemo.planner.job import Adapter, RankJob

_SIZES = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4
}  # fmt: skip
#: DeepSpeed's buckets and thresholds in proportion to a small model; its own are made for thousands of times more.
BUCKETS = {
    "reduce_bucket_size": 1 << 20,
    "allgather_bucket_size": 1 << 20,
    "stage3_prefetch_bucket_size": 1 << 18,
    "stage3_max_live_parameters": 1 << 20,
    "stage3_max_reuse_distance": 1 << 20,
    "stage3_param_persistence_threshold": 1000,
}
TARGETS = {"baichuan2": ("W_pack",), "llama": ("q_proj", "v_proj"), "qwen2": ("q_proj", "v_proj")}


def config(name: str) -> PreTrainedConfig:
    """A four-layer model of the architecture."""
    if name == "baichuan2":
        return Baichuan2Config(**_SIZES)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[name](**_SIZES, num_key_value_heads=2)


def job(name: str, engine: str, ranks: int, lora: bool, checkpointing: bool, prefetching: bool = True) -> RankJob:
    """4 × 128 tokens, a quarter of them labels, as this machine's CPU would run it.

    Args:
        prefetching: of DeepSpeed's stage 3. It gathers what it prefetches in the order of a Python set, which differs
            between ranks and runs, and with it, in some jobs, the peak: the dry run gives that of one order.
    """
    adapter = Adapter(target=TARGETS[name]) if lora else None
    zero = BUCKETS if engine.startswith("zero") else {}
    if not prefetching:
        if engine != "zero-3":
            raise ValueError(f"only DeepSpeed's stage 3 prefetches, not {engine}")
        zero = BUCKETS | {"stage3_prefetch_bucket_size": 0}
    return RankJob(
        config(name), batch=4, sequence=128, adapter=adapter, checkpointing=checkpointing, engine=engine, ranks=ranks,
        labels=0.25, zero=zero, on_gpu=False,
    )  # fmt: skip


def compare(world, jobs: Sequence[RankJob]) -> list[dict]:
    """Each job run on the world's ranks and planned: bytes, and the errors of the plan and of other people's rules."""
    rows = []
    for job in jobs:
        planned = dry_run(job)
        real = max(world.run(_measure, job, timeout_s=200))
        rules = {name: nbytes / real - 1 for name, nbytes in others(planned).items()}
        rows.append({"measured": real, "planned": planned.peak_bytes, "error": planned.peak_bytes / real - 1, **rules})
    return rows


def others(footprint: Footprint) -> dict[str, float]:
    """What DeepSpeed's estimators and accelerate's rule say of the same job; frozen parameters count as trained."""
    params, ranks, stage = footprint.params, footprint.job.ranks, footprint.job.stage
    rules: dict[str, float] = {"accelerate estimate-memory": memory.accelerate_estimate(params, 2)}
    if stage in (1, 2):  # there is none for stage 1
        rules["DeepSpeed's estimator"] = memory.deepspeed_zero2_estimate(params, ranks)
    elif stage == 3 or footprint.job.engine == "fsdp2":
        largest = max(count for count, _ in footprint.sizes.values())
        rules["DeepSpeed's estimator"] = memory.deepspeed_zero3_estimate(params, ranks, largest)
    return rules


def _measure(job: RankJob) -> int:
    from pardemo.planner import measured_peak

    return measured_peak.measure(job)
