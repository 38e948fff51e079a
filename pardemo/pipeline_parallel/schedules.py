"""Schedules: in which order a rank computes, as generators of instructions.

Stage s of a model lies on rank s mod p, so that with v chunks per rank there are p·v stages. An order may say otherwise
by :func:`placed`: :func:`v_shape` goes from the first rank to the last, and back again.

- :func:`gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965, 2.3).
- :func:`one_f_one_b`: one forward, one backward by turns, after as many forwards as it takes for the first gradient to
  come back (Narayanan et al. 2019, "PipeDream", 3.2; with a flush at the end of each batch, as Megatron runs it:
  arXiv 2104.04473, 2.2).
- :func:`interleaved`: the same with v smaller chunks of layers per rank (arXiv 2104.04473, 2.2, figure 4).
- :mod:`.zero_bubble`: those that compute the weights' gradients apart from the input's.

An order is a function ``order(rank, ranks, micro_batches)`` that yields :class:`Forward` and :class:`Backward`, or for
the latter :class:`BackwardInput` and, any time after it, :class:`BackwardWeight`: write another, and :class:`Schedule`
makes it drawable, provable and runnable, with the sends and receives that follow.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from pardemo import argument_checks
from pardemo.pipeline_parallel.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward

Order = Callable[..., Iterator[Compute]]
Placement = Callable[[int, int], int]  # (stage, ranks) -> its rank


class ScheduleError(ValueError):
    """Raised for a schedule that cannot be run; the text says what is wrong."""


def around(stage: int, ranks: int) -> int:
    """Stage after stage on the next rank, and from the last rank to the first."""
    return stage % ranks


def v_shape(stage: int, ranks: int) -> int:
    """Down the ranks and up again: of two chunks a rank has stages r and 2p − 1 − r (arXiv 2405.15362, 3)."""
    way, down = divmod(stage, ranks)
    return ranks - 1 - down if way % 2 else down


def placed(placement: Placement) -> Callable[[Order], Order]:
    """A decorator: this order's stages lie where ``placement`` says, instead of :func:`around` the ranks."""

    def decorate(order: Order) -> Order:
        order.placement = placement  # type: ignore[attr-defined]
        return order

    return decorate


def gpipe(rank: int, ranks: int, micro_batches: int) -> Iterator[Compute]:
    """All micro-batches forward, then all backward: every one of them is in flight in between."""
    for k in range(micro_batches):
        yield Forward(rank, k)
    for k in range(micro_batches):
        yield Backward(rank, k)


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[Compute]:
    """1F1B: a rank never has more micro-batches in flight than there are stages from its own to the last one."""
    ahead = min(ranks - rank - 1, micro_batches)
    for k in range(ahead):
        yield Forward(rank, k)
    for k in range(micro_batches - ahead):
        yield Forward(rank, ahead + k)
        yield Backward(rank, k)
    for k in range(micro_batches - ahead, micro_batches):
        yield Backward(rank, k)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> Iterator[Compute]:
    """1F1B over ``chunks`` stages per rank, in rounds of p micro-batches through each chunk.

    Raises:
        ScheduleError: the micro-batches do not divide into rounds of p.
    """
    if micro_batches % ranks:
        raise ScheduleError(
            f"interleaved 1F1B goes in rounds of {ranks} micro-batches, one for each rank, and {micro_batches} do not "
            f"divide into such rounds: take a multiple of {ranks}"
        )

    def chunk_and_micro_batch(turn: int) -> tuple[int, int]:
        round, within = divmod(turn, ranks * chunks)
        return within // ranks, round * ranks + within % ranks

    def forward(turn: int) -> Forward:
        chunk, k = chunk_and_micro_batch(turn)
        return Forward(chunk * ranks + rank, k)

    def backward(turn: int) -> Backward:
        chunk, k = chunk_and_micro_batch(turn)
        return Backward((chunks - 1 - chunk) * ranks + rank, k)

    turns = micro_batches * chunks
    ahead = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, turns)
    for turn in range(ahead):
        yield forward(turn)
    for turn in range(turns - ahead):
        yield forward(ahead + turn)
        yield backward(turn)
    for turn in range(turns - ahead, turns):
        yield backward(turn)


@dataclass(frozen=True)
class Schedule:
    """An order for ``ranks`` ranks and ``micro_batches`` micro-batches, with ``chunks`` stages on each rank.

    ``chunks`` is handed to the order where it is more than 1.

    Raises:
        ValueError: one of the numbers is below 1.
    """

    order: Order
    ranks: int
    micro_batches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "micro_batches", "chunks"):
            argument_checks.whole_number(getattr(self, name), name)

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Returns the rank that has a stage."""
        return getattr(self.order, "placement", around)(stage, self.ranks)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in the model's order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def computes(self, rank: int) -> list[Compute]:
        """Returns what this rank computes, in its order."""
        more = () if self.chunks == 1 else (self.chunks,)
        return list(self.order(rank, self.ranks, self.micro_batches, *more))

    def before(self, compute: Compute) -> Compute | None:
        """Returns what has to be computed first, elsewhere or here; None at the model's entrance."""
        stage, k = compute.stage, compute.micro_batch
        if isinstance(compute, Forward):
            return Forward(stage - 1, k) if stage else None
        if isinstance(compute, BackwardWeight):
            return BackwardInput(stage, k)
        return self.backward(stage + 1, k) if stage < self.stages - 1 else Forward(stage, k)

    def backward(self, stage: int, micro_batch: int) -> Compute:
        """Returns the instruction that computes this stage's input gradient: the whole backward, or its first part."""
        part = BackwardInput(stage, micro_batch)
        return part if part in self._parts else Backward(stage, micro_batch)

    @property
    def is_split(self) -> bool:
        """Whether any backward is in two parts."""
        return bool(self._parts)

    @cached_property
    def _parts(self) -> frozenset[Compute]:
        every = (step for rank in range(self.ranks) for step in self.computes(rank))
        return frozenset(step for step in every if isinstance(step, BackwardInput))

    def travels(self, compute: Compute) -> bool:
        """Whether what :meth:`before` names has to come from another rank."""
        before = self.before(compute)
        return before is not None and self.rank_of(before.stage) != self.rank_of(compute.stage)
