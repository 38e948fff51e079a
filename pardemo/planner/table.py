"""Plans a fine-tune: every engine × offload × checkpointing × micro-batch, whether it fits, its time, the best of them.

Times and memory are those of :mod:`pardemo.planner.layouts`, in a second and without torch; ``pardemo plan --dry-run``
runs the engine of the recommended row beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pardemo.planner.estimate import FULLEST, RESERVE, Estimate, PredictedStep, choose
from pardemo.planner.hardware import Gpu
from pardemo.planner.job import RankJob, check_tensor_parallel
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.fine_tune_step import stage_of
from pardemo.planner.layouts.job import BUCKET, Job, fine_tune
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import memory
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.step import step
from pardemo.planner.layouts.tuning import Tuning

ENGINES = ("zero-0", "zero-1", "zero-2", "zero-3", "fsdp2")
MOST_RANKS = 16_384  # data-parallel: no published run has had more GPUs


@dataclass(frozen=True)
class Hardware:
    """GPUs to plan for: ``gpus`` in all on ``hosts``; ``between``: a host's bytes/s; ``price``: of a GPU and hour."""

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

    def __str__(self) -> str:
        """Names the GPUs and their source; of several hosts also their size and the rate between them."""
        text = f"{self.gpus} × {self.gpu.name} ({self.gpu.source})"
        if self.hosts == 1:
            return text
        return f"{text} on {self.hosts} hosts of {self.host_gpus}, {8 * self.between / 1e9:.4g} Gbit/s between hosts"

    @property
    def host_gpus(self) -> int:
        """GPUs of a host."""
        return self.gpus // self.hosts

    @property
    def most_bytes(self) -> float:
        """Bytes up to which a job fits a GPU: no run is known that took more."""
        return self.gpu.memory_bytes * FULLEST

    @property
    def room(self) -> float:
        """Bytes of a GPU that a plan fills at most where it can choose."""
        return self.gpu.memory_bytes * (1 - RESERVE)


@dataclass(frozen=True)
class Request:
    """A job to plan: its model and lengths, its samples a step and steps, how its GPUs are divided.

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
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step."""
        return self.time.sent_bytes or 0.0

    @property
    def stage(self) -> int | None:
        """DeepSpeed's ZeRO stage."""
        return stage_of(self.engine)


@dataclass
class Plan:
    """All rows of a request, the recommended one first, then those that fit from the fastest on, then the others."""

    request: Request
    rows: list[PlanRow]

    def __post_init__(self):
        self.rows = sorted(self.rows, key=lambda row: (row is not self.best, not row.fits, row.hours, _preference(row)))

    @cached_property
    def best(self) -> PlanRow | None:
        """The fastest that leaves room; of rows within 1 % the one that offloads and shards least, then in memory.

        FSDP2 is there to compare: ``pardemo finetune`` runs DeepSpeed, so that it is chosen only where nothing else is
        asked for.
        """
        fitting = self.eligible
        return choose(fitting, lambda row: row.hours, _preference) if fitting else None

    @property
    def eligible(self) -> list[PlanRow]:
        """Rows that may be recommended: of those that fit, those that leave room; all that fit where none does."""
        fitting = [row for row in self.rows if row.fits]
        fitting = [row for row in fitting if row.engine != "fsdp2"] or fitting
        return [row for row in fitting if row.peak_bytes <= self.request.cluster.room] or fitting


def _preference(row: PlanRow) -> tuple:
    """Orders rows that are as fast: no offload first, then a low stage, then little memory."""
    return row.offload != "none", row.engine, row.peak_bytes


#: What an engine may leave to the host; how long FSDP2's own offload takes is not known, so that it has no rows.
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


MOST_EXPONENT = 9  # 512 times the GPUs that hold one copy of the model
TOKENS = 64  # sequences are rounded to multiples of
#: Tokens of a sample from which cutting it between GPUs is worth a word.
LONG = 16_384


def plan(request: Request) -> Plan:
    """Makes the rows of all engines, offloads, micro-batches, with and without checkpointing.

    Raises:
        ValueError: the model is none that is known, or its LoRA goes to modules that are not.
    """
    shape = configurations.of(request.job.config)
    rows = [
        row(request, shape, engine, again, offload, batch)
        for engine in request.engines
        if engine == "zero-0" or request.dp > 1
        for again in request.checkpointing
        for offload in request.offloads
        if offload in OFFLOADED[engine]
        for batch in request.micro_batches
    ]
    return Plan(request, rows)


