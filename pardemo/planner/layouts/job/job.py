"""What is trained, by which program, on which machine."""

from dataclasses import dataclass

from pardemo.planner import hardware
from pardemo.planner.layouts.job.machines import Machine
from pardemo.planner.layouts.job.stacks import Stack
from pardemo.planner.layouts.model.shape import Shape
from pardemo.planner.layouts.model.tuning import FULL, Tuning

DISPATCHERS = ("alltoall", "fused")


@dataclass(frozen=True)
class Job:
    """What is trained, by which program, on which machine.

    Args:
        sequence: tokens of a sample. fused: FlashAttention; else attention's scores go through memory.
        precision: of its products: bf16, fp8 (a scale for each tensor or block), mxfp8, nvfp4; the head's, the router's
            and attention are bf16's.
        graphs: whether CUDA graphs start its kernels, but those of experts; None: where there are experts, as the
            program usually does.
        dispatch: how tokens get to their experts: ``alltoall`` (sorted, then NCCL's) or ``fused`` (a kernel that sorts
            and sends, as DeepEP's); "": as the program usually does.
        dropless: whether each token gets to all the experts that it chose, so that the host waits until it knows how
            many go where; else experts have room for the average, and what is above it is dropped.
        overlap: whether another micro-batch's computation runs beside the exchange of tokens.
        pace: what every part of a step is multiplied by, as runs on the very machine have shown (``measured``).
        imbalance: tokens of the rank whose experts are chosen most, over the average.
        tuning: what is trained: with LoRA the model's own weights are frozen, so that a backward pass makes one product
            for each of them, and not two.
    """

    shape: Shape
    machine: Machine
    stack: Stack
    sequence: int = 4096
    fused: bool = True
    precision: str = "bf16"
    graphs: bool | None = None
    dispatch: str = ""
    imbalance: float = 1.0
    dropless: bool = True
    overlap: bool = False
    pace: float = 1.0
    measured: bool = False
    tuning: Tuning = FULL

    def __post_init__(self):
        if self.sequence < 1:
            raise ValueError(f"a sequence must have at least 1 token, not {self.sequence!r}")
        if self.dispatch not in ("", *DISPATCHERS):
            raise ValueError(f"dispatch must be one of {', '.join(DISPATCHERS)}, not {self.dispatch!r}")
        if not self.imbalance >= 1:
            raise ValueError(f"imbalance is the fullest over the average, at least 1, not {self.imbalance!r}")
        hardware.peak(self.machine.gpu, self.precision)
        if self.frozen:
            self.stack.check_lora()
        if self.frozen and self.shape.pattern and not self.stack.engine:
            raise ValueError(f"{self.shape.name}: LoRA is not planned for models with state spaces")
        if self.stack.engine and self.shape.pattern:
            raise ValueError(
                f"{self.shape.name}: fine-tunes of models with state spaces are not planned; --search and --explain "
                "plan their training"
            )

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights are not trained."""
        return self.tuning.lora

    @property
    def small(self) -> float:
        """Rows, columns and depth that a product loses: as measured of its machine, else as the program's runs say."""
        return self.stack.small if self.machine.gpu.small is None else self.machine.gpu.small

    @property
    def peak_flops(self) -> float:
        """Operations/s of the data sheet, in the products' precision."""
        return hardware.peak(self.machine.gpu, self.precision)

    @property
    def rate(self) -> float:
        """How many times as quick as bf16's its products are: the data sheet's ratio, by what the program reaches."""
        if self.precision == "bf16":
            return 1.0
        kept = self.stack.fp4 if self.precision == "nvfp4" else self.stack.fp8
        return kept * self.peak_flops / self.machine.gpu.flops

    @property
    def casts(self) -> float:
        """Bytes of memory traffic that a number takes on its way into 8 or 4 bits, as rows and as columns."""
        return 0.0 if self.precision == "bf16" else self.stack.casts

    @property
    def started_by_graphs(self) -> bool:
        usual = self.stack.graphs and self.shape.experts is not None
        return usual if self.graphs is None else self.graphs

    @property
    def dispatcher(self) -> str:
        return self.dispatch or self.stack.dispatch
