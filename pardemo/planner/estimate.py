"""Defines estimates of a GPU's memory and a step's time, which a dry run or the formulas of ``layouts`` make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
#: The states that may lie in the host's memory, as DeepSpeed offloads them.
HOST_STATES = ("none", "optimizer", "optimizer+parameters")
#: Taken from the GPU before the first tensor: CUDA's context and libraries. What torch's message "out of memory" names
#: as in use less what it has reserved: 0.51 GiB of an A800 (hahnyuan/PB-LLM#3), 0.49 of an L40 (QwenLM/Qwen3-VL#2097).
CONTEXT_BYTES = 0.55e9
#: NCCL's buffers for each group that a rank talks in: 688 MB among four A100 (NVIDIA/nccl#964; 544 MB between two).
NCCL_BYTES = 0.69e9
#: Lines of an estimate that are no tensors'.
BESIDE_TENSORS = ("allocator", "CUDA context", "NCCL")
#: Of a GPU's memory, as torch reports it: what takes no more *fits*. The fullest of nanotron's 906 runs on H100 that
#: ended well had reserved 97.8 % (77.4 of 79.1 GiB, with CUDA's and NCCL's 1.2 beside it).
FULLEST = 0.98
#: Of a GPU's memory that a plan leaves free where it can choose, for fragments and what libraries take; nearer to its
#: end allocators begin to thrash.
RESERVE = 0.08
AS_QUICK = 1.01  # what takes no longer than this many times the quickest is as quick: the model is not that exact


def choose(candidates: Sequence[T], seconds: Callable[[T], float], preference: Callable[[T], Any]) -> T:
    """Returns the candidate with the least ``preference`` of those whose seconds are within 1 % of the quickest's."""
    quickest = min(map(seconds, candidates))
    return min((candidate for candidate in candidates if seconds(candidate) <= AS_QUICK * quickest), key=preference)


@dataclass(frozen=True)
class Memory:
    """The fullest GPU's peak, line by line, in bytes: those of tensors, then the allocator's, CUDA's and NCCL's own.

    Args:
        phase: what ran then: a phase of a dry run, or the moment of a fine-tune that takes most.
        building_bytes: the most while the model is built whole on the GPU before the engine cuts it (and CUDA's
            context); None for an engine that leaves parameters whole. :data:`BUILT_SHARDED` says how to go without.
        stage: the pipeline stage that the GPU is in.
    """

    lines: dict[str, float]
    phase: str = ""
    building_bytes: float | None = None
    stage: int = 0

    @property
    def peak_bytes(self) -> float:
        return sum(self.lines.values())

    @property
    def tensors(self) -> float:
        """Bytes of tensors alone."""
        return sum(nbytes for name, nbytes in self.lines.items() if name not in BESIDE_TENSORS)


#: How to build a model that does not fit a GPU whole, by engine.
BUILT_SHARDED = {
    "zero-3": "build it within deepspeed.zero.Init, which cuts each parameter as it is made (Transformers does where "
    "TrainingArguments with stage 3 stand before from_pretrained)",
    "fsdp2": "build it on the meta device, then fully_shard, to_empty, and load by rank",
}


@dataclass(frozen=True)
class PredictedStep:
    """A step of the rank that the others wait for.

    Args:
        parts: seconds by :data:`pardemo.planner.layouts.micro_batch.PARTS`.
        model_flops: operations of all ranks that the model needs, nothing recomputed. peak_flops: of a GPU.
        tokens: of a step. stages: layers of each. sent_bytes: of a rank, where that is reckoned.
    """

    parts: dict[str, float]
    model_flops: float
    peak_flops: float
    tokens: int
    gpus: int
    stages: tuple[float, ...]
    sent_bytes: float | None = None

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """The largest part."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def mfu(self) -> float:
        """The model's operations over what the GPUs could have done (Chowdhery et al. 2022, appendix B)."""
        return self.model_flops / self.seconds / self.gpus / self.peak_flops
