"""The norm by which gradients are clipped, and learning rates: where gradients are right and the step is not."""

import math
from typing import TYPE_CHECKING

import torch

from pardemo.prove.causes.factors import apart, words
from pardemo.prove.facts import Facts, Finding
from pardemo.prove.record.facts import Clip
from pardemo.prove.runner import Run
from pardemo.prove.whole import Atlas

if TYPE_CHECKING:  # which imports this
    from pardemo.prove.reference import Reference


def findings(reference: "Reference", other: Run, step: int, maps: Atlas, facts: Facts) -> list[Finding]:
    """Norms and learning rates that are not the reference's."""
    truth = reference.run.records[0].steps[step]
    made: list[Finding] = []
    for rank, record in enumerate(other.records):
        own = record.steps[step]
        if truth.clips and own.clips:
            wanted, found = truth.clips[-1], own.clips[-1]
            if not math.isclose(wanted.norm, found.norm, rel_tol=reference.tolerance * 10) and not made:
                why, cause = _norm(reference, other, step, maps, rank, wanted, found)
                made.append(
                    Finding(other.layout.name, step + 1, "clipping", cause, why, found.norm / wanted.norm)
                )  # fmt: skip
        rates = sorted(set(truth.learning_rates)), sorted(set(own.learning_rates))
        if rates[0] and rates[1] and not all(
            any(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-300) for b in rates[0]) for a in rates[1]
        ):  # fmt: skip
            made.append(_rate(reference, other, step, rates[0][-1], rates[1][-1]))
            break
    return made


def _rate(reference: "Reference", other: Run, step: int, wanted: float, found: float) -> Finding:
    later = [
        number
        for number, one in enumerate(reference.run.records[0].steps)
        if one.learning_rates and math.isclose(one.learning_rates[-1], found, rel_tol=1e-9)
    ]
    why = f"the learning rate of step {step + 1} is {found:.6g}, and the reference's {wanted:.6g}"
    if later:
        why += f", which has {found:.6g} in step {later[0] + 1}"
    for key, size in other.layout.sizes.items():
        if wanted and math.isclose(found / wanted, size, rel_tol=1e-6):
            why += f": × {size}, the {words(key)}"
        elif wanted and math.isclose(found / wanted, 1 / size, rel_tol=1e-6):
            why += f": ÷ {size}, the {words(key)}"
    steps = other.layout.values.get("accumulate")
    if not later and isinstance(steps, int) and steps > 1:
        why += f"; a scheduler that is stepped for each of {steps} micro-batches is ahead"
    return Finding(
        other.layout.name, step + 1, "learning rate", "learning-rate", why, found / wanted if wanted else None
    )


def _norm(
    reference: "Reference", other: Run, step: int, maps: Atlas, rank: int, wanted: Clip, found: Clip
) -> tuple[str, str]:
    told = apart(found.norm, wanted.norm)
    said = f"gradients are right, and clipped by a norm of {told[0]} where it is {told[1]}"
    gradients = other.tensors(step, rank, "gradient")
    local = math.sqrt(sum(float(t.double().square().sum()) for t in gradients.values()))
    if math.isclose(local, found.norm, rel_tol=reference.tolerance * 10):
        said += f": that is the norm of what rank {rank} holds, and not of the whole model"
    elif found.norm > wanted.norm:
        said += ": parts of it are counted more than once"
        squares = {name: float(t.double().square().sum()) for name, t in reference.whole[step].gradients.items()}
        surplus = found.norm**2 - wanted.norm**2
        for name, square in squares.items():
            if math.isclose(square, surplus, rel_tol=1e-4):
                said += f", {name}'s twice"
    else:
        said += ": parts of it are missing"
    return said, "wrong-norm"


def norm(tensors: dict[str, torch.Tensor]) -> float:
    """Of all together."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))
