"""Explains why a step with the rule's layout takes longer than one with the search's."""

from collections.abc import Iterable

from pardemo.planner.layouts.procedure import Compared

NEAR = 1.15  # times the search's best: further behind, a job needs a reason


def behind_with_a_reason(rows: Iterable[Compared]) -> int:
    """Counts the jobs that are further behind than :data:`NEAR` and have one of the known reasons.

    The search cuts sequences, or has more tensor ranks or stages, whose traffic Megatron-core hides and the rule
    counts; or it takes ZeRO-2, whose gather after the update Megatron-core hides, where the rule takes ZeRO-3.
    """
    return sum(_has_a_reason(row) for row in rows if row.ratio > NEAR)


def _has_a_reason(row: Compared) -> bool:
    assert row.chosen is not None, "a job in which nothing fits has no ratio"
    assert row.best is not None, "the search finds what the rule finds"
    rule, best = row.chosen.layout, row.best.layout
    more_cuts = best.cp > 1 or best.tp > rule.tp or best.pp > rule.pp
    return more_cuts or (rule.sharding, best.sharding) == ("zero3", "zero2")
