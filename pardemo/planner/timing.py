"""How long a step takes: operations over a share of the GPU's peak, bytes over its bandwidth, bytes on the wire.

A model of a few lines, whose error on published and measured runs ``pardemo plan --validate`` prints.
"""

from dataclasses import dataclass

from pardemo.formulas.communication import ring_half, zero_step
from pardemo.formulas.tensor_parallel import block, phi
from pardemo.planner.footprint import Footprint, is_cut

#: Shares of the datasheet's matrix rate that large products reach, by phase.
SHARES = {"forward": 0.65, "recomputation": 0.65, "backward": 0.6}
MEMORY_SHARE = 0.8  # of the datasheet's bandwidth, for operations element by element
LINK_SHARE = 0.8  # of a link's rate, for large messages
HIDDEN = 0.8  # of the communication behind the backward pass at most, where it may overlap
HOST_BYTES_PER_S = 20e9  # of a GPU to the host's memory: PCIe 4.0 x16 gives 25 of its 32 GB/s
HOST_ADAM_PARAMS_PER_S = 1.0e9  # DeepSpeed's CPU Adam, of a host's cores for each of its GPUs together


@dataclass(frozen=True)
class Rates:
    """What a rank computes and talks with. ``shares`` of ``flops`` by phase; links ``within`` and ``between`` hosts.

    All in bytes or operations per second.
    """

    flops: float
    memory_bytes_per_s: float
    within: float
    between: float
    host_gpus: int = 8
    shares: tuple[tuple[str, float], ...] = tuple(SHARES.items())
    memory_share: float = MEMORY_SHARE

    def link(self, ranks: int) -> float:
        """Bytes/s of one rank's part of a ring over ``ranks``: inside a host, or through its adapters."""
        inside = self.within if ranks <= self.host_gpus else min(self.within, self.between)
        return inside * LINK_SHARE


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, part by part; communication is what is not hidden."""

    products: float
    memory: float
    tensor_parallel: float
    data_parallel: float
    bubble: float
    offload: float
    sent_bytes: float

    @property
    def seconds(self) -> float:
        return (
            self.products + self.memory + self.tensor_parallel + self.data_parallel + self.bubble + self.offload
        )  # fmt: skip

    @property
    def limit(self) -> str:
        """The largest part."""
        parts = {
            "matrix products": self.products,
            "memory bandwidth": self.memory,
            "tensor-parallel traffic": self.tensor_parallel,
            "data-parallel traffic": self.data_parallel,
            "the pipeline's bubble": self.bubble,
            "offload": self.offload,
        }
        return max(parts, key=parts.get)


def step_time(
    found: Footprint,
    batch: int,
    accumulation: int,
    dp: int,
    rates: Rates,
    tp: int = 1,
    pp: int = 1,
    offload: str = "none",
) -> StepTime:
    """A step of ``accumulation`` micro-batches of ``batch`` samples on each of ``dp`` copies of the model.

    ``found`` is the dry run of any micro-batch: work is proportional to its samples.
    """
    job, times = found.job, batch * accumulation / found.job.batch / (tp * pp)
    shares = dict(rates.shares)
    phases = {name: times * flops / rates.flops / shares.get(name, 0.6) for name, flops in found.flops.items()}
    products = sum(phases.values())
    moved = sum(nbytes * (1 if is_cut(module) else tp) for module, nbytes in found.traffic.items())  # of tp ranks
    memory = times * moved / rates.memory_bytes_per_s / rates.memory_share
    stage = 3 if job.engine == "fsdp2" else job.stage or 0
    sent = data_parallel_bytes(found, stage, accumulation, dp, tp * pp)
    exchange = sent / rates.link(dp * tp)
    hidden = HIDDEN * (products + memory) * (2 / 3 if stage < 3 else 1)
    config = job.config
    activation = phi(batch, job.sequence, config.hidden_size, tp, 2) * accumulation * config.num_hidden_layers / pp
    per_layer = block("all" if job.checkpointing else "none")
    inside = per_layer * activation / (rates.within * LINK_SHARE) if tp > 1 else 0.0
    updated = found.trained_params / (tp * pp) / dp
    host = {"none": 0.0}.get(offload, updated * 4 / HOST_BYTES_PER_S + updated / HOST_ADAM_PARAMS_PER_S)
    if offload == "optimizer+parameters":
        host += 3 * accumulation * 2 * found.params / (tp * pp) / dp / HOST_BYTES_PER_S
    return StepTime(
        products=products,
        memory=memory,
        tensor_parallel=inside,
        data_parallel=max(exchange - hidden, (1 - HIDDEN) * exchange) if dp > 1 else 0.0,
        bubble=(products + memory + inside) * (pp - 1) / accumulation,
        offload=host,
        sent_bytes=sent + per_layer * activation * (tp > 1),
    )


def data_parallel_bytes(found: Footprint, stage: int, accumulation: int, dp: int, model_parallel: int = 1) -> float:
    """Bytes that a rank sends for ZeRO in a step: the trained gradients, and stage 3's gathering of everything."""
    trained = round(found.trained_params / model_parallel)
    if stage < 3:
        return zero_step(trained, dp, stage, accumulation)
    everything = found.params / model_parallel
    return accumulation * ring_half(2 * (2 * everything + trained), dp).sent


def decode_seconds(
    params: int, batches: int, tokens: int, rates: Rates, launches: int = 0, launch_s: float = 0.0
) -> float:
    """Generation of ``tokens`` for each of ``batches``: every decode step reads all weights (bf16) once.

    A step lasts at least as long as launching its kernels: ``launches`` of ``launch_s`` each.
    """
    return batches * tokens * max(2 * params / rates.memory_bytes_per_s / rates.memory_share, launches * launch_s)
