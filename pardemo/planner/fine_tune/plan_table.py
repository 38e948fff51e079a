"""Plans a fine-tune: every engine × offload × checkpointing × micro-batch, whether it fits, its time, the best of them.

Times and memory are those of :mod:`pardemo.planner.layouts`, in a second and without torch; ``pardemo plan --dry-run``
runs the engine of the recommended row beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pardemo import argument_checks
from pardemo.planner.divisors import powers_of_two
from pardemo.planner.estimate import HOST_STATES, RESERVE, choose
from pardemo.planner.job import RankJob, check_tensor_parallel
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.intervals import Interval, of_fine_tune
from pardemo.planner.layouts.job import BUCKET_ELEMENTS, ENGINES, Job, engine_name, fine_tune
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.search import PlannedLayout
from pardemo.planner.layouts.shape import Shape

PLANNED_ENGINES = tuple(engine for engine in ENGINES if engine != "plain")
MOST_RANKS = 16_384  # data-parallel: no published run has had more GPUs


@dataclass(frozen=True)
class Request:
    """A job to plan: its model and lengths, its samples a step and steps, how its GPUs are divided.

    ``samples``, ``epochs``: of the data set, and how often ``steps`` goes through it; 0 where that is not known.
    ``price``: of a GPU and hour.
    """

    job: RankJob
    machine: Machine
    samples_per_step: int
    steps: int
    tp: int = 1
    pp: int = 1
    engines: Sequence[str] = PLANNED_ENGINES
    checkpointing: Sequence[bool] = (True, False)
    host_states: Sequence[str] = HOST_STATES
    batches: Sequence[int] = ()
    samples: int = 0
    epochs: float = 0.0
    price: float | None = None

    def __post_init__(self):
        for name in ("tp", "pp", "samples_per_step", "steps"):
            argument_checks.whole_number(getattr(self, name), name)
        if self.machine.gpus % (self.tp * self.pp):
            raise ValueError(f"{self.machine.gpus} GPUs do not divide by tp {self.tp} × pp {self.pp}")
        check_tensor_parallel(self.job.config, self.tp)
        if self.job.config.num_hidden_layers % self.pp:
            raise ValueError(f"{self.job.config.num_hidden_layers} layers do not divide by --pp {self.pp}")
        if self.samples_per_step % self.dp:
            raise ValueError(f"{self.samples_per_step} samples a step do not divide over {self.dp} data-parallel ranks")
        if self.dp == 1 and "zero-0" not in self.engines:
            raise ValueError(f"{engine_title(self.engines[0])} shards over data-parallel ranks, and there is one")
        if self.dp > MOST_RANKS:
            raise ValueError(f"{self.dp:,} data-parallel ranks; at most {MOST_RANKS:,} are planned for")
        for batch in self.batches:
            if self.share % batch:
                raise ValueError(f"a micro-batch of {batch} does not divide a rank's {self.share} samples of a step")

    @property
    def dp(self) -> int:
        return self.machine.gpus // (self.tp * self.pp)

    @property
    def share(self) -> int:
        """A rank's samples of a step."""
        return self.samples_per_step // self.dp

    @property
    def micro_batches(self) -> list[int]:
        """Powers of two that divide a rank's samples of a step."""
        return list(self.batches) or [n for n in powers_of_two(self.share) if self.share % n == 0]


