"""Causes by which gradients are a number times the reference's, or off by as much as they are rounded."""

import math
from collections.abc import Sequence

import torch

from pardemo.prove.causes.factors import apart, factor, words
from pardemo.prove.facts import Facts, Pair
from pardemo.prove.record.facts import Step


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
        times = max(len(step.clips) for step in ours)
        norms = [clip.norm for step in ours for clip in step.clips]  # one for all: each part of them is clipped once
        if times > max(len(truth.clips), 1) and not math.isclose(min(norms), max(norms), rel_tol=1e-6):
            return f"gradients are clipped {times} times in a step, each time what is there by then"
        wanted = math.sqrt(sum(float(p.reference.double().square().sum()) for p in facts.gradients.values()))
        found = math.sqrt(sum(float(p.ours.double().square().sum()) for p in facts.gradients.values()))
        if len({round(pair.factor, 6) for pair in pairs}) != 1 or math.isclose(wanted, found, rel_tol=1e-6):
            return None
        if len(pairs) < len(facts.gradients) or factor(facts.layout, pairs[0].factor, 1e-4):
            return None
        often = len(facts.norms) > 1 and all(math.isclose(one, wanted, rel_tol=1e-6) for one in facts.norms)
        if not often and not self._limit(wanted, facts):
            return None  # nothing says that the reference is clipped
        ours_told, wanted_told = apart(found, wanted)
        return (
            f"all gradients are {apart(pairs[0].factor, 1.0)[0]} times the reference's, and their norm is {ours_told} "
            f"where the reference's is {wanted_told}: clipped by another norm"
        )

    def _limit(self, norm: float, facts: Facts) -> bool:
        """Whether a norm is a number that people write as a limit, of two digits."""
        return math.isclose(norm, float(f"{norm:.1e}"), rel_tol=min(facts.tolerance * 100, 1e-5))


class Multiple:
    """All gradients, or those of some parameters, are a number of the layout times the reference's."""

    name = "multiple"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        found = self.cause(pairs, facts)
        return None if found is None else found[1]

    def cause(self, pairs: Sequence[Pair], facts: Facts) -> tuple[str, str] | None:
        """The cause's name and the sentence."""
        limit = min(max(facts.tolerance * 100, 1e-6), 0.1)
        if any(pair.rest > limit for pair in pairs):
            return None
        named = factor(facts.layout, pairs[0].factor, min(max(facts.tolerance * 100, 1e-5), 0.03))
        if named is None:
            return None
        every = len(pairs) >= 0.9 * len(facts.gradients)
        key, told = named.keys[0], named.told()
        if len(named.keys) > 1 and named.number not in (facts.layout.sizes[key] for key in named.keys):
            return "sum-for-mean" if named.times else "mean-for-sum", told
        if facts.layout.sizes.get("pp") and key in ("micro_batches", "accumulate", "pp"):
            return "stage-scale", f"{told}: the last stage's loss weighs micro-batches wrongly"
        if key in ("accumulate", "micro_batches"):
            if named.times and not every:
                return "accumulation-not-divided", f"{told}: the part of each micro-batch has its full weight"
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
