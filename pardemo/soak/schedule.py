"""Which scenes come, and in which order: drawn from the seed."""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from random import Random

LAYOUTS = "layouts"
#: Of a round of scenes, how many each group has: those that take long come seldom.
SHARES = {"ranks": 6, "world": 6, LAYOUTS: 6, "checkpoints": 4, "cluster": 2, "measure": 2, "runner": 1, "finetune": 1}

#: A kind whose fault did not take place so many times in a row is not drawn any more.
MISSES = 10

Drawn = tuple[str, int]  # the kind, and the number of its case


def group_of(kind: str) -> str:
    """The group of a kind: what stands before the stroke."""
    return kind.partition("/")[0]


def chosen(only: str, kinds: Mapping[str, int]) -> list[str]:
    """The kinds that ``only`` names: a kind, as ``"world/killed"``, or all of a group, as ``"world"``.

    Raises:
        ValueError: it names none.
    """
    named = [kind for kind in kinds if only in (kind, group_of(kind))]
    if not named:
        beside = [kind.partition("/")[2] for kind in kinds if group_of(kind) == group_of(only)]
        raise ValueError(f"--only: no kind {only!r}; there are in {group_of(only)}: {', '.join(beside)}")
    return named


def endless(kinds: Mapping[str, int], seed: int) -> Iterator[Drawn]:
    """Scenes of all groups without end: each round shuffled, within a group the kinds in turn by their weights."""
    groups: dict[str, dict[str, int]] = {}
    for kind, weight in kinds.items():
        groups.setdefault(group_of(kind), {})[kind] = weight
    turns = {group: _turns(own, Random(f"{seed} {group}")) for group, own in groups.items()}
    numbers = {kind: count() for kind in kinds}
    chance = Random(f"{seed} rounds")
    while True:
        round_ = [group for group in groups for _ in range(SHARES.get(group, 1))]
        chance.shuffle(round_)
        for group in round_:
            kind = next(turns[group])
            yield kind, next(numbers[kind])


def counted(
    kinds: Mapping[str, int], seed: int, faults: int, layouts: int, reached: Callable[[], bool] = lambda: True
) -> Iterator[Drawn]:
    """So many faults and so many layouts, mixed as in :func:`endless`.

    ``reached`` says of the scene that was drawn last, when it has been played, whether its fault took place. Where it
    did not, another one is drawn in its place: fewer come only where each kind is given up (:data:`MISSES`).

    Raises:
        ValueError: there are no kinds of what was asked for.
    """
    left = {True: layouts, False: faults}
    for layout, asked in left.items():
        if asked and not any((group_of(kind) == LAYOUTS) is layout for kind in kinds):
            option = "--layouts" if layout else "--faults"
            raise ValueError(f"{option} {asked}: there are none among the kinds that were chosen: {', '.join(kinds)}")
    having = {kind: weight for kind, weight in kinds.items() if left[group_of(kind) == LAYOUTS]}
    misses = dict.fromkeys(having, 0)
    for kind, number in endless(having, seed) if having else ():
        is_layout = group_of(kind) == LAYOUTS
        if left[is_layout] and misses[kind] < MISSES:
            yield kind, number
            if reached():
                left[is_layout] -= 1
                misses[kind] = 0
            else:
                misses[kind] += 1
        if not any(left[group_of(each) == LAYOUTS] for each, times in misses.items() if times < MISSES):
            return


def _turns(kinds: Mapping[str, int], chance: Random) -> Iterator[str]:
    while True:
        turn = [kind for kind, weight in kinds.items() for _ in range(weight)]
        chance.shuffle(turn)
        yield from turn
