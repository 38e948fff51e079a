"""From facts to findings: parameters that are wrong together, and the cause that explains them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pardemo.prove.causes import outputs
from pardemo.prove.causes.cause import Cause
from pardemo.prove.causes.clipped import clipped
from pardemo.prove.causes.factors import factor
from pardemo.prove.causes.gradients import BY_PARAMETER, TOGETHER
from pardemo.prove.causes.scales import Multiple
from pardemo.prove.facts import Facts, Finding, Pair
from pardemo.prove.record.facts import Step
from pardemo.prove.runner import Run
from pardemo.world.errors import ranks_text

if TYPE_CHECKING:  # which imports this
    from pardemo.prove.reference import Reference

#: Optimizers whose step of a part of a matrix is no part of the step of the whole.
WHOLE_MATRIX = ("Muon", "Shampoo", "SOAP", "DistributedShampoo", "Adafactor")
#: Optimizers whose step does not change when all gradients are multiplied by a number.
SCALE_FREE = ("Adam", "Adagrad", "Adamax", "NAdam", "RAdam", "Lion", "LAMB", "RMSprop", "Muon", "Adafactor")


def findings(facts: Facts, reference: "Reference", other: Run) -> list[Finding]:
    """Outputs that part, or gradients that are wrong, with their causes."""
    ours = [record.steps[facts.step] for record in other.records]
    truth = reference.run.records[0].steps[facts.step]
    if facts.parted:
        return [outputs.finding(facts, facts.parted)]
    wrong = _wrong(facts, reference, other)
    made: list[Finding] = []
    missing = _without(facts, ours)
    if missing:
        made.append(_finding(facts, missing, "no-gradient", "no gradient arrives, and they stay as they are"))
    wrong = [pair for pair in wrong if pair.name not in {one.name for one in missing}]
    for cause in BY_PARAMETER:
        alone = {pair.name: cause.explains([pair], facts, ours, truth) for pair in wrong}
        some = [pair for pair in wrong if alone[pair.name]]
        if some and (why := cause.explains(some, facts, ours, truth)):
            made.append(_finding(facts, some, cause.name, why))
        elif some:  # each for itself, and not all alike
            made += [
                _finding(facts, [pair for pair in some if alone[pair.name] == why], cause.name, why)
                for why in dict.fromkeys(alone[pair.name] or "" for pair in some)
            ]
        wrong = [pair for pair in wrong if not alone[pair.name]]
    made += _multiples(facts, wrong, ours, truth)
    return [_followed(facts, one, made) for one in made]


def _followed(facts: Facts, finding: Finding, others: Sequence[Finding]) -> Finding:
    """A finding that nobody can explain, as what may follow of one that a backward pass comes to before all of it."""
    if finding.cause or not finding.parameters:
        return finding
    last = facts.place(facts.first(finding.parameters))
    apart = _apart(facts, finding)
    for one in others:
        if one.cause and one.what == "gradients" and last < facts.place(one.module) and _apart(facts, one) == apart:
            why = f"they lie before {one.module}, where gradients are wrong already: mend that first, this may follow"
            return replace(finding, cause="follows", why=why)
    return finding


def _apart(facts: Facts, finding: Finding) -> set[int]:
    """Ranks that have different gradients of these parameters."""
    pairs = [facts.gradients[name] for name in finding.parameters if name in facts.gradients]
    return {rank for pair in pairs for _, versions in pair.apart for rank in versions}


def _wrong(facts: Facts, reference: "Reference", other: Run) -> list[Pair]:
    """Parameters whose gradient is not the reference's, unless what the optimizer made of it is."""
    free = reference.run.records[0].optimizer.startswith(SCALE_FREE) or not reference.run.records[0].optimizer
    # a step of clipped gradients does not change with their size; gradients were noted before they were clipped
    free |= all(run.records[0].steps[facts.step].clips for run in (reference.run, other))
    wrong = []
    for name, pair in facts.gradients.items():
        update = facts.updates.get(name)
        right = update is not None and update.equal and not update.apart
        if pair.apart:
            if not right:
                wrong.append(pair)
        elif not pair.equal and (free or not right):
            wrong.append(pair)
    return wrong


def wrong_gradients(facts: Facts, reference: "Reference", other: Run) -> set[str]:
    """Parameters whose gradient is wrong, or missing on all ranks."""
    ours = [record.steps[facts.step] for record in other.records]
    return {pair.name for pair in [*_wrong(facts, reference, other), *_without(facts, ours)]}


def _without(facts: Facts, ours: Sequence[Step]) -> list[Pair]:
    """Parameters that have no gradient on any rank, and do not change as the reference's do."""
    return [
        update
        for name, update in facts.updates.items()
        if name not in facts.gradients
        and not update.equal
        and not update.ours[update.covered].any()
        and update.reference.any()
    ]


def _multiples(facts: Facts, wrong: list[Pair], ours: Sequence[Step], truth: Step) -> list[Finding]:
    """What is left, by factor: plain multiples, then what is off in another way."""
    made = []
    limit = min(max(facts.tolerance * 100, 1e-6), 0.1)
    groups: dict[float | None, list[Pair]] = {}
    multiple = Multiple()
    for pair in wrong:
        plain = pair.rest <= limit and math.isfinite(pair.factor)
        if pair.reference.numel() == 1:  # a number is always some times another one
            plain = plain and multiple.cause([pair], facts) is not None
        key = next((k for k in groups if k is not None and plain and math.isclose(k, pair.factor, rel_tol=1e-3)), None)
        groups.setdefault(key if key is not None else pair.factor if plain else None, []).append(pair)
    for key, some in sorted(groups.items(), key=lambda item: item[0] is None):
        if key is not None and (named := multiple.cause(some, facts)):
            made.append(_finding(facts, some, *named))
        else:
            made.append(_together(facts, some, ours, truth))
    return made


