"""How long a step takes: operations over a share of the GPU's peak, bytes over its bandwidth, bytes on the wire.

A model of a few lines, whose error on published and measured runs ``pardemo plan --validate`` prints. Where its
constants come from, and what it leaves out: docs/planner.md.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pardemo.formulas.tensor_parallel import block, phi
from pardemo.planner.job import RankJob
from pardemo.planner.layouts import engine_rules
from pardemo.planner.layouts.engine_rules import TimedStep

if TYPE_CHECKING:
    from pardemo.planner.footprint import Footprint

#: Shares of the datasheet's matrix rate that large products reach, by phase.
SHARES = {"forward": 0.65, "recomputation": 0.65, "backward": 0.6}
MEMORY_SHARE = 0.8  # of the datasheet's bandwidth, for operations element by element
#: A micro-batch's products take as long as if it had so many tokens more: weights are read whatever their number, and
#: the last wave of tiles is not full. Between what Megatron-DeepSpeed on A100s (vTrain's measurements, 512), LLaMA-7B
#: on A800s (300 to 400) and nanotron on H100s (200) lose with small micro-batches.
SMALL_TOKENS = 400
#: Of one operation from Python: 24 layers of width 1,024, some 3,200 operations, take 79 ms on an A100 whether a
#: micro-batch has one sample or nearly two (vTrain's measurements).
LAUNCH_S = 24e-6
LINK_SHARE = 0.8  # of a link's rate, for large messages


@dataclass(frozen=True)
class Rates:
    """What a rank computes and talks with. ``shares`` of ``flops`` by phase; bytes or operations per second.

    ``within`` is a GPU's link to the others of its host, one way; ``between`` are a host's adapters together, one way.
    """

    flops: float
    memory_bytes_per_s: float
    within: float
    between: float
    host_gpus: int = 8
    shares: tuple[tuple[str, float], ...] = tuple(SHARES.items())
    memory_share: float = MEMORY_SHARE
    small_tokens: float = SMALL_TOKENS
    launch_s: float = LAUNCH_S
    link_share: float = LINK_SHARE

    def ring(self, ranks: int, beside: int = 1) -> float:
        """Bytes/s at which each rank of a ring sends to the next, ``beside`` such rings running side by side.

        Ranks follow one another host by host, so that a ring leaves each host once: it has the host's adapters for
        itself (nccl lays as many channels as there are adapters), or shares them with the rings of its tensor-parallel
        neighbours, of which a host has no more than GPUs.
        """
        if ranks * beside <= self.host_gpus:
            return self.within * self.link_share
        return min(self.within, self.between / min(beside, self.host_gpus)) * self.link_share


@dataclass(frozen=True)
class StepTime(TimedStep):
    """Seconds of one optimizer step, part by part; communication is what is not hidden."""

    products: float
    memory: float
    launching: float
    tensor_parallel: float
    data_parallel: float
    bubble: float
    offload: float
    sent_bytes: float

    @property
    def parts(self) -> dict[str, float]:  # type: ignore[override]
        return {
            "matrix multiplications": self.products,
            "memory bandwidth": self.memory,
            "launching kernels": self.launching,
            "tensor-parallel traffic": self.tensor_parallel,
            "data-parallel traffic": self.data_parallel,
            "the pipeline's bubble": self.bubble,
            "offload": self.offload,
        }


def step_time(
    footprint: "Footprint",
    batch: int,
    accumulation: int,
    dp: int,
    rates: Rates,
    tp: int = 1,
    pp: int = 1,
    offload: str = "none",
) -> StepTime:
    """A step of ``accumulation`` micro-batches of ``batch`` samples on each of ``dp`` copies of the model.

    ``footprint`` is a dry run of micro-batches of any size: work is proportional to their samples. It may have fewer
    ranks than ``dp``, if several: what they send is scaled.

    Raises:
        ValueError: the dry run was of one rank, so that nothing is known of what several send.
    """
    from pardemo.planner.footprint import is_cut  # which loads torch

    job, cut = footprint.job, tp * pp
    if job.ranks == 1 < dp:
        raise ValueError(f"a dry run of one rank does not tell what {dp} send")
    samples = batch / job.batch / cut
    shares = dict(rates.shares)
    full = sum(samples * flops / rates.flops / shares.get(name, 0.6) for name, flops in footprint.flops.items())
    products = full * (1 + rates.small_tokens / (batch * job.sequence))
    bytes_per_s = rates.memory_bytes_per_s * rates.memory_share
    moved = sum(nbytes * (1 if is_cut(module) else tp) for module, nbytes in footprint.traffic.items())  # of tp ranks
    memory = samples * moved / bytes_per_s
    launched = sum(count for phase, count in footprint.kernels.items() if phase != "step") / pp * rates.launch_s
    launching = max(0.0, launched - products - memory)  # beside what the GPU has to do
    config = job.config
    activation = phi(batch, job.sequence, config.hidden_size, tp, 2) * config.num_hidden_layers / pp
    tensor_bytes = block("all" if job.checkpointing else "none") * activation if tp > 1 else 0.0
    tensor_parallel = tensor_bytes / rates.ring(tp)
    busy = products + memory + launching
    each, once = data_parallel_bytes(footprint, dp, cut)
    rounds = engine_rules.reductions(job.engine, accumulation)
    shown = engine_rules.exposed(job.engine, each / rates.ring(dp, tp), busy, job.zero.get("overlap_comm"))
    update = 0.0 if offload != "none" else footprint.step_traffic / cut / bytes_per_s
    return StepTime(
        products=accumulation * products,
        memory=accumulation * memory + update,
        launching=accumulation * launching,
        tensor_parallel=accumulation * tensor_parallel,
        data_parallel=rounds * shown + once / rates.ring(dp, tp),
        bubble=(busy + tensor_parallel) * (pp - 1),
        offload=offload_seconds(footprint, offload, accumulation, dp, cut, rates),
        sent_bytes=rounds * each + once + accumulation * tensor_bytes,
    )


def data_parallel_bytes(footprint: "Footprint", dp: int, model_parallel: int = 1) -> tuple[float, float]:
    """Bytes that a rank sends each time gradients are reduced, and once a step: counted in the engine's dry run.

    DeepSpeed's default stages 1 and 2 all-reduce the gradients and gather the parameters, 3Ψ instead of the paper's
    2Ψ; its stage 3 gathers a layer as often as it has let go of it; FSDP2 gathers the head and the embedding once.
    """
    ranks = footprint.job.ranks
    more = 1.0 if ranks == dp else (dp - 1) / dp * ranks / (ranks - 1)  # of a ring's (N − 1)/N
    each = sum(nbytes for phase, nbytes in footprint.sent.items() if phase != "step")
    return more * each / model_parallel, more * footprint.sent.get("step", 0.0) / model_parallel


def overlaps(job: RankJob) -> bool:
    """Whether the job's engine sends while it computes, with the job's own ``overlap_comm``."""
    return engine_rules.overlaps(job.engine, job.zero.get("overlap_comm"))


def offload_seconds(
    footprint: "Footprint", offload: str, accumulation: int, dp: int, model_parallel: int, rates: Rates
) -> float:
    """What DeepSpeed's offload adds to a step of ``dp`` × ``model_parallel`` GPUs: :mod:`engine_rules`'s, of a host."""
    job, gpus = footprint.job, dp * model_parallel
    on_host = min(rates.host_gpus, gpus) / gpus  # of the job's ranks
    return engine_rules.offload_seconds(
        offload, footprint.trained_params * on_host, footprint.params * on_host,
        engine_rules.reductions(job.engine, accumulation), accumulation, job.checkpointing,
    )  # fmt: skip
