"""Causes of gradients that are wrong together because of the loss: how its parts are weighed, or what it is."""

import math
from collections.abc import Sequence

from pardemo.prove.causes.factors import factor
from pardemo.prove.facts import Facts, Pair
from pardemo.prove.record.facts import Step
from pardemo.world.errors import ranks_text


class MeanOfMeans:
    """Parts with different numbers of tokens weigh the same."""

    name = "mean-of-means"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        by_rank: list[tuple[int, float]] = []
        by_micro_batch: list[tuple[int, float]] = []
        with_loss = [step for step in ours if step.losses]  # a pipeline's other stages have none
        for step in with_loss:
            counts: dict[int, int] = {}
            for call in step.loss_calls:
                counts[call.micro_batch] = counts.get(call.micro_batch, 0) + call.targets - call.ignored
            if len(counts) != len(step.losses):
                return None
            by_micro_batch += zip(counts.values(), step.losses, strict=True)
            by_rank.append((sum(counts.values()), sum(step.losses)))
        return self._weighed(by_micro_batch, facts, max(len(with_loss), 1), truth) or self._weighed(
            by_rank, facts, 1, truth
        )

    def _weighed(self, parts: Sequence[tuple[int, float]], facts: Facts, ranks: int, truth: Step) -> str | None:
        """Whether parts' losses, each with its number of targets, make the reference's when they are weighed by it."""
        counts, values = [count for count, _ in parts], [value for _, value in parts]
        wanted = sum(truth.losses)
        if not wanted or len(set(counts)) < 2 or not sum(counts) or not all(map(math.isfinite, values)):
            return None
        plain = sum(values) / len(values)
        weighted = sum(n * v for n, v in zip(counts, values, strict=True)) / sum(counts)
        for times in (1, len(values) / ranks, ranks, len(values)):
            if math.isclose(times * weighted, wanted, rel_tol=max(facts.tolerance * 10, 1e-6)) and not math.isclose(
                times * plain, wanted, rel_tol=max(facts.tolerance * 10, 1e-6)
            ):
                return (
                    f"parts with {min(counts)} to {max(counts)} targets weigh the same: weighed by their targets, the "
                    "losses would be the reference's"
                )
        return None


class LossItself:
    """Outputs are right, and what is made of them is not: the loss, or its backward pass."""

    name = "loss"

    def explains(self, pairs: Sequence[Pair], facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        said = self._of_one_group(facts, ours) or self._value(facts, ours, truth)
        if said:
            return f"{said}; the outputs are right"
        last = max(facts.gradients, key=lambda name: facts.place(name.rpartition(".")[0]), default="")
        if last in {pair.name for pair in pairs} and math.isfinite(sum(truth.losses)):
            return (
                "the outputs and the loss are right, and gradients are wrong from the last module on: by the loss's "
                "backward pass, or by what is done to all gradients before the step"
            )
        return None

    def _of_one_group(self, facts: Facts, ours: Sequence[Step]) -> str | None:
        for rank, step in enumerate(ours):
            for other, its in enumerate(ours[:rank]):
                same = [m.samples for m in step.micro_batches] == [m.samples for m in its.micro_batches]
                if same and step.micro_batches and len(step.losses) == len(its.losses) and step.losses:
                    off = max(abs(a - b) for a, b in zip(step.losses, its.losses, strict=True))
                    if off > facts.tolerance * 10 * max(map(abs, step.losses)):
                        return (
                            f"{ranks_text([other, rank])} have the same samples, and differentiate different losses: "
                            f"{its.losses[0]:.6g} and {step.losses[0]:.6g}"
                        )
        return None

    def _value(self, facts: Facts, ours: Sequence[Step], truth: Step) -> str | None:
        sums = [sum(step.losses) for step in ours if step.losses]
        wanted = sum(truth.losses)
        if not sums or not wanted:
            return None
        found = min(
            sum(sums) / len(sums), sum(sums), key=lambda made: abs(made - wanted)
        )  # of ranks, or of their parts
        named = factor(facts.layout, found / wanted, 1e-4)
        if math.isclose(found, wanted, rel_tol=facts.tolerance * 10) or named:
            return None
        return f"the loss that is differentiated is {found:.6g} where the reference's is {wanted:.6g}"
