"""Describes a training job: what is trained, by which program, on which machine."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pardemo.planner import hardware
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.programs import OTHER_PROGRAMS, Program
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.tuning import FULL, Tuning

#: Sorted, then NCCL's all-to-all; or a kernel that sorts and sends, as DeepEP's.
DISPATCHERS = ("alltoall", "fused")
#: Of these only a training of all parameters is planned.
HYBRID = "models with layers that have state spaces, linear or compressed attention, or other heads"


@dataclass(frozen=True)
class Job:
    """A model to train, the program that trains it, and the machine."""

    shape: Shape
    machine: Machine
    program: Program
    sequence: int = 4096  # tokens of a sample
    fused: bool = True  # whether attention is (FlashAttention); else its scores go through memory
    precision: str = "bf16"  # or fp8 (a scale for each tensor or block), mxfp8, nvfp4; head, router, attention: bf16
    graphs: bool | None = None  # whether CUDA graphs start all kernels but experts'; None: as the program usually does
    dispatch: str = ""  # how tokens get to experts, of :data:`DISPATCHERS`; "": as the program usually does
    imbalance: float = 1.0  # tokens of the rank whose experts are chosen most, over the average
    dropless: bool = True  # whether no expert drops tokens above the average, so that the host waits for their counts
    overlap: bool | None = None  # of the exchange of tokens by another micro-batch; None: as the program usually does
    correction: float = 1.0  # of each part's seconds, as runs on the very machine have shown (``measured``)
    measured: bool = False
    tuning: Tuning = FULL  # with LoRA a frozen weight needs one matrix multiplication in the backward pass, not two

    def __post_init__(self):
        if self.sequence < 1:
            raise ValueError(f"a sequence must have at least 1 token, not {self.sequence!r}")
        if self.dispatch not in ("", *DISPATCHERS):
            raise ValueError(f"dispatch must be one of {', '.join(DISPATCHERS)}, not {self.dispatch!r}")
        if not self.imbalance >= 1:
            raise ValueError(f"imbalance is the fullest over the average, at least 1, not {self.imbalance!r}")
        hardware.peak_flops(self.machine.gpu, self.precision)
        if self.frozen:
            self.program.check_lora()
        if self.frozen and self.shape.hybrid and not self.program.engine:
            raise ValueError(f"{self.shape.name}: LoRA is not planned for {HYBRID}")
        if self.program.engine:
            check_not_hybrid(self.shape)

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights are not trained."""
        return self.tuning.lora

    @property
    def tile_loss(self) -> float:
        """Rows, columns and depth that a matrix multiplication loses: as measured, else as the program's runs say."""
        return self.program.tile_loss if self.machine.gpu.small is None else self.machine.gpu.small

    @property
    def peak_flops(self) -> float:
        """Operations/s of the data sheet, in the job's precision."""
        return hardware.peak_flops(self.machine.gpu, self.precision)

    @property
    def matmul_speedup(self) -> float:
        """Speed of matrix multiplications over bf16's: the data sheet's ratio, times what the program reaches of it."""
        if self.precision == "bf16":
            return 1.0
        kept = self.program.fp4_efficiency if self.precision == "nvfp4" else self.program.fp8_efficiency
        return kept * self.peak_flops / self.machine.gpu.flops

    @property
    def cast_bytes(self) -> float:
        """Bytes of memory traffic that a number takes on its way into 8 or 4 bits, as rows and as columns."""
        return 0.0 if self.precision == "bf16" else self.program.cast_bytes

    @property
    def started_by_graphs(self) -> bool:
        usual = self.program.cuda_graphs and self.shape.experts is not None
        return usual if self.graphs is None else self.graphs

    @property
    def overlapped(self) -> bool:
        return self.program.batch_overlap if self.overlap is None else self.overlap

    @property
    def dispatcher(self) -> str:
        return self.dispatch or self.program.dispatch

    @cached_property
    def cache(self) -> dict[tuple, Any]:
        """Computed values of this job by the settings of a layout that they depend on: a search asks for each often."""
        return {}


