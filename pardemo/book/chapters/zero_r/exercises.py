"""The exercises of this chapter, and what checks an answer to each."""

from collections.abc import Callable
from itertools import pairwise

from pardemo.book.chapters.zero_r.arena import Arena, OutOfMemory
from pardemo.book.page.exercises import Mistake, call, exercise, formula
from pardemo.formulas import memory

SIZE, CHECKPOINT, ROUNDS = 80, 3, 12
#: Sizes of the temporaries, in their order: of unequal ones the larger finds no room behind a checkpoint.
TEMPORARIES = (40, 30) * (ROUNDS // 2)


@formula(
    ((1, 8, 4, 2, 1, True), (2, 1024, 1600, 48, 4, False), (32, 1024, 8192, 125, 16, True)),
    "One activation per layer, divided by the ranks where it is partitioned.",
    unit="bytes",
)
def check_checkpoints(batch: int, sequence: int, hidden: int, layers: int, ranks: int, partitioned: bool):
    """The bytes of checkpoints on a rank."""
    right = 2 * memory.activation_checkpoints(hidden, batch, sequence, layers, ranks if partitioned else 1)
    return right, [
        (right / 2, "16 bits are 2 bytes"),
        (lambda _: partitioned, "with P_a each rank keeps its part"),
        (lambda _: not partitioned, "without P_a every rank keeps all of it"),
    ]


def check_order(function: Callable[[Arena], list[int]]) -> str:
    """``function(arena)`` makes twelve checkpoints and twelve temporaries fit in 80 units."""
    arena = _Watched(SIZE)
    try:
        addresses = call(function, arena)
    except Mistake:
        if arena.failed is None:
            raise
        raise Mistake(
            f"Out of memory: {arena.failed}. Checkpoints taken while a temporary is there land behind it; take "
            "their place first."
        ) from None
    if not isinstance(addresses, (list, tuple)) or len(addresses) != ROUNDS:
        raise Mistake(f"It should return {ROUNDS} addresses, not {addresses!r}.")
    if tuple(arena.temporaries) != TEMPORARIES:
        raise Mistake(f"Temporaries of 40 and 30 by turns, {ROUNDS} in all, are to be taken, not {arena.temporaries}.")
    if arena.problem:
        raise Mistake(arena.problem)
    if set(TEMPORARIES) & set(arena.taken.values()):
        raise Mistake("A temporary was not given back.")
    places = sorted(addresses)
    inside = all(any(a <= p and p + CHECKPOINT <= a + s for a, s in arena.taken.items()) for p in places)
    if not inside or any(b - a < CHECKPOINT for a, b in pairwise(places)):
        raise Mistake("The checkpoints overlap, or are not in memory that is still taken.")
    return f"All fit, and {arena.largest} of {SIZE} units are free in one block."


class _Watched(Arena):
    """Lists temporaries, and remembers what went wrong."""

    def __init__(self, size: int):
        super().__init__(size)
        self.temporaries, self.failed, self.problem = [], None, ""

    def take(self, size: int) -> int:
        if size in TEMPORARIES and not self.problem:
            kept = [owner for owner in self.taken.values() if owner not in TEMPORARIES]
            if len(kept) < len(self.taken):
                self.problem = "Two temporaries are there at a time: give the first one back before the next."
            elif sum(kept) < CHECKPOINT * len(self.temporaries):
                self.problem = f"Temporary {len(self.temporaries) + 1} comes before the checkpoint of the one before."
        try:
            address = super().take(size)
        except OutOfMemory as error:
            self.failed = error
            raise
        if size in TEMPORARIES:
            self.temporaries.append(size)
        return address


@exercise("checkpoints")
def my_checkpoints(batch, sequence, hidden, layers, ranks, partitioned):
    """One activation stays for each layer: count its elements. Tensor parallelism gives every rank a copy of it,
    unless P_a steps in."""
    whole = 2 * batch * sequence * hidden * layers  # 16 bits are 2 bytes
    return whole / ranks if partitioned else whole


@exercise("order")
def my_order(arena):
    """Holes appear where something temporary goes and something that stays stands behind it. Where should the
    checkpoints stand before the first temporary comes?"""
    place = arena.take(12 * 3)  # all checkpoints' place, before any temporary
    for turn in range(12):
        temporary = arena.take(30 if turn % 2 else 40)  # finds the same hole each time
        arena.give_back(temporary)
    return [place + 3 * i for i in range(12)]
