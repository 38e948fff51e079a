"""Matches a job's process groups with the rehearsal's when their sizes differ.

Ranks are numbered dimension by dimension, as in a mesh: tensor-parallel ranks are neighbours, data-parallel ranks are
further apart. So the distance between a group's ranks identifies its dimension: the groups with the smallest distance
in the job match those with the smallest distance in the rehearsal, and so on.
"""

from collections.abc import Iterable
from itertools import pairwise

#: A group's part in the job: the distance between its ranks, and their number. All ranks, messages, and groups of
#: unknown ranks have constants.
Role = tuple[int, int]
ALL, MESSAGES, UNKNOWN = (0, 0), (-1, 0), (-2, 0)


def role_of(kind: str, ranks: tuple[int, ...], world: int) -> Role:
    """Returns the role of a call's group; it is unknown for a group of one rank, too, which sends nothing."""
    if kind in ("send", "receive"):
        return MESSAGES
    if len(ranks) < 2:
        return UNKNOWN
    return ALL if len(ranks) == world else (min(b - a for a, b in pairwise(ranks)), len(ranks))


def counterparts(job: Iterable[Role], rehearsed: Iterable[Role]) -> dict[Role, Role]:
    """Matches each role of a job with one of the rehearsal's; roles without a counterpart are left out.

    Roles are matched in the order of their distances. Where one side has more of them, those that are equal on both
    sides are matched first.
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
