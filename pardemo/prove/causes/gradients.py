"""Causes of gradients that are not the reference's, each judged by the tensors of some parameters."""

from collections.abc import Sequence

import torch

from pardemo.prove.causes.cause import Cause, close_enough, near
from pardemo.prove.causes.factors import words
from pardemo.prove.causes.losses import LossItself, MeanOfMeans
from pardemo.prove.causes.scales import OwnNorm, Precision
from pardemo.prove.facts import Facts, Pair
from pardemo.prove.record.facts import Step
from pardemo.world.errors import ranks_text


class NotSummed:
    """Ranks that hold the same parameter have different gradients, whose mean or sum is the reference's."""

    name = "not-summed"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        how = {self._how(pair, facts) for pair in pairs}
        if None in how or len(how) != 1:
            return None
        ranks = sorted({rank for pair in pairs for _, versions in pair.apart for rank in versions})
        if how == {"sum of groups"}:
            return (
                f"groups among {ranks_text(ranks)} keep their own parts: only the sum over all of them is the "
                "reference's, so these parameters are summed over too few ranks"
            )
        what = "sum" if how == {"sum"} else "mean"
        return (
            f"each of {ranks_text(ranks)} keeps its own part: the {what} of their gradients is the reference's, so "
            "these parameters are in no all-reduce"
        )

    def _how(self, pair: Pair, facts: Facts) -> str | None:
        if not pair.apart:
            return None
        size = float(pair.reference.double().norm())
        answers = dict.fromkeys(("mean", "sum", "sum of groups"), True)
        for part, versions in pair.apart:
            some = torch.stack([tensor.double() for tensor in versions.values()])
            wanted = part.of(pair.reference, tuple(some.shape[1:])).double()
            made = {"mean": some.mean(0), "sum": some.sum(0), "sum of groups": _different(some).sum(0)}
            for how in answers:
                answers[how] &= near(made[how], wanted, close_enough(facts), size)
        return next((how for how, fits in answers.items() if fits), None)


def _different(some: torch.Tensor) -> torch.Tensor:
    """Of ranks' versions [n, …] those that differ: ranks of one group have the same."""
    kept: list[torch.Tensor] = []
    for one in some:
        if not any(near(one, other, 1e-12) for other in kept):
            kept.append(one)
    return torch.stack(kept)


class PartOfTied:
    """A parameter with two uses, as embedding and head, whose gradients from both come together nowhere."""

    name = "part-of-tied"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        if not all(pair.name in facts.tied and self._of_uses(pair, facts) for pair in pairs):
            return None
        other = facts.tied[pairs[0].name][0]
        return (
            f"{pairs[0].name} is {other}, too: each of the two has the gradient of its own use only, and their sum is "
            "the reference's"
        )

    def _of_uses(self, pair: Pair, facts: Facts) -> bool:
        """Whether ranks have it under one of its names each, alike under one, and all names' sum is the reference's."""
        size = float(pair.reference.double().norm())
        for part, versions in pair.apart:
            by_use: dict[str, list[torch.Tensor]] = {}
            for rank, tensor in versions.items():
                names = facts.names.get(rank, {}).get(pair.name, set())
                if len(names) != 1:
                    return False
                by_use.setdefault(next(iter(names)), []).append(tensor.double())
            uses = list(by_use.values())
            if len(uses) < 2 or any(not near(one, same[0], close_enough(facts)) for same in uses for one in same):
                return False
            total = torch.stack([same[0] for same in uses]).sum(0)
            if not near(total, part.of(pair.reference, tuple(total.shape)), close_enough(facts), size):
                return False
        return bool(pair.apart)


class ClippedApart:
    """Each rank clips its own gradients, and they are averaged after that."""

    name = "wrong-norm"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        if all(pair.apart and pair.name in facts.together for pair in pairs) and any(step.clips for step in ours):
            norms = [step.clips[-1].norm for step in ours if step.clips]
            return (
                f"each rank clips its own gradients, by norms from {min(norms):.4g} to {max(norms):.4g}, and they are "
                "summed after that"
            )
        return None


class NoGradient:
    """Nothing arrives at these parameters."""

    name = "no-gradient"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        if all(not pair.ours[pair.covered].any() and pair.reference.any() for pair in pairs):
            return "their gradient is zero on every rank"
        return None


class PartsMixed:
    """Ranks that hold different parts of a parameter have one gradient, the mean or the sum of all parts' ones."""

    name = "parts-mixed"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        counts = {self._parts(pair, facts) for pair in pairs}
        count = counts.pop()
        if count is None or counts:
            return None
        return (
            f"they lie in {count} parts on different ranks, and all have one gradient, made of those of all parts: "
            "they are reduced as if they were copies"
        )

    def _parts(self, pair: Pair, facts: Facts) -> int | None:
        """In how many parts of one gradient it is cut."""
        if pair.apart or pair.name not in facts.cut or not pair.covered.all():
            return None
        size = float(pair.reference.double().norm())
        for count in (n for n in range(2, facts.layout.ranks + 1) if facts.layout.ranks % n == 0):
            for axis in (one for one in range(pair.ours.dim()) if pair.ours.shape[one] % count == 0):
                ours = torch.stack(pair.ours.double().chunk(count, axis))
                total = torch.stack(pair.reference.double().chunk(count, axis)).sum(0)
                alike = near(ours, ours[:1].expand_as(ours), close_enough(facts), size)
                if alike and any(near(ours[0], total / by, close_enough(facts), size) for by in (1, count)):
                    return count
        return None


