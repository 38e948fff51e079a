"""What several layouts say together: a part of the gradient that is in it once for each rank of a group."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pardemo.prove.causes.factors import words
from pardemo.prove.facts import Facts, Finding, Pair
from pardemo.prove.layouts import SIZES, Layout
from pardemo.prove.record.facts import Step

#: Causes that a layout by itself has no better name for than these.
_OPEN = ("", "loss")
#: Numbers that the differences have to have in common before anything is said of them.
_LEAST = 8


@dataclass(frozen=True)
class Open:
    """Gradients of a layout that are wrong, and of which the layout by itself does not say why.

    ``losses``: the reference's, and the layout's as the mean of its ranks' and as their sum.
    """

    finding: Finding
    pairs: tuple[Pair, ...]
    tolerance: float
    losses: tuple[float, float, float]


def left_open(findings: Sequence[Finding], facts: Facts, ours: Sequence[Step], truth: Step) -> Open | None:
    """The finding of a layout that other layouts may explain; None where there is none, or more than one."""
    some = [one for one in findings if one.what == "gradients" and one.cause in _OPEN]
    if len(some) != 1 or any(facts.gradients[name].apart for name in some[0].parameters if name in facts.gradients):
        return None
    pairs = tuple(facts.gradients[name] for name in some[0].parameters if name in facts.gradients)
    sums = [sum(step.losses) for step in ours if step.losses]
    mean = sum(sums) / len(sums) if sums else math.nan
    return Open(some[0], pairs, facts.tolerance, (sum(truth.losses), mean, sum(sums)))


def across(
    findings: Sequence[Finding], left: Mapping[str, Open], layouts: Sequence[Layout], failed: Sequence[str] = ()
) -> list[Finding]:
    """The findings, those explained that two layouts of different sizes explain together.

    With a part a of the gradient counted n times, the wrong gradient is g + (n - 1) a: the differences from the
    reference of two layouts are parallel, and their ratio is that of their n - 1; of 1/n - 1 where a part is divided.

    Args:
        left: by a layout's name what it leaves open. layouts: all that were compared. failed: those that were not.
    """
    compared = [layout for layout in layouts if layout.name not in failed]
    some = [(layout, left[layout.name]) for layout in compared if layout.name in left]
    if len(some) < 2 or len({(one.finding.step, one.finding.parameters) for _, one in some}) != 1:
        return list(findings)
    wrong = {finding.layout for finding in findings}
    for times in (True, False):
        keys = [key for key in ("ranks", *SIZES) if _fits(key, times, some, compared, wrong)]
        if keys:
            return [_told(finding, keys, times, some) for finding in findings]
    return list(findings)


def _fits(
    key: str, times: bool, some: Sequence[tuple[Layout, Open]], compared: Sequence[Layout], wrong: set[str]
) -> bool:
    """Whether differences grow with this number of the layouts; and layouts in which it is 1 are right."""
    sizes = {layout.name: layout.sizes.get(key, 1) for layout in compared}
    numbers = [sizes[layout.name] for layout, _ in some]
    if min(numbers) < 2 or len(set(numbers)) < 2 or any(sizes[name] == 1 and name in wrong for name in sizes):
        return False
    shares = [number - 1 if times else 1 / number - 1 for number in numbers]
    _, first = some[0]
    return all(
        _parallel(first, one, share / shares[0]) for (_, one), share in zip(some[1:], shares[1:], strict=True)
    ) and _counts(some, shares)  # fmt: skip


def _parallel(first: Open, second: Open, ratio: float) -> bool:
    """Whether all differences of the second are ``ratio`` times the first's, and more than rounding."""
    elements = 0
    for a, b in zip(first.pairs, second.pairs, strict=True):
        both = a.covered & b.covered
        one, two = ((pair.ours - pair.reference)[both].double() for pair in (a, b))
        size = float(two.norm())
        rounding = 100 * first.tolerance * float(a.reference.double().norm()) * (1 + abs(ratio))
        off = float((two - ratio * one).norm())
        if not math.isfinite(size) or off > rounding or rounding > 0.01 * size:
            return False
        elements += int(torch.count_nonzero(two))
    return elements >= _LEAST


def _right(one: Open) -> bool:
    wanted, mean, total = one.losses
    return any(math.isclose(wanted, made, rel_tol=one.tolerance * 10) for made in (mean, total))


def _counts(some: Sequence[tuple[Layout, Open]], shares: Sequence[float]) -> bool:
    """Whether the losses are right in all layouts, or off as the gradients are."""
    if all(_right(one) for _, one in some):
        return True
    off = [one.losses[1] - one.losses[0] for _, one in some]
    allowed = [one.tolerance * 100 * abs(one.losses[0]) for _, one in some]
    return all(
        abs(value - off[0] * share / shares[0]) <= limit * (1 + abs(share / shares[0])) < 0.1 * abs(value)
        for value, share, limit in zip(off, shares, allowed, strict=True)
    )


def _told(finding: Finding, keys: Sequence[str], times: bool, some: Sequence[tuple[Layout, Open]]) -> Finding:
    """The finding with the cause, if it is one of those that were open."""
    if finding not in [one.finding for _, one in some]:
        return finding
    named = " or ".join(f"the {words(key)}" for key in keys)
    numbers = " and ".join(str(layout.sizes[keys[0]]) for layout, _ in some)
    loss = all(_right(one) for _, one in some)
    same = "the reference's" if loss else "off in the same way"
    how = f"is {'multiplied' if times else 'divided'} by {named}"
    why = (
        f"a part of the gradient, as of an auxiliary loss, {how}: what is wrong in layouts of {numbers} is the same "
        f"tensor, and changes as that number does; the loss that is differentiated is {same}"
    )
    cause = ("counted-per-rank" if loss else "sum-for-mean") if times else "mean-for-sum"
    return replace(finding, cause=cause, why=why)
