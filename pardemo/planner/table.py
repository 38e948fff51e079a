"""What a plan is: engine × offload × checkpointing × micro-batch, what fits, how long it takes, which to choose.

:mod:`pardemo.planner.analytic` fills it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pardemo.planner.estimate import RESERVE, Estimate
from pardemo.planner.hardware import Gpu
from pardemo.planner.job import RankJob, check_tensor_parallel
from pardemo.planner.layouts.price.predicted import PredictedStep

ENGINES = ("zero-0", "zero-1", "zero-2", "zero-3", "fsdp2")
MOST_RANKS = 16_384  # data-parallel: no published run has had more GPUs
NEAR = 1.01  # rows that take no longer than this many times the fastest are as fast: the model is not that exact


@dataclass(frozen=True)
class Hardware:
    """``gpus`` in all on ``hosts``; ``between`` is a host's bytes/s to the others; ``price`` per GPU and hour."""

    gpu: Gpu
    gpus: int
    hosts: int = 1
    between: float = 100e9 / 8
    price: float | None = None

    def __post_init__(self):
        if self.gpus < 1 or self.hosts < 1:
            raise ValueError(f"--gpus and --hosts must be at least 1, not {self.gpus} and {self.hosts}")
        if self.gpus % self.hosts:
            raise ValueError(f"{self.gpus} GPUs do not divide over {self.hosts} hosts")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise ValueError(f"--price must be 0 or more, not {self.price}")

    @property
    def room(self) -> float:
        return self.gpu.memory_bytes * (1 - RESERVE)


@dataclass(frozen=True)
class Request:
    """What is asked: the job's model and lengths, how many samples a step and in all, how the GPUs are divided.

    ``rows``, ``epochs``: of the data set, and how often ``steps`` goes through it; 0 where that is not known.
    """

    job: RankJob
    cluster: Hardware
    samples_per_step: int
    steps: int
    tp: int = 1
    pp: int = 1
    engines: Sequence[str] = ENGINES
    checkpointing: Sequence[bool] = (True, False)
    offloads: Sequence[str] = ("none", "optimizer", "optimizer+parameters")
    batches: Sequence[int] = ()
    rows: int = 0
    epochs: float = 0.0

    def __post_init__(self):
        for name in ("tp", "pp", "samples_per_step", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.cluster.gpus % (self.tp * self.pp):
            raise ValueError(f"{self.cluster.gpus} GPUs do not divide by tp {self.tp} × pp {self.pp}")
        check_tensor_parallel(self.job.config, self.tp)
        if self.job.config.num_hidden_layers % self.pp:
            raise ValueError(f"{self.job.config.num_hidden_layers} layers do not divide by --pp {self.pp}")
        if self.samples_per_step % self.dp:
            raise ValueError(f"{self.samples_per_step} samples a step do not divide over {self.dp} data-parallel ranks")
        if self.dp == 1 and "zero-0" not in self.engines:
            raise ValueError(f"{title(self.engines[0])} shards over data-parallel ranks, and there is one")
        if self.dp > MOST_RANKS:
            raise ValueError(f"{self.dp:,} data-parallel ranks; at most {MOST_RANKS:,} are planned for")
        for batch in self.batches:
            if self.share % batch:
                raise ValueError(f"a micro-batch of {batch} does not divide a rank's {self.share} samples of a step")

    @property
    def dp(self) -> int:
        return self.cluster.gpus // (self.tp * self.pp)

    @property
    def share(self) -> int:
        """A rank's samples of a step."""
        return self.samples_per_step // self.dp

    @property
    def micro_batches(self) -> list[int]:
        """Powers of two that divide a rank's samples of a step."""
        return list(self.batches) or [2**n for n in range(self.share.bit_length()) if self.share % 2**n == 0]


@dataclass(frozen=True)
class PlanRow:
    """One way to run the job; ``engine`` as in :class:`~pardemo.planner.job.RankJob`."""

    engine: str
    offload: str
    checkpointing: bool
    batch: int
    accumulation: int
    memory: Estimate
    time: PredictedStep
    fits: bool
    tokens_per_s: float  # of each GPU
    hours: float
    money: float | None

    @property
    def peak_bytes(self) -> float:
        return self.memory.peak_bytes

    @property
    def stage(self) -> int | None:
        """DeepSpeed's ZeRO stage."""
        return None if self.engine == "fsdp2" else int(self.engine[-1])


@dataclass
class Plan:
    """``rows`` from the recommended one on: those that fit, the fastest first, then the others."""

    request: Request
    rows: list[PlanRow]

    def __post_init__(self):
        self.rows = sorted(self.rows, key=lambda row: (row is not self.best, not row.fits, row.hours, _modesty(row)))

    @cached_property
    def best(self) -> PlanRow | None:
        """The fastest that fits; of rows within 1 % the one that offloads and shards least, then takes least memory.

        FSDP2 is there to compare: ``pardemo finetune`` runs DeepSpeed, so that it is chosen only where nothing else is
        asked for.
        """
        fitting = self.eligible
        quickest = min((row.hours for row in fitting), default=0.0)
        return min((row for row in fitting if row.hours <= NEAR * quickest), key=_modesty, default=None)

    @property
    def eligible(self) -> list[PlanRow]:
        """Rows that fit and may be recommended."""
        fitting = [row for row in self.rows if row.fits]
        return [row for row in fitting if row.engine != "fsdp2"] or fitting


def _modesty(row: PlanRow) -> tuple:
    """What is preferred of rows that are as fast: no offload, a low stage, little memory."""
    return row.offload != "none", row.engine, row.peak_bytes


#: What an engine may leave to the host; FSDP2's own offload is not planned.
OFFLOADED = {
    "zero-0": ("none",),
    "zero-1": ("none", "optimizer"),
    "zero-2": ("none", "optimizer"),
    "zero-3": ("none", "optimizer", "optimizer+parameters"),
    "fsdp2": ("none",),
}


def title(engine: str) -> str:
    """``zero-2`` as people write it."""
    return engine.upper().replace("ZERO-", "ZeRO ")


def jobs(request: Request) -> dict[tuple[str, bool], RankJob]:
    """The job of each engine and way of checkpointing.

    Two micro-batches stand for any more: gradients are kept from the second on.
    """
    accumulation = min(2, max(1, request.samples_per_step // (request.dp * min(request.micro_batches))))
    return {
        (engine, again): request.job.but(
            engine=engine, ranks=request.dp, checkpointing=again, accumulation=accumulation
        )
        for engine in request.engines
        if engine == "zero-0" or request.dp > 1
        for again in request.checkpointing
    }


def cut(request: Request, batch: int, offload: str) -> tuple[str, int, int, int, int]:
    """How a row's dry run is cut over GPUs: ``offload`` to ``accumulation`` of :meth:`Curve.estimate`."""
    accumulation = request.share // batch
    return offload, request.tp, request.pp, min(request.pp, accumulation), accumulation