class RowsMissing:
    """Rows of a table have no gradient, and all others the reference's."""

    name = "rows-missing"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        told = []
        for pair in pairs:
            if pair.reference.dim() != 2 or pair.apart:
                return None
            has = pair.ours.any(1)
            should = pair.reference.abs().amax(1) > facts.tolerance * float(pair.reference.abs().max())
            missing = should & ~has
            if not missing.any() or not near(pair.ours[has], pair.reference[has], close_enough(facts)):
                return None
            places = missing.nonzero().reshape(-1)
            told.append(f"{int(missing.sum())} rows of {pair.name}, {int(places[0])} to {int(places[-1])}, have none")
        return "; ".join(told)


class Stale:
    """Gradients of an earlier step: not cleared, or used again."""

    name = "stale"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        if not facts.earlier:
            return None
        before = facts.earlier[-1]
        if any(pair.name not in before for pair in pairs):
            return None
        shares = [_shares(pair.ours, [pair.reference, before[pair.name]], close_enough(facts)) for pair in pairs]
        now, then = shares[0] or (0.0, 0.0)
        if abs(then) <= 1e-3 or any(
            share is None or abs(share[0] - now) + abs(share[1] - then) > 1e-3 * abs(then) for share in shares
        ):
            return None
        if abs(now) < 1e-6:
            return f"they are those of step {facts.step}"
        return (
            f"they are {now:.4g} times those of step {facts.step + 1} and {then:.4g} times those of step {facts.step}, "
            "which nobody cleared"
        )


def _shares(ours: torch.Tensor, parts: Sequence[torch.Tensor], tolerance: float) -> tuple[float, ...] | None:
    """How much of each part makes ours; None where nothing does."""
    columns = torch.stack([part.double().reshape(-1) for part in parts], dim=1)
    wanted = ours.double().reshape(-1, 1)
    if columns.shape[0] <= columns.shape[1]:
        return None  # a few numbers can be made of anything
    found = torch.linalg.lstsq(columns, wanted).solution
    return tuple(found.reshape(-1).tolist()) if near(columns @ found, wanted, tolerance) else None


class SummedAgain:
    """What earlier micro-batches have accumulated is summed, or divided, once more with each later one."""

    name = "summed-again"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        lines = [_cleared(pair.name, facts, ours) for pair in pairs]
        if all(lines) and not truth.cleared.keys() & {pair.name for pair in pairs}:
            line = lines[0]
            return f"gradients are cleared within the step, at {line}: what earlier micro-batches have made is lost"
        if any(pair.apart or pair.name not in facts.accumulated for pair in pairs):
            return None
        found = [
            _shares(pair.ours, [pair.reference, facts.accumulated[pair.name]], close_enough(facts)) for pair in pairs
        ]
        times = found[0][1] if found[0] else 0.0
        if any(one is None or abs(one[0] - 1) > 1e-4 or abs(one[1] - times) > 1e-4 for one in found):
            return None
        ratio = _times_again(times)
        keys = [key for key, size in facts.layout.sizes.items() if abs(size - ratio) < 1e-3]
        if not keys:
            return None
        done = "summed over ranks" if times > 0 else "divided"
        return (
            f"with each micro-batch, what earlier ones of the step have accumulated is {done} once more: "
            f"{'×' if times > 0 else '÷'} {round(ratio)} = {' or '.join(f'the {words(key)}' for key in keys)}"
        )


def _cleared(name: str, facts: Facts, ours: Sequence[Step]) -> str:
    """The line that cleared a parameter's gradient within the step, on some rank; empty where none did."""
    for rank, step in enumerate(ours):
        for own in facts.names.get(rank, {}).get(name, {name}):
            if own in step.cleared:
                return step.cleared[own]
    return ""


def _times_again(times: float) -> float:
    """The n by which earlier micro-batches are summed or divided again, of ours = right + times · accumulated.

    s(m) the sum of micro-batch m and a(m) what is there after it: a(m) = n · a(m − 1) + s(m), or the whole of it is
    divided by n; then Σ s(m), which is right, is the last a less (n − 1), or plus (1 − 1/n), times the others. Where
    it is divided once, behind the last, it is (n − 1)/n times. 0: of no n.
    """
    if times > 1 - 1e-4:
        return times + 1
    return 1 / (1 - abs(times)) if 1e-4 < abs(times) < 1 else 0.0


#: In the order in which they are asked, of parameters by themselves.
BY_PARAMETER: tuple[Cause, ...] = (
    NoGradient(), ClippedApart(), PartOfTied(), NotSummed(), PartsMixed(), RowsMissing(), Stale(),
)  # fmt: skip
#: Of all that are left, together.
TOGETHER: tuple[Cause, ...] = (SummedAgain(), MeanOfMeans(), OwnNorm(), Precision(), LossItself())