def machine_of(cluster: Hardware) -> Machine:
    """Converts GPUs to the step model's."""
    share = 1.0 if cluster.gpu.measured else Machine.link_share
    return Machine(cluster.gpu, cluster.gpus, cluster.host_gpus, cluster.between, link_share=share)


def tuning_of(job: RankJob) -> Tuning:
    """Converts what the job trains to the step model's. A model makes logits at all tokens or at labels alone."""
    labels = job.labels if getattr(job.config, "loss_head", "full") == "labels" else 1.0
    more: dict[str, Any] = {
        "base": job.base,
        "optimizer": job.optimizer,
        "labels": labels,
        "fused_loss": job.fused_loss,
    }
    if job.adapter is None:
        return Tuning(**more)
    adapter = job.adapter
    return Tuning(adapter.rank, tuple(adapter.target), adapter.dropout, embeddings=job.embeddings, **more)


def row_job(request: Request, shape: Shape, engine: str, again: bool, offload: str, batch: int) -> tuple[Job, Layout]:
    """Returns the job and the layout of one way to run the request; ``shape`` is its model's."""
    job = request.job.but(engine=engine, ranks=request.dp, batch=batch, checkpointing=again)
    return tuned(job, request.cluster, max(1, request.share // batch), offload, request.tp, request.pp, shape)


def job_of(request: Request, row: PlanRow) -> tuple[Job, Layout]:
    """Returns a row's job and layout."""
    shape = configurations.of(request.job.config)
    return row_job(request, shape, row.engine, row.checkpointing, row.offload, row.batch)


def tuned(
    job: RankJob,
    cluster: Hardware,
    accumulation: int,
    offload: str = "none",
    tp: int = 1,
    pp: int = 1,
    shape: Shape | None = None,
) -> tuple[Job, Layout]:
    """Converts a rank's job in steps of ``accumulation`` micro-batches to the job and layout of the step model.

    Args:
        offload: as DeepSpeed's: ``none``, ``optimizer`` or ``optimizer+parameters``.
        tp, pp: tensor-parallel ranks and pipeline stages of each of the job's ranks. shape: of its model, if known.

    Raises:
        ValueError: the model is none that is known.
    """
    return fine_tune(
        shape or configurations.of(job.config), machine_of(cluster), tuning_of(job), job.engine, job.ranks, job.batch,
        job.sequence, checkpointing=job.checkpointing, accumulation=accumulation, offload=offload, tp=tp, pp=pp,
        bucket=job.zero.get("reduce_bucket_size", BUCKET), overlaps=job.zero.get("overlap_comm"),
    )  # fmt: skip


def step_of(job: RankJob, cluster: Hardware, accumulation: int, offload: str = "none") -> PredictedStep:
    """Predicts seconds and sent bytes of a step of ``accumulation`` micro-batches on ``job.ranks`` GPUs of the cluster.

    Raises:
        ValueError: the model is none that is known, or its LoRA goes to modules that are not.
    """
    return step(*tuned(job, cluster, accumulation, offload))


def row(request: Request, shape: Shape, engine: str, again: bool, offload: str, batch: int) -> PlanRow:
    """Predicts memory, time and price of one row of the table."""
    job, layout = row_job(request, shape, engine, again, offload, batch)
    held, time = memory(job, layout), step(job, layout)
    cluster, hours = request.cluster, request.steps * time.seconds / 3600
    money = None if cluster.price is None else hours * cluster.gpus * cluster.price
    return PlanRow(
        engine, offload, again, batch, layout.accumulation, held, time, held.peak_bytes <= cluster.most_bytes,
        time.tokens_per_s, hours, money,
    )  # fmt: skip


def longest_sequence(request: Request, best: PlanRow) -> int:
    """Finds the most tokens of a sample that fit as the row is run, in steps of 64; at most the model's context."""
    job, layout = job_of(request, best)
    context = getattr(request.job.config, "max_position_embeddings", None) or 1 << 20
    fits = _fits(request, lambda steps: (replace(job, sequence=TOKENS * steps), layout))
    if context < 2 * TOKENS:
        return context if memory(replace(job, sequence=context), layout).peak_bytes <= request.cluster.most_bytes else 0
    return TOKENS * largest(fits, context // TOKENS)


def largest_batch(request: Request, best: PlanRow) -> int:
    """Finds the samples of the largest micro-batch that fits as the row is run."""
    job, layout = job_of(request, best)
    return largest(_fits(request, lambda batch: (job, layout.but(micro_batch=batch))), 4096)


def fewest_gpus(request: Request) -> int | None:
    """Finds the smallest power of two of such GPUs on which micro-batches of one sample fit; None if there is none.

    Stage 3 with checkpointing takes the least without offload.
    """
    unit = request.tp * request.pp
    for exponent in range(MOST_EXPONENT + 1):
        if least_bytes(request, unit << exponent) <= request.cluster.most_bytes:
            return unit << exponent
    return None


def least_bytes(request: Request, gpus: int, engine: str = "zero-3", offload: str = "none") -> float:
    """Predicts the peak of micro-batches of one sample on so many GPUs, under stage 3 with checkpointing."""
    dp = max(1, gpus // (request.tp * request.pp))
    engine = engine if dp > 1 else "zero-0"
    job, layout = row_job(request, configurations.of(request.job.config), engine, True, offload, 1)
    return memory(job, layout.but(dp=dp, accumulation=max(1, request.samples_per_step // dp))).peak_bytes


def smallest_cluster(request: Request) -> str:
    """Says, where nothing fits, which cluster is the smallest that works, or which option keeps this one from it."""
    count, name = fewest_gpus(request), request.cluster.gpu.name
    if count is None:
        most = request.tp * request.pp << MOST_EXPONENT
        more = "use tensor parallelism (--tp), or a GPU with more memory"
        others = [*_with_fused_loss(request, None), *_on_the_hosts(request, None), more, *_cut_sequences(request)]
        return f"not even {most} × {name} hold it: {'; or '.join(others)}"
    if count <= request.cluster.gpus:
        return (
            "these GPUs hold it with checkpointing and micro-batches of 1" + (", ZeRO 3" if request.dp > 1 else "")
            + ": leave out --batch, --checkpointing and --zero"
        )  # fmt: skip
    smallest = f"the smallest cluster that works is {count} × {name} with ZeRO 3, checkpointing and micro-batches of 1"
    others = [*_with_fused_loss(request, count), *_on_the_hosts(request, count), *_cut_sequences(request)]
    return "; or ".join([smallest, *others])


def _with_fused_loss(request: Request, count: int | None) -> list[str]:
    """Says whether a fused loss needs fewer GPUs than ``count``, which hold the job without one."""
    if request.job.fused_loss:
        return []
    fewer = fewest_gpus(replace(request, job=request.job.but(fused_loss=True)))
    if fewer is None or (count is not None and fewer >= count):
        return []
    return [f"--fused-loss, which makes logits piece by piece: then {fewer} × {request.cluster.gpu.name} hold it"]


#: Engines that may have all parameters and states in the host's memory, and how.
ON_THE_HOST = {"zero-3": "offload of both", "fsdp2": "CPUOffloadPolicy; its time is not planned"}


def _on_the_hosts(request: Request, count: int | None) -> list[str]:
    """Says whether fewer GPUs than ``count`` hold the job with parameters and states in the hosts' memory."""
    unit, gpus = request.tp * request.pp, request.cluster.gpus
    sizes = [unit << exponent for exponent in range(1, MOST_EXPONENT + 1)]
    for size in [gpus] * (request.dp > 1) + [size for size in sizes if size > gpus]:
        if count is not None and size >= count:
            break
        held = {engine: least_bytes(request, size, engine, "optimizer+parameters") for engine in ON_THE_HOST}
        fitting = [
            f"{title(engine)} ({ON_THE_HOST[engine]}) in {nbytes / 1e9:.1f} GB"
            for engine, nbytes in held.items() if nbytes <= request.cluster.most_bytes
        ]  # fmt: skip
        if fitting:
            where = f"parameters and states in the hosts' memory: then {size} × {request.cluster.gpu.name} hold it"
            return [f"{where}, {' or '.join(fitting)}"]
    return []


def _cut_sequences(request: Request) -> list[str]:
    """Says, where sequences are long, which option cuts them between GPUs."""
    return ["--search, which also cuts sequences between GPUs (CP)"] if request.job.sequence >= LONG else []


def _fits(request: Request, of: Callable[[int], tuple[Job, Layout]]) -> Callable[[int], bool]:
    return lambda size: memory(*of(size)).peak_bytes <= request.cluster.most_bytes


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Finds the largest of 1 to ``most`` that fits, 0 where 1 does not; all that is smaller fits, too."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def why(plan: Plan) -> str:
    """Says why the best row is the best: clauses compare it with other rows; those that are not true are left out."""
    best = plan.best
    if best is None:
        return "nothing fits"
    cluster = plan.request.cluster
    fastest = f"the fastest that fits {cluster.most_bytes / 1e9:.1f} GB"
    if best.peak_bytes <= cluster.room:
        fastest = f"the fastest that leaves {RESERVE:.0%} of a GPU free"
    if best.hours != min(row.hours for row in plan.eligible):
        fastest = f"within 1 % of {fastest}, and offloads or shards less or takes less memory"
    return "; ".join([fastest, *_stage(plan, best), *_batch(plan, best), f"limited by {best.time.limit}"])


def _stage(plan: Plan, best: PlanRow) -> list[str]:
    """Says that lower stages do not fit or are slower; of the lowest stage, what higher ones would send."""
    stage = best.stage
    if stage is None:
        return []
    lower = [row for row in plan.rows if row.stage is not None and row.stage < stage]
    if fitting := [row for row in lower if row.fits]:
        nearest = min(fitting, key=lambda row: row.hours)
        if nearest.hours <= best.hours:  # as fast, but offloads, or leaves too little free
            return []
        return [f"below stage {stage} {_way(nearest)} is the fastest, which takes {_more(nearest, best)} longer"]
    if lower:
        return [f"below stage {stage} nothing fits"]
    alike = [row for row in plan.rows if _same(row, best, "offload", "checkpointing", "batch")]
    higher = [row.sent_bytes for row in alike if row.stage is not None and row.stage > stage]
    if higher and min(higher) >= best.sent_bytes:
        return ["a higher stage would save memory that is not needed and send no less"]
    return []


def _batch(plan: Plan, best: PlanRow) -> list[str]:
    """Compares the best row with the next smaller and the next larger micro-batch, all else equal."""
    alike = [row for row in plan.rows if _same(row, best, "engine", "offload", "checkpointing")]
    clauses = []
    smaller = max((row for row in alike if row.batch < best.batch), key=lambda row: row.batch, default=None)
    if smaller is not None and smaller.hours > best.hours:
        clauses.append(f"micro-batches of {smaller.batch} take {_more(smaller, best)} longer")
    larger = min((row for row in alike if row.batch > best.batch), key=lambda row: row.batch, default=None)
    if larger is not None and not larger.fits:
        clauses.append(f"micro-batches of {larger.batch} do not fit")
    elif larger is not None and larger not in plan.eligible:
        clauses.append(f"micro-batches of {larger.batch} fit, and leave less than {RESERVE:.0%} free")
    elif larger is not None and larger.hours < best.hours:
        clauses.append(f"micro-batches of {larger.batch} are at most 1 % faster")
    return clauses


def _same(row: PlanRow, other: PlanRow, *names: str) -> bool:
    return all(getattr(row, name) == getattr(other, name) for name in names)


def _more(slower: PlanRow, row: PlanRow) -> str:
    return f"{100 * (slower.hours / row.hours - 1):.1f} %"


def _way(row: PlanRow) -> str:
    offload = "" if row.offload == "none" else f" with the {row.offload.replace('+', ' and ')} offloaded"
    return f"ZeRO {row.stage}{offload} at {row.batch} × {row.accumulation}"


def epochs(request: Request) -> str:
    """Says how often the steps go through the data."""
    if not request.epochs:
        return ""
    return f": {request.epochs:g} epoch{'' if request.epochs == 1 else 's'} of {request.rows:,}"


def describe_weights(plan: Plan) -> str:
    """Says what is unusual of the weights: frozen ones in few bits, or an embedding and a head that are trained."""
    from pardemo.planner.layouts.tuning import left_in_16_bits

    job = plan.request.job
    kept = "" if job.base == "bf16" else f", frozen weights in {job.base}"
    if left := left_in_16_bits(tuning_of(job), configurations.of(job.config)):
        kept += f", but {2 * left / 1e9:.1f} GB of experts in 16 bits, which bitsandbytes does not convert"
    return kept + (", embedding and head trained" if job.embeddings else "")