@dataclass(frozen=True, eq=False)
class PlanRow(PlannedLayout):
    """One way to run the job: so many ``steps`` of it, at ``price`` a GPU and hour."""

    steps: int = 1
    price: float | None = None

    @cached_property
    def engine(self) -> str:
        """Name of the engine, as in :class:`~pardemo.planner.job.RankJob`."""
        return engine_name(self.job, self.layout)

    @property
    def stage(self) -> int | None:
        """DeepSpeed's ZeRO stage; None under FSDP2."""
        return self.layout.zero_stage if self.job.program.deepspeed else None

    @property
    def interval(self) -> Interval:
        """Between which seconds a step lies in four of five cases."""
        return of_fine_tune("seconds", self.seconds)

    @property
    def hours(self) -> float:
        return self.steps * self.seconds / 3600

    @property
    def money(self) -> float | None:
        return None if self.price is None else self.hours * self.job.machine.gpus * self.price

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step."""
        return self.step.sent_bytes or 0.0


@dataclass
class Plan:
    """The rows of a request: the recommended one first, then those that fit, the fastest first, then the others."""

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
        return [row for row in fitting if row.has_room] or fitting


def _preference(row: PlanRow) -> tuple:
    """Orders rows that are as fast: no offload first, then a low stage, then little memory."""
    return row.layout.host_states != "none", row.engine, row.peak_bytes


#: Engine -> the states that it may leave to the host; how long FSDP2's own offload takes is not known, so that it has
#: no rows.
HOST_STATES_OF = {
    "zero-0": ("none",),
    "zero-1": ("none", "optimizer"),
    "zero-2": ("none", "optimizer"),
    "zero-3": HOST_STATES,
    "fsdp2": ("none",),
}


def engine_title(engine: str) -> str:
    """Returns ``ZeRO 2`` for ``zero-2``."""
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
    shape = configurations.shape_of_config(request.job.config)
    rows = [
        plan_row(request, shape, engine, checkpointing, host_states, batch)
        for engine in request.engines
        if engine == "zero-0" or request.dp > 1
        for checkpointing in request.checkpointing
        for host_states in request.host_states
        if host_states in HOST_STATES_OF[engine]
        for batch in request.micro_batches
    ]
    return Plan(request, rows)


def plan_row(request: Request, shape: Shape, engine: str, checkpointing: bool, host_states: str, batch: int) -> PlanRow:
    """Plans the request in one way; ``shape`` is its model's."""
    job = request.job.but(
        engine=engine, ranks=request.dp, batch=batch, checkpointing=checkpointing,
        accumulation=max(1, request.share // batch),
    )  # fmt: skip
    planned, layout = job_and_layout(job, request.machine, host_states, request.tp, request.pp, shape)
    return PlanRow(planned, layout, request.steps, request.price)


def job_and_layout(
    job: RankJob, machine: Machine, host_states: str = "none", tp: int = 1, pp: int = 1, shape: Shape | None = None
) -> tuple[Job, Layout]:
    """Converts a rank's job to the job and layout of the step's model.

    Args:
        host_states: states in the host's memory, of :data:`~pardemo.planner.estimate.HOST_STATES`.
        tp, pp: tensor-parallel ranks and pipeline stages of each of the job's ranks.
        shape: the shape of the job's model, if it is known.

    Raises:
        ValueError: the model is none that is known.
    """
    of_labels = getattr(job.config, "loss_head", "full") == "labels"  # others make logits of all tokens
    tuning = replace(job.tuning, labels=job.labels if of_labels else 1.0)
    return fine_tune(
        shape or configurations.shape_of_config(job.config), machine, tuning,
        job.engine, job.ranks, job.batch, job.sequence, checkpointing=job.checkpointing,
        accumulation=job.accumulation, host_states=host_states, tp=tp, pp=pp,
        bucket=job.zero.get("reduce_bucket_size", BUCKET_ELEMENTS), overlaps=job.zero.get("overlap_comm"),
    )  # fmt: skip


def longest_sequence(request: Request, best: PlanRow) -> int:
    """Finds the most tokens of a sample that fit as the row is run, in steps of 64; at most the model's context."""
    job, layout = best.job, best.layout
    context = getattr(request.job.config, "max_position_embeddings", None) or 1 << 20
    fits = _fits(request, lambda steps: (replace(job, sequence=TOKENS * steps), layout))
    if context < 2 * TOKENS:
        nbytes = predict_memory(replace(job, sequence=context), layout).peak_bytes
        return context if nbytes <= request.machine.most_bytes else 0
    return TOKENS * largest_that_fits(fits, context // TOKENS)


def largest_batch(request: Request, best: PlanRow) -> int:
    """Finds the samples of the largest micro-batch that fits as the row is run."""
    return largest_that_fits(_fits(request, lambda batch: (best.job, best.layout.but(micro_batch=batch))), 4096)


def fewest_gpus(request: Request) -> int | None:
    """Finds the smallest power of two of such GPUs on which micro-batches of one sample fit; None if there is none.

    Stage 3 with checkpointing takes the least without offload.
    """
    unit = request.tp * request.pp
    for exponent in range(MOST_EXPONENT + 1):
        if least_bytes(request, unit << exponent) <= request.machine.most_bytes:
            return unit << exponent
    return None


def least_bytes(request: Request, gpus: int, engine: str = "zero-3", host_states: str = "none") -> float:
    """Predicts the peak of micro-batches of one sample on so many GPUs, under stage 3 with checkpointing."""
    dp = max(1, gpus // (request.tp * request.pp))
    engine = engine if dp > 1 else "zero-0"
    row = plan_row(request, configurations.shape_of_config(request.job.config), engine, True, host_states, 1)
    layout = row.layout.but(dp=dp, accumulation=max(1, request.samples_per_step // dp))
    return predict_memory(row.job, layout).peak_bytes


def smallest_cluster(request: Request) -> str:
    """Says, where nothing fits, which cluster is the smallest that works, or which option keeps this one from it."""
    count, name = fewest_gpus(request), request.machine.gpu.name
    if count is None:
        most = request.tp * request.pp << MOST_EXPONENT
        more = "use tensor parallelism (--tp), or a GPU with more memory"
        others = [*_with_fused_loss(request, None), *_on_the_hosts(request, None), more, *_cut_sequences(request)]
        return f"not even {most} × {name} hold it: {'; or '.join(others)}"
    if count <= request.machine.gpus:
        return (
            "these GPUs hold it with checkpointing and micro-batches of 1" + (", ZeRO 3" if request.dp > 1 else "")
            + ": leave out --batch, --checkpointing and --zero"
        )  # fmt: skip
    smallest = f"the smallest cluster that works is {count} × {name} with ZeRO 3, checkpointing and micro-batches of 1"
    others = [*_with_fused_loss(request, count), *_on_the_hosts(request, count), *_cut_sequences(request)]
    return "; or ".join([smallest, *others])


def _with_fused_loss(request: Request, count: int | None) -> list[str]:
    """Says whether a fused loss needs fewer GPUs than ``count``, which hold the job without one."""
    if request.job.tuning.fused_loss:
        return []
    tuning = replace(request.job.tuning, fused_loss=True)
    fewer = fewest_gpus(replace(request, job=request.job.but(tuning=tuning)))
    if fewer is None or (count is not None and fewer >= count):
        return []
    return [f"--fused-loss, which makes logits piece by piece: then {fewer} × {request.machine.gpu.name} hold it"]


#: Engines that may have all parameters and states in the host's memory, and how.
ON_THE_HOST = {"zero-3": "offload of both", "fsdp2": "CPUOffloadPolicy; its time is not planned"}


def _on_the_hosts(request: Request, count: int | None) -> list[str]:
    """Says whether fewer GPUs than ``count`` hold the job with parameters and states in the hosts' memory."""
    unit, gpus = request.tp * request.pp, request.machine.gpus
    sizes = [unit << exponent for exponent in range(1, MOST_EXPONENT + 1)]
    for size in [gpus] * (request.dp > 1) + [size for size in sizes if size > gpus]:
        if count is not None and size >= count:
            break
        held = {engine: least_bytes(request, size, engine, "optimizer+parameters") for engine in ON_THE_HOST}
        fitting = [
            f"{engine_title(engine)} ({ON_THE_HOST[engine]}) in {nbytes / 1e9:.1f} GB"
            for engine, nbytes in held.items() if nbytes <= request.machine.most_bytes
        ]  # fmt: skip
        if fitting:
            where = f"parameters and states in the hosts' memory: then {size} × {request.machine.gpu.name} hold it"
            return [f"{where}, {' or '.join(fitting)}"]
    return []


def _cut_sequences(request: Request) -> list[str]:
    """Says, where sequences are long, which option cuts them between GPUs."""
    return ["--search, which also cuts sequences between GPUs (CP)"] if request.job.sequence >= LONG else []


def _fits(request: Request, job_of_size: Callable[[int], tuple[Job, Layout]]) -> Callable[[int], bool]:
    return lambda size: predict_memory(*job_of_size(size)).peak_bytes <= request.machine.most_bytes


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Finds the largest of 1 to ``most`` that fits, 0 where 1 does not; all that is smaller fits, too."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def explain_best(plan: Plan) -> str:
    """Says why the best row is the best: clauses compare it with other rows; those that are not true are left out."""
    best = plan.best
    if best is None:
        return "nothing fits"
    fastest = f"the fastest that fits {best.job.machine.most_bytes / 1e9:.1f} GB"
    if best.has_room:
        fastest = f"the fastest that leaves {RESERVE:.0%} of a GPU free"
    if best.hours != min(row.hours for row in plan.eligible):
        fastest = f"within 1 % of {fastest}, and offloads or shards less or takes less memory"
    return "; ".join([fastest, *_stage(plan, best), *_batch(plan, best), f"limited by {best.step.limit}"])


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
    alike = [row for row in plan.rows if _same(row, best, "host_states", "recompute", "micro_batch")]
    higher = [row.sent_bytes for row in alike if row.stage is not None and row.stage > stage]
    if higher and min(higher) >= best.sent_bytes:
        return ["a higher stage would save memory that is not needed and send no less"]
    return []


def _batch(plan: Plan, best: PlanRow) -> list[str]:
    """Compares the best row with the next smaller and the next larger micro-batch, all else equal."""
    alike = [row for row in plan.rows if row.engine == best.engine and _same(row, best, "host_states", "recompute")]
    by_batch = {row.layout.micro_batch: row for row in reversed(alike)}
    clauses, batch = [], best.layout.micro_batch
    smaller = max((other for other in by_batch if other < batch), default=None)
    if smaller is not None and by_batch[smaller].hours > best.hours:
        clauses.append(f"micro-batches of {smaller} take {_more(by_batch[smaller], best)} longer")
    larger = min((other for other in by_batch if other > batch), default=None)
    if larger is None:
        return clauses
    if not by_batch[larger].fits:
        clauses.append(f"micro-batches of {larger} do not fit")
    elif by_batch[larger] not in plan.eligible:
        clauses.append(f"micro-batches of {larger} fit, and leave less than {RESERVE:.0%} free")
    elif by_batch[larger].hours < best.hours:
        clauses.append(f"micro-batches of {larger} are at most 1 % faster")
    return clauses


def _same(row: PlanRow, other: PlanRow, *fields: str) -> bool:
    """Returns whether these fields of two rows' layouts are equal."""
    return all(getattr(row.layout, field) == getattr(other.layout, field) for field in fields)


def _more(slower: PlanRow, row: PlanRow) -> str:
    return f"{100 * (slower.hours / row.hours - 1):.1f} %"


def _way(row: PlanRow) -> str:
    layout = row.layout
    offload = "" if layout.host_states == "none" else f" with the {layout.host_states.replace('+', ' and ')} offloaded"
    return f"ZeRO {row.stage}{offload} at {layout.micro_batch} × {layout.accumulation}"


def describe_epochs(request: Request) -> str:
    """Says how often the steps go through the data."""
    if not request.epochs:
        return ""
    return f": {request.epochs:g} epoch{'' if request.epochs == 1 else 's'} of {request.samples:,}"


def describe_weights(plan: Plan) -> str:
    """Says what is unusual of the weights: frozen ones in few bits, or an embedding and a head that are trained."""
    from pardemo.planner.layouts.tuning import left_in_16_bits

    tuning = plan.request.job.tuning
    kept = "" if tuning.base == "bf16" else f", frozen weights in {tuning.base}"
    if left := left_in_16_bits(tuning, configurations.shape_of_config(plan.request.job.config)):
        kept += f", but {2 * left / 1e9:.1f} GB of experts in 16 bits, which bitsandbytes does not convert"
    return kept + (", embedding and head trained" if tuning.embeddings else "")
