"""Lists rates that papers print of whole trainings; no constant of the planner was fitted to them.

Narayanan et al. 2021 (arXiv 2104.04473), Table 2: GPT with 175 and 530 billion parameters on A100-80GB, hosts of eight
with eight adapters of 200 Gbit/s; by pipeline, tensor and data parallelism together ("PTD-P"), and by DeepSpeed's
ZeRO-3 alone. Everything is recomputed, attention is not fused (5.1).

Meta 2024, The Llama 3 Herd of Models (arXiv 2407.21783, version 3), Table 4: Llama 3 405B on H100, eight adapters of
400 Gbit/s a host. How many chunks a stage has is not printed, but its first chunk has only the embedding and its last
only the output projection and the loss (3.3.2): a chunk is one layer, and 126 layers with these two ends are 16 · 8
chunks. Its own program gathers keys and values (3.3.2) and has no queue of Megatron-FSDP's.

"""

from dataclasses import dataclass

from pardemo.planner import hardware
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.configurations import shape_of_config
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.programs import MEGATRON_2022, OTHER_PROGRAMS
from pardemo.planner.layouts.shape import Shape, gpt
from pardemo.planner.layouts.step import predict_step


@dataclass(frozen=True)
class PublishedTraining:
    """A training as a paper has it: ``tflops`` of a GPU, and the operations of a step that the paper counts for it."""

    job: Job
    layout: Layout
    tflops: float
    flops: float

    @property
    def seconds(self) -> float:
        """Returns the seconds of a step."""
        return self.flops / self.layout.gpus / self.tflops / 1e12

    @property
    def predicted_tflops(self) -> float:
        """Returns the planned rate, by the paper's count of operations."""
        return self.flops / self.layout.gpus / predict_step(self.job, self.layout).seconds / 1e12


_GPT = {
    "175B": gpt(96, 12288, 96, 51200, 2048, "GPT 175B"),
    "530B": gpt(105, 20480, 128, 51200, 2048, "GPT 530B"),
}
#: Table 2: model, stages, samples of a step, GPUs, samples of a micro-batch, TFLOP/s of a GPU.
_TABLE_2 = (
    ("175B", 1, 1536, 384, 4, 144), ("175B", 1, 1536, 768, 2, 88), ("175B", 1, 1536, 1536, 1, 44),
    ("530B", 1, 2560, 640, 4, 138), ("530B", 1, 2240, 1120, 2, 98), ("530B", 1, 2240, 2240, 1, 48),
    ("175B", 12, 1536, 384, 1, 153), ("175B", 12, 1536, 768, 1, 149), ("175B", 12, 1536, 1536, 1, 141),
    ("530B", 35, 2240, 560, 1, 171), ("530B", 35, 2240, 1120, 1, 167), ("530B", 35, 2240, 2240, 1, 159),
)  # fmt: skip
#: Table 4: GPUs, context-parallel ranks, copies, tokens of a sample, samples of a copy and step, TFLOP/s of a GPU. The
#: first version of the paper prints 4 copies in the last row, which do not make 16,384 GPUs.
_TABLE_4 = (
    (8192, 1, 64, 8192, 32, 430), (16384, 1, 128, 8192, 16, 400), (16384, 16, 8, 131072, 16, 380),
)  # fmt: skip


def narayanan(pipelines: bool, adapters: int = 8) -> list[PublishedTraining]:
    """Returns the rows with a pipeline, or of ZeRO-3; with fewer ``adapters``, as if others were idle."""
    trainings = []
    for name, pp, batch, gpus, micro, tflops in _TABLE_2:
        if (pp > 1) != pipelines:
            continue
        shape, tp = _GPT[name], 8 if pipelines else 1
        dp = gpus // pp // tp
        layout = Layout(
            tp=tp, pp=pp, dp=dp, micro_batch=micro, accumulation=batch // dp // micro, recompute="full",
            sharding="none" if pipelines else "zero3",
        )  # fmt: skip
        machine = Machine(hardware.gpu("A100-80GB"), gpus, 8, adapters * 200e9 / 8)
        # DeepSpeed's gradients are in the matrix multiplications' precision
        program = MEGATRON_2022 if pipelines else MEGATRON_2022.but(gradient_bytes=2)
        job = Job(shape, machine, program, 2048, fused=False)
        trainings.append(PublishedTraining(job, layout, tflops, batch * _as_counted(shape, 2048)))
    return trainings


def _as_counted(shape: Shape, s: int) -> float:
    """Operations of a sample with everything recomputed: 96·s·l·h²·(1 + s/6h + V/16lh), equation 3."""
    h, layers = shape.hidden, shape.layers
    return 96 * s * layers * h * h * (1 + s / (6 * h) + shape.vocabulary / (16 * layers * h))


def llama_3() -> list[PublishedTraining]:
    """Llama 3 405B in its three stages of training; operations counted as in PaLM, attention's all."""
    shape, program = shape_of_config(configurations.find_configuration("llama3.1-405b")), OTHER_PROGRAMS["meta-2024"]
    trainings = []
    for gpus, cp, dp, sequence, samples, tflops in _TABLE_4:
        layout = Layout(
            tp=8, cp=cp, pp=16, dp=dp, sharding="zero1", sequence_parallel=True, accumulation=samples,
            chunks=(shape.layers + 2) // 16,
        )  # fmt: skip
        job = Job(shape, Machine(hardware.gpu("H100"), gpus, 8, 8 * 400e9 / 8), program, sequence)
        flops = layout.batch * sequence * shape.flops(sequence, causal=False)
        trainings.append(PublishedTraining(job, layout, tflops, flops))
    return trainings
