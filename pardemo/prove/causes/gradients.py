"""Causes of gradients that are not the reference's, each judged by the tensors of some parameters."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from pardemo.prove.causes.factors import factor, words
from pardemo.prove.causes.losses import LossItself, MeanOfMeans
from pardemo.prove.facts import Facts, Pair
from pardemo.prove.record.facts import Step
from pardemo.world.errors import ranks_text


class Cause(Protocol):
    """Looks at parameters that are wrong together; a sentence where it explains them all, else None."""

    name: str

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None: ...


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float, scale: float | None = None) -> bool:
    """Whether two tensors are the same up to a part of the second's norm."""
    size = float(b.double().norm()) if scale is None else scale
    return float((a.double() - b.double()).norm()) <= tolerance * max(size, 1e-300)


def close_enough(facts: Facts) -> float:
    """What a predicate takes for the same: ten times what a comparison does, since it computes with both."""
    return facts.tolerance * 10


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
        if any(pair.apart or pair.name not in facts.accumulated for pair in pairs):
            return None
        found = [
            _shares(pair.ours, [pair.reference, facts.accumulated[pair.name]], close_enough(facts)) for pair in pairs
        ]
        times = found[0][1] if found[0] else 0.0
        if any(one is None or abs(one[0] - 1) > 1e-4 or abs(one[1] - times) > 1e-4 for one in found):
            return None
        # s(m) the sum of micro-batch m and a(m) what is there after it: a(m) = n · a(m − 1) + s(m), or the whole of it
        # is divided by n; then Σ s(m), which is right, is the last a less (n − 1), or plus (1 − 1/n), times the others
        ratio = times + 1 if times > 0 else 1 / (1 + times) if -1 < times < 0 else 0.0
        keys = [key for key, size in facts.layout.sizes.items() if abs(size - ratio) < 1e-3]
        if not keys:
            return None
        done = "summed over ranks" if times > 0 else "divided"
        return (
            f"with each micro-batch, what earlier ones of the step have accumulated is {done} once more: "
            f"{'×' if times > 0 else '÷'} {round(ratio)} = {' or '.join(f'the {words(key)}' for key in keys)}"
        )


class Precision:
    """Each element is the reference's, rounded to fewer bits."""

    name = "precision"

    #: Types and the bits of their mantissas, those with the fewest first.
    TYPES = (("bf16", 8), ("fp16", 11), ("fp32", 24))

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        worst = 0.0
        for pair in pairs:
            if not 0.95 < pair.factor < 1.05:
                return None
            scale = float(pair.reference.abs().max())
            large = pair.covered & (pair.reference.abs() > 0.05 * scale)
            off = ((pair.ours - pair.reference).abs() / pair.reference.abs().clamp(min=1e-300))[large]
            worst = max(worst, float(off.max()) if off.numel() else 0.0)
        for type_, bits in self.TYPES:
            # a sum of rounded numbers is off by some roundings, as much as 16
            if facts.tolerance < worst < 2.0 ** -(bits - 4) and all(self._rounded(pair, bits, facts) for pair in pairs):
                return f"each element is off by at most {worst:.1e} of itself: rounded to {type_} on the way"
        return None

    def _rounded(self, pair: Pair, bits: int, facts: Facts) -> bool:
        """Whether each number has no more bits than these, as it is or before it was divided by ranks."""
        values = pair.ours[pair.covered].double()
        values = values[values != 0]
        for times in (1, *facts.layout.sizes.values()):
            mantissa, _ = torch.frexp(values * times)
            steps = mantissa * 2.0**bits
            if bool(((steps - steps.round()).abs() <= 1e-3).all()):
                return True
        return False


class OwnNorm:
    """Clipped more often than the reference; or all have one factor, where the reference's norm is always the limit."""

    name = "wrong-norm"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        if any(len(step.clips) > max(len(truth.clips), 1) for step in ours):
            times = max(len(step.clips) for step in ours)
            return f"gradients are clipped {times} times in a step, each time what is there by then"
        wanted = math.sqrt(sum(float(p.reference.double().square().sum()) for p in facts.gradients.values()))
        found = math.sqrt(sum(float(p.ours.double().square().sum()) for p in facts.gradients.values()))
        if len({round(pair.factor, 6) for pair in pairs}) != 1 or math.isclose(wanted, found, rel_tol=1e-6):
            return None
        if len(pairs) < len(facts.gradients) or factor(facts.layout, pairs[0].factor, 1e-4):
            return None
        if len(facts.norms) < 2 or not all(math.isclose(one, wanted, rel_tol=1e-6) for one in facts.norms):
            return None  # nothing says that the reference is clipped
        return (
            f"all gradients are {pairs[0].factor:.4g} times the reference's, and their norm is {found:.4g} where the "
            f"reference's is {wanted:.4g}: clipped by another norm"
        )


class Multiple:
    """All gradients, or those of some parameters, are a number of the layout times the reference's."""

    name = "multiple"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        found = self.cause(pairs, facts)
        return None if found is None else found[1]

    def cause(self, pairs: Sequence[Pair], facts: Facts) -> tuple[str, str] | None:
        """The cause's name and the sentence."""
        limit = max(facts.tolerance * 100, 1e-6)
        if any(pair.rest > limit for pair in pairs):
            return None
        named = factor(facts.layout, pairs[0].factor, max(facts.tolerance * 100, 1e-5))
        if named is None:
            return None
        every = len(pairs) >= 0.9 * len(facts.gradients)
        key, told = named.keys[0], named.told()
        if len(named.keys) > 1 and named.number not in (facts.layout.sizes[key] for key in named.keys):
            return "sum-for-mean" if named.times else "mean-for-sum", told
        if facts.layout.sizes.get("pp") and key in ("micro_batches", "accumulate", "pp"):
            return "stage-scale", f"{told}: the last stage's loss weighs micro-batches wrongly"
        if key in ("accumulate", "micro_batches") and every:
            if named.times:
                return "accumulation-not-divided", f"{told}: a sum over micro-batches where a mean was meant"
            return "accumulation-divided-twice", f"{told}: the loss is divided by it twice"
        if key == "ep" and {pair.name for pair in pairs} <= facts.cut:
            how = "too few ranks: those that have the same experts, and not all" if named.times else "too many ranks"
            return "sum-for-mean" if named.times else "mean-for-sum", f"{told}: a sum is divided by {how}"
        own = {"dp", "ranks"} & set(named.keys)  # ranks that have whole models
        if every or own or self._held_by_few(pairs, facts):
            if named.times:
                return "sum-for-mean", f"{told}: a sum over ranks where a mean was meant"
            return "mean-for-sum", f"{told}: a mean over ranks where a sum was meant, or divided by it twice"
        if named.times:
            return "counted-per-rank", f"{told}: counted once for each of the ranks that hold it alike"
        return "mean-for-sum", f"{told}: divided by the {words(key)} once too often"

    def _held_by_few(self, pairs: Sequence[Pair], facts: Facts) -> bool:
        """Whether not all ranks have these parameters, as experts."""
        return all(facts.holders.get(pair.name, facts.layout.ranks) < facts.layout.ranks for pair in pairs)


#: In the order in which they are asked, of parameters by themselves.
BY_PARAMETER: tuple[Cause, ...] = (NoGradient(), ClippedApart(), PartOfTied(), NotSummed(), RowsMissing(), Stale())
#: Of all that are left, together.
TOGETHER: tuple[Cause, ...] = (SummedAgain(), MeanOfMeans(), OwnNorm(), Precision(), LossItself())
