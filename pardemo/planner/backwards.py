"""The plan read backwards: the longest sequence, the largest batch, the fewest GPUs that fit."""

from pardemo.planner.memory import Curve, run
from pardemo.planner.table import Plan, Request

MOST_EXPONENT = 9  # 512 times the GPUs that hold one copy of the model


def largest_batch(found: Plan, engine: str, checkpointing: bool, offload: str = "none") -> int:
    """Samples of the largest micro-batch that fits one GPU, with the recipe's length."""
    request = found.request
    curve = found.curves[engine, checkpointing]
    return curve.largest_batch(request.cluster.room, offload=offload, tp=request.tp, pp=request.pp)


def longest_sequence(request: Request, engine: str, checkpointing: bool, batch: int = 1) -> int:
    """Tokens of the longest sample that fits with a micro-batch of ``batch``, in steps of 64; at most the context.

    Attention is fused, so that every tensor's size is affine in the length too: the length that two dry runs predict is
    run itself, and shortened until it fits. 0 where not even 64 tokens do.
    """
    job = request.job.but(batch=batch, engine=engine, ranks=request.dp, checkpointing=checkpointing, accumulation=1)
    context = getattr(job.config, "max_position_embeddings", None) or 1 << 20

    def need(sequence: int) -> float:
        curve = Curve(job.but(sequence=sequence))
        return curve.estimate(batch, tp=request.tp, pp=request.pp).peak_bytes

    short, long = min(256, context), min(512, context)
    if short == long:
        return context if need(context) <= request.cluster.room else 0
    first, second = need(short), need(long)
    slope = (second - first) / (long - short)
    guess = min(context, int(short + (request.cluster.room - first) / slope) // 64 * 64)
    while guess >= 64 and need(guess) > request.cluster.room:
        guess -= 64
    return max(0, guess)


def fewest_gpus(request: Request) -> int | None:
    """The smallest power of two of such GPUs on which the job fits, two samples at a time; None if there is none.

    Stage 3 with checkpointing takes the least without offload.
    """
    unit, low, high = request.tp * request.pp, 0, MOST_EXPONENT + 1
    while low < high:  # the smallest exponent that fits; more GPUs never take more
        middle = (low + high) // 2
        fits = least_bytes(request, unit << middle) <= request.cluster.room
        low, high = (low, middle) if fits else (middle + 1, high)
    return unit << low if low <= MOST_EXPONENT else None


def least_bytes(request: Request, gpus: int) -> float:
    """Peak of two samples a micro-batch on so many GPUs, under stage 3 with checkpointing."""
    unit = request.tp * request.pp
    dp = max(1, gpus // unit)
    job = request.job.but(
        batch=2, engine="zero-3" if dp > 1 else "zero-0", ranks=dp, checkpointing=True, accumulation=1
    )  # two samples: one is stored differently, and this is an upper bound
    curve = Curve.__new__(Curve)
    curve.job, curve.low, curve.high, curve.affine = job, run(job), run(job), True
    return curve.estimate(2, tp=request.tp, pp=request.pp, in_flight=request.pp).peak_bytes


def smallest_cluster(request: Request) -> str:
    """What to say where nothing fits: the smallest cluster that works, or what was asked for that keeps it from it."""
    count = fewest_gpus(request)
    name = request.cluster.gpu.name
    if count is None:
        most = request.tp * request.pp << MOST_EXPONENT
        return f"not even {most} × {name} hold it: use tensor parallelism (--tp), or a GPU with more memory"
    if count <= request.cluster.gpus:
        return (
            "these GPUs hold it with checkpointing and micro-batches of 1 or 2" + (", ZeRO 3" if request.dp > 1 else "")
            + ": leave out --batch, --checkpointing and --zero"
        )  # fmt: skip
    return f"the smallest cluster that works is {count} × {name} with ZeRO 3, checkpointing and micro-batches of 1 or 2"
