"""The plan read backwards: the longest sequence, the largest batch, the fewest GPUs that fit."""

from collections.abc import Callable
from typing import Any

from pardemo.planner.job import RankJob
from pardemo.planner.memory import Curve
from pardemo.planner.table import Request, jobs

MOST_EXPONENT = 9  # 512 times the GPUs that hold one copy of the model
TOKENS = 64  # sequences are rounded to multiples of
CHORDS = 10


def largest_batch(request: Request, engine: str, checkpointing: bool, offload: str = "none") -> int:
    """Samples of the largest micro-batch that fits one GPU, with the recipe's length; a pipeline is full of them."""
    curve = Curve(jobs(request)[engine, checkpointing])
    how: dict[str, Any] = {"offload": offload, "tp": request.tp, "pp": request.pp, "in_flight": request.pp}
    return curve.largest_batch(request.cluster.room, **how)


def longest_sequence(request: Request, engine: str, checkpointing: bool, batch: int = 1, offload: str = "none") -> int:
    """Tokens of the longest sample that fits with a micro-batch of ``batch``, in steps of 64; at most the context.

    Attention is fused, so that every tensor's size is affine in the length too: few lengths predict where the room
    ends. The guess is run itself, with its neighbours, and bisected where it is wrong. 0 where not even 64
    tokens do.
    """
    micro_batches = request.share // batch
    job = request.job.but(
        batch=batch, engine=engine, ranks=request.dp, checkpointing=checkpointing, accumulation=min(2, micro_batches)
    )  # from the second on, gradients of the ones before are there
    context = getattr(job.config, "max_position_embeddings", None) or 1 << 20
    room = request.cluster.room

    def need(sequence: int) -> float:
        return _peak(request, job.but(sequence=sequence), offload, min(request.pp, micro_batches))

    if context < 2 * TOKENS:
        return context if need(context) <= room else 0
    short, long = min(256, context // 2), min(512, context)
    needs, most = {length / TOKENS: need(length) for length in (short, long)}, context // TOKENS
    guess = _guessed_length(lambda steps: need(TOKENS * steps), room, needs, most)
    return TOKENS * last_that_fits(lambda steps: need(TOKENS * steps) <= room, guess, most)


def _guessed_length(need: Callable[[int], float], room: float, needs: dict[float, float], most: int) -> int:
    """A guess of the longest length that fits; ``needs`` has the bytes of the lengths that have been run.

    It is where the chord through two lengths meets the room; then the chord from what fits to what does not.

    Need bends upwards: the peak is the largest of sums that are each affine. Short samples' says little of long ones',
    but a chord leads to a length that fits, and the next one, within the last piece, to the last that does.
    """
    (low, high), guess, in_a_row = needs, 0, 0
    for _ in range(CHORDS):
        below, above = room - needs[low], (needs[high] - room) / 2 ** max(0, in_a_row - 1)
        guess = min(max(int(low + below * (high - low) / max(1.0, below + above)), 1), most)
        if guess in needs:
            break
        needs[guess] = need(guess)
        in_a_row = in_a_row + 1 if needs[guess] <= room else 0  # far from the bend: a steeper chord the next time
        fits, over = ([n for n in needs if (needs[n] <= room) == fit] for fit in (True, False))
        if not fits or not over:
            break
        low, high = max(fits), min(over)
    return guess


def last_that_fits(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest of 1 to ``most`` that fits, 0 if none does; two questions where ``guess`` is right."""
    low, high = 0, most + 1  # low fits, high does not
    place, stride = min(max(guess, 1), most), 1
    while high - low > 1:
        if fits(place):
            low, place = place, place + stride
        else:
            high, place = place, place - stride
        stride *= 2
        if not low < place < high:
            place = (low + high) // 2
    return low


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
    dp = max(1, gpus // (request.tp * request.pp))
    several = request.samples_per_step > 2 * dp
    job = request.job.but(
        batch=2, engine="zero-3" if dp > 1 else "zero-0", ranks=dp, checkpointing=True, accumulation=1 + several
    )  # two samples: one is stored differently, and this is an upper bound
    return _peak(request, job, "none", request.pp)


def _peak(request: Request, job: RankJob, offload: str, in_flight: int) -> float:
    curve, room = Curve.at_one(job), request.cluster.room
    return curve.estimate(job.batch, offload, request.tp, request.pp, in_flight, room=room).peak_bytes


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