def _together(facts: Facts, some: list[Pair], ours: Sequence[Step], truth: Step) -> Finding:
    causes: tuple[Cause, ...] = TOGETHER
    for cause in causes:
        if why := cause.explains(some, facts, ours, truth):
            return _finding(facts, some, cause.name, why)
    return _finding(facts, some, "", "nobody here knows why")


def _loss(ours: Sequence[Step]) -> float | None:
    """The mean over ranks of the losses that they differentiate in a step."""
    sums = [sum(step.losses) for step in ours if step.losses]
    return sum(sums) / len(sums) if sums else None


def _finding(facts: Facts, pairs: Sequence[Pair], cause: str, why: str) -> Finding:
    factors = [pair.factor for pair in pairs]
    alike = all(math.isclose(value, factors[0], rel_tol=1e-3) for value in factors)
    rest = max(pair.rest for pair in pairs)
    single = all(pair.reference.numel() == 1 for pair in pairs)
    names = tuple(sorted(pair.name for pair in pairs))
    return Finding(
        facts.layout.name, facts.step + 1, "gradients", cause, why,
        factors[0] if alike and math.isfinite(factors[0]) and (cause or not single) else None, rest, names,
        facts.first(names),
    )  # fmt: skip


def of_updates(facts: Facts, behind: Callable[[list[Pair]], bool]) -> list[Finding]:
    """Parameters after the step, where gradients are right.

    ``behind``: whether parameters are after the next step what they should be after this one.
    """
    wrong = [pair for pair in facts.updates.values() if not pair.equal or pair.apart]
    if not wrong:
        return []
    apart = [pair for pair in wrong if pair.apart]
    made = []
    if apart:
        ranks = sorted({rank for pair in apart for _, versions in pair.apart for rank in versions})
        why = f"{ranks_text(ranks)} hold different values after the step, of gradients that are the same"
        made.append(_update(facts, apart, _stale(apart, facts), why))
    rest = [pair for pair in wrong if not pair.apart]
    frozen = [pair for pair in rest if pair.name not in facts.gradients and not pair.reference.any()]
    if frozen:
        made.append(
            _update(facts, frozen, "frozen", "the reference leaves them as they are, and here they are trained")
        )
    rest = [pair for pair in rest if pair not in frozen]
    still = [pair for pair in rest if not pair.ours[pair.covered].any()]
    if still and behind(still):
        why = f"after step {facts.step + 2} they are what they should be after step {facts.step + 1}: one step behind"
        made.append(_update(facts, still, "stale", why))
    elif still:
        made.append(_update(facts, still, "no-gradient", "they have the right gradient, and the step leaves them"))
    rest = [pair for pair in rest if pair not in still]
    if why := clipped(facts, rest):
        made.append(_update(facts, rest, "clipped", why))
    elif rest:
        why = "their gradient is right, and what the optimizer makes of it is not"
        whole = facts.optimizer if facts.optimizer.startswith(WHOLE_MATRIX) else ""
        if whole and all(pair.name in facts.cut and pair.reference.dim() == 2 for pair in rest):
            why += f": {whole} needs the whole matrix of a gradient, and ranks step with their parts"
        else:
            why += ": moments, weight decay or the master copy" if facts.step else ": weight decay, groups or a copy"
        made.append(_update(facts, rest, "optimizer-state", why))
    return made


def _stale(apart: list[Pair], facts: Facts) -> str:
    """Whether on some ranks the parameters are those of before the step."""
    for pair in apart:
        for part, versions in pair.apart:
            before = pair.ours  # what changed; zero where nothing did
            shape = tuple(next(iter(versions.values())).shape)
            if not part.of(before, shape).any():
                return "stale"
    return "stale" if facts.step else "optimizer-state"


def _update(facts: Facts, pairs: Sequence[Pair], cause: str, why: str) -> Finding:
    made = _finding(facts, pairs, cause, why)
    return Finding(
        made.layout, made.step, "parameters after the step", cause, why, made.factor, made.rest, made.parameters,
        made.module,
    )  # fmt: skip


def printed(facts: Facts, reference: "Reference", other: Run) -> list[Finding]:
    """A printed loss that is a number of the layout times what it should be, where what is differentiated is right."""
    truth = reference.run.records[0].steps[facts.step]
    wanted = sum(truth.losses)
    if not truth.printed or not wanted:
        return []
    shown = truth.printed[-1] / wanted
    for rank, record in enumerate(other.records):
        step = record.steps[facts.step]
        if not step.printed or not step.losses:
            continue
        mean = _loss([one.steps[facts.step] for one in other.records]) or 0.0
        together = sum(sum(one.steps[facts.step].losses) for one in other.records)
        right = [shown * value for value in (mean, together, sum(step.losses), *step.losses, wanted) if value]
        tolerance = max(10 ** -_digits(step.printed[-1]), 1e-3)
        if any(math.isclose(step.printed[-1], value, rel_tol=tolerance) for value in right):
            continue
        for value in (mean, sum(step.losses), wanted):
            named = factor(facts.layout, step.printed[-1] / (shown * value), tolerance) if value else None
            if named:
                why = f"rank {rank} prints a loss of {step.printed[-1]:.6g} where it is {shown * value:.6g}"
                why += f": {named.told()}"
                return [
                    Finding(other.layout.name, facts.step + 1, "printed", "printed-loss", why,
                            step.printed[-1] / (shown * value))
                ]  # fmt: skip
    return []


def _digits(value: float) -> int:
    return min(len(f"{value:.10g}".partition(".")[2]), 3)