def check_not_hybrid(shape: Shape) -> None:
    """Refuses to plan a fine-tune of a hybrid model.

    Raises:
        ValueError: the model is one.
    """
    if shape.hybrid:
        raise ValueError(
            f"{shape.name}: fine-tunes of {HYBRID} are not planned; --search and --explain plan their training"
        )


TRANSFORMERS, FUSED_NORMS = OTHER_PROGRAMS["transformers"], OTHER_PROGRAMS["transformers, fused norms"]
BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default of ``reduce_bucket_size`` and ``allgather_bucket_size``
#: Name of an engine -> the program's ``engine``, and what its ranks share. ``plain``: 16-bit weights and states of
#: torch's optimizer, one process or DDP; DeepSpeed's stages; FSDP2's fp32 shards of what is trained.
ENGINES = {
    "plain": ("torch", "none"), "zero-0": ("deepspeed", "none"), "zero-1": ("deepspeed", "zero1"),
    "zero-2": ("deepspeed", "zero2"), "zero-3": ("deepspeed", "zero3"), "fsdp2": ("fsdp2", "zero3"),
}  # fmt: skip
_USUAL = frozenset({"lora", "tp", "pp"})
_FULLY_SHARDED = _USUAL | {"zero3", "zero3 in a pipeline", "states on the host"}
_CAN = {
    "torch": _USUAL, "fsdp2": _FULLY_SHARDED, "deepspeed": _FULLY_SHARDED | {"zero1", "zero2", "zero2 in a pipeline"},
}  # fmt: skip


def fine_tune(
    shape: Shape,
    machine: Machine,
    tuning: Tuning = FULL,
    engine: str = "plain",
    ranks: int = 1,
    batch: int = 1,
    sequence: int = 1024,
    fused: bool = True,
    checkpointing: bool = True,
    accumulation: int = 1,
    host_states: str = "none",
    tp: int = 1,
    pp: int = 1,
    bucket: float = BUCKET_ELEMENTS,
    overlaps: bool | None = None,
    program: Program = TRANSFORMERS,
) -> tuple[Job, Layout]:
    """Returns a fine-tune's job and how it is laid out.

    Args:
        engine: name of :data:`ENGINES`.
        ranks: data-parallel ranks, which share states.
        batch: samples of a micro-batch.
        sequence: tokens of a sample.
        fused: whether attention is fused; else its scores are kept, in fp32 and in 16 bits.
        checkpointing: whether each layer is recomputed.
        accumulation: micro-batches of a step.
        host_states: states in the host's memory, of :data:`~pardemo.planner.estimate.HOST_STATES`.
        tp, pp: tensor-parallel ranks and pipeline stages that each of the ``ranks`` is made of.
        bucket: elements of DeepSpeed's buckets.
        overlaps: DeepSpeed's ``overlap_comm``.
        program: the constants.

    Raises:
        ValueError: there is no such engine, a size is below 1, or the model has state spaces.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    whose, sharding = ENGINES[engine]
    program = program.but(engine=whose, bucket_elements=bucket, overlap_comm=overlaps, supports=_CAN[whose])
    job = Job(shape, machine, program, sequence, fused, tuning=tuning)
    layout = Layout(
        tp, dp=ranks, pp=pp, sharding=sharding, micro_batch=batch, accumulation=accumulation,
        recompute="full" if checkpointing else "none", host_states=host_states,
    )  # fmt: skip
    return job, layout


def check_fine_tune(job: Job, layout: Layout) -> None:
    """Refuses a fine-tune's layout that its engine does not have.

    Raises:
        ValueError: the layout has what fine-tunes are not planned with; names it.
    """
    lacks = job.program.missing_features(layout)
    if layout.recompute == "selective":
        lacks.append("selective recomputation")
    if lacks or (job.program.engine, layout.sharding) not in ENGINES.values():
        lacking = ", ".join(lacks) or layout.sharding
        raise ValueError(f"fine-tunes by {job.program.engine} are not planned with {lacking}")


def engine_name(job: Job, layout: Layout) -> str:
    """Returns the name of a fine-tune's engine, of :data:`ENGINES`, as plans show it.

    Raises:
        ValueError: as :func:`check_fine_tune`.
    """
    check_fine_tune(job, layout)
    return next(name for name, engine in ENGINES.items() if engine == (job.program.engine, layout.sharding))
