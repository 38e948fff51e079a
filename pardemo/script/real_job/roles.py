"""Says which group of a job does what a group of its rehearsal did, though it has other ranks, or more.

Ranks are numbered dimension by dimension, as in a mesh: tensor parallel ranks stand next to one another, data parallel
ranks further apart. So groups are told by the distance of their ranks, and the nearest answers to the nearest.
"""

from collections.abc import Iterable
from itertools import pairwise

#: The distance and the number of a group's ranks. All ranks, messages and groups of unknown ranks have their own.
Role = tuple[int, int]
ALL, MESSAGES, UNKNOWN = (0, 0), (-1, 0), (-2, 0)


def role_of(kind: str, ranks: tuple[int, ...], world: int) -> Role:
    """Returns a call's role; unknown of a group of one rank, too, which sends nothing."""
    if kind in ("send", "receive"):
        return MESSAGES
    if len(ranks) < 2:
        return UNKNOWN
    return ALL if len(ranks) == world else (min(b - a for a, b in pairwise(ranks)), len(ranks))


def counterparts(job: Iterable[Role], rehearsed: Iterable[Role]) -> dict[Role, Role]:
    """Returns of each role of a job the rehearsal's; those that have none are left out.

    Where both have as many roles, or else of those that are not the same in both, the nearest is the nearest's.
    """
    ours, theirs = set(job), set(rehearsed)
    pairs = {role: role for role in (ALL, MESSAGES) if role in ours & theirs}
    ours, theirs = ({role for role in roles if role[0] > 0} for roles in (ours, theirs))
    if len(ours) != len(theirs):
        pairs |= {role: role for role in ours & theirs}
        ours, theirs = ours - theirs, theirs - ours
    return pairs | dict(zip(sorted(ours), sorted(theirs), strict=False))


def role_text(role: Role, names: dict[Role, str]) -> str:
    """Names a role: ``messages``, ``all ranks``, ``TP, groups of 8``, with the parallelism where it is known."""
    if role == MESSAGES:
        return "messages"
    distance, size = role
    place = "all ranks" if role == ALL else f"groups of {size}" + (f", every {distance}th rank" if distance > 1 else "")
    return f"{names[role]}, {place}" if role in names else place
