"""Finds a step's wrong outputs, gradients and updates, grouped by their cause."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from pardemo.script.compare.differences import ComparedOutput, Finding, StepComparison
from pardemo.script.compare.gradient_causes import BY_PARAMETER, TOGETHER, multiple_cause, plain_limit, ranks_of
from pardemo.script.compare.pairs import Pair
from pardemo.script.compare.run_layouts import layout_factor, size_text
from pardemo.world.errors import ranks_text

#: Modules that normalise over the samples that they see.
_BATCH = ("BatchNorm", "SyncBatchNorm")


def output_finding(comparison: StepComparison, parted: list[ComparedOutput]) -> Finding:
    """Describes outputs that differ from the reference's; the first module is where the difference begins."""
    first = parted[0]
    rest = float(first.difference.norm()) / (float(first.reference.norm()) or 1.0)
    names = sorted(comparison.moved, key=lambda name: (comparison.position(name.rpartition(".")[0]), name))
    if names:  # weights that were loaded into others: the first of their modules is where the layout parts
        module, cause = names[0].rpartition(".")[0], "initial-parameters"
        why = (
            f"what some ranks have as {names[0]} are values of the reference's {comparison.moved[names[0]]}: the "
            "weights were loaded or cut in other places"
        )
    else:
        module, wrong = first.module, [output for output in parted if output.module == first.module]
        cause, why = _output_cause(comparison, first, wrong)
        ranks = ranks_text(sorted({output.rank for output in wrong}))
        why = f"the output of {module} ({first.kind}) is not the reference's on {ranks}{': ' * bool(why)}{why}"
    return Finding(comparison.layout.name, comparison.step + 1, "forward", cause, why, None, rest, tuple(names), module)


def _output_cause(
    comparison: StepComparison, first: ComparedOutput, all_ranks: list[ComparedOutput]
) -> tuple[str, str]:
    if first.kind.startswith(_BATCH):
        return "buffers", "it normalises by the samples of its own rank, which are fewer: choose SyncBatchNorm"
    if first.whole_inputs is False and "Embedding" in first.kind:
        return "positions", "what it looks up is not what the reference looks up for the same tokens"
    constant = _is_constant(first.difference)
    sizes = {"ranks": comparison.layout.ranks} | comparison.layout.sizes
    key = next((key for key in ("tp", "ep", "ranks") if sizes.get(key, 1) > 1), "")
    if key and constant and first.difference.abs().max() > 0:
        group = f"{sizes[key]} ranks ({size_text(key)})"
        return "counted-per-rank", f"the same is added everywhere, as a bias that each of {group} adds before the sum"
    if _is_rotation(first):
        return "positions", "it turns vectors by another angle: their lengths are right, as of rotated positions"
    if {"cp", "sp"} & comparison.layout.sizes.keys() and _some_tokens_right(comparison, all_ranks):
        return "mask", (
            "some tokens are right and others are not: these see others than in the reference, by the mask or by the "
            "positions of a cut sequence"
        )
    return "", ""


def _some_tokens_right(comparison: StepComparison, wrong: list[ComparedOutput]) -> bool:
    """Whether some tokens' outputs are the reference's: a fault of the layer itself would change all of them.

    They are right on a rank that is not among those where the module is wrong; each stage has it on as many ranks.
    """
    if len({output.rank for output in wrong}) < comparison.layout.ranks // comparison.layout.size("pp"):
        return True
    return any(
        bool(
            (output.difference.abs().amax(1) <= comparison.tolerance * (output.reference.abs().max() or 1.0) * 10).any()
        )
        for output in wrong
    )


def _is_constant(difference: torch.Tensor) -> bool:
    """Whether both projections are off by one number in every cell."""
    if len(difference) < 2:
        return False
    projections = difference[:, :2]
    return bool((projections - projections.mean(0)).abs().max() <= 1e-6 * projections.abs().max())


def _is_rotation(first: ComparedOutput) -> bool:
    """Whether all vectors have the reference's norm, and not its directions."""
    norms, scale = first.difference[:, 2].abs().max(), first.reference[:, 2].abs().max()
    norms_wanted = first.reference[:, 2]
    if bool(norms_wanted.max() - norms_wanted.min() <= 1e-3 * scale):
        return False  # what normalises gives vectors of one length, whatever goes in
    return bool(norms <= 1e-6 * scale) and bool(first.difference[:, :2].abs().max() > 1e-3 * scale)


#: Relative: what a norm and a limit are rounded by where a step is fp32's, and a thousandth of what is looked for.
_NEAR = 1e-4


def clipping_sentence(comparison: StepComparison, pairs: Sequence[Pair]) -> str:
    """Explains updates that are off by a clip of whole gradients; returns an empty text where they are not.

    The factor of an update is then the limit over the gradients' norm, where this layout clips; or the norm over the
    limit, where only the reference does. A limit is a number that people write: of two digits.
    """
    factors = [pair.factor for pair in pairs]
    if (
        not pairs or len(pairs) < len(comparison.updates) or comparison.step >= len(comparison.norms)
    ):  # a clip leaves no parameter out
        return ""
    factor, norm = factors[0], comparison.norms[comparison.step]
    alike = all(math.isclose(other, factor, rel_tol=_NEAR) for other in factors)
    if not alike or factor <= 0 or max(pair.rest for pair in pairs) > _NEAR:
        return ""
    limit = factor * norm if factor < 1 else norm / factor
    written = float(f"{limit:.1e}")
    if not math.isclose(limit, written, rel_tol=_NEAR):
        return ""
    if factor > 1:
        return f"the reference clips gradients of norm {norm:.4g} to {written:g}, and this layout does not clip them"
    return (
        f"the step is taken as if gradients of norm {norm:.4g} were clipped to {written:g}, and the reference does not "
        "clip them: DeepSpeed does so unless its configuration says gradient_clipping"
    )


#: Optimizers whose step of a part of a matrix is no part of the step of the whole.
WHOLE_MATRIX = ("muon", "shampoo", "soap", "adafactor")
#: What is in the names of optimizers whose step does not change when all gradients are multiplied by a number.
SCALE_FREE = ("adam", "adagrad", "adan", "lion", "lamb", "lars", "rmsprop", "sophia", "sign", "prodigy", *WHOLE_MATRIX)


def gradient_findings(comparison: StepComparison) -> list[Finding]:
    """Finds outputs that differ, or gradients that are wrong, with their causes."""
    if comparison.parted:
        return [output_finding(comparison, comparison.parted)]
    wrong, missing = _wrong_pairs(comparison), _pairs_without_gradient(comparison)
    findings: list[Finding] = []
    if missing:
        findings.append(_finding(comparison, missing, "no-gradient", "no gradient arrives, and they stay as they are"))
    for cause in BY_PARAMETER:
        alone = {pair.name: cause.explains([pair], comparison) for pair in wrong}
        explained = [pair for pair in wrong if alone[pair.name]]
        if explained and (why := cause.explains(explained, comparison)):
            findings.append(_finding(comparison, explained, cause.name, why))
        elif explained:  # each for itself, and not all alike
            findings += [
                _finding(comparison, [pair for pair in explained if alone[pair.name] == why], cause.name, why)
                for why in dict.fromkeys(alone[pair.name] or "" for pair in explained)
            ]
        wrong = [pair for pair in wrong if not alone[pair.name]]
    findings += _findings_by_factor(comparison, wrong)
    return [_as_consequence(comparison, finding, findings) for finding in findings]


def _as_consequence(comparison: StepComparison, finding: Finding, others: Sequence[Finding]) -> Finding:
    """Marks an unexplained finding as a possible consequence of one that the backward pass reaches before it."""
    if finding.cause or not finding.parameters:
        return finding
    last, apart = comparison.position(comparison.first_module(finding.parameters)), _ranks_apart(comparison, finding)
    for other in others:
        known = other.cause and other.what == "gradients"
        if known and last < comparison.position(other.module) and _ranks_apart(comparison, other) == apart:
            why = f"they lie before {other.module}, where gradients are wrong already: mend that first, this may follow"
            return replace(finding, cause="follows", why=why)
    return finding


def _ranks_apart(comparison: StepComparison, finding: Finding) -> set[int]:
    """Returns the ranks that have different gradients of these parameters."""
    return ranks_of(comparison.gradients[name] for name in finding.parameters if name in comparison.gradients)


def _wrong_pairs(comparison: StepComparison) -> list[Pair]:
    """Returns parameters whose gradient differs from the reference's, unless the optimizer's update of it is right."""
    free = any(kind in comparison.optimizer.lower() for kind in SCALE_FREE) or not comparison.optimizer
    # a step of clipped gradients does not change with their size; gradients were noted before they were clipped
    free |= bool(comparison.reference_step.clips and comparison.steps[0].clips)
    wrong = []
    for name, pair in comparison.gradients.items():
        update = comparison.updates.get(name)
        right = update is not None and update.equal and not update.apart
        if (pair.apart and not right) or not (pair.apart or pair.equal or (right and not free)):
            wrong.append(pair)
    return wrong


def wrong_gradients(comparison: StepComparison) -> set[str]:
    """Names the parameters whose gradient is wrong, or missing on all ranks."""
    return {pair.name for pair in [*_wrong_pairs(comparison), *_pairs_without_gradient(comparison)]}


def _pairs_without_gradient(comparison: StepComparison) -> list[Pair]:
    """Returns parameters that have no gradient on any rank, and do not change as the reference's do."""
    return [
        update
        for name, update in comparison.updates.items()
        if name not in comparison.gradients
        and not update.equal
        and not update.candidate[update.covered].any()
        and update.reference.any()
    ]


def _findings_by_factor(comparison: StepComparison, wrong: list[Pair]) -> list[Finding]:
    """Groups the remaining gradients by factor: plain multiples first, then those that are off otherwise."""
    findings = []
    groups: dict[float | None, list[Pair]] = {}
    for pair in wrong:
        plain = pair.rest <= plain_limit(comparison) and math.isfinite(pair.factor)
        if pair.reference.numel() == 1:  # a number is always some times another one
            plain = plain and multiple_cause([pair], comparison) is not None
        key = next((k for k in groups if k is not None and plain and math.isclose(k, pair.factor, rel_tol=1e-3)), None)
        groups.setdefault(key if key is not None else pair.factor if plain else None, []).append(pair)
    for key, group in sorted(groups.items(), key=lambda item: item[0] is None):
        if key is not None and (named := multiple_cause(group, comparison)):
            findings.append(_finding(comparison, group, *named))
        else:
            explanations = ((cause.name, why) for cause in TOGETHER if (why := cause.explains(group, comparison)))
            findings.append(_finding(comparison, group, *next(explanations, ("", "nobody here knows why"))))
    return findings


def _finding(comparison: StepComparison, pairs: Sequence[Pair], cause: str, why: str) -> Finding:
    factors = [pair.factor for pair in pairs]
    alike = all(math.isclose(value, factors[0], rel_tol=1e-3) for value in factors)
    rest = max(pair.rest for pair in pairs)
    single = all(pair.reference.numel() == 1 for pair in pairs)
    names = tuple(sorted(pair.name for pair in pairs))
    return Finding(
        comparison.layout.name, comparison.step + 1, "gradients", cause, why,
        factors[0] if alike and math.isfinite(factors[0]) and (cause or not single) else None, rest, names,
        comparison.first_module(names),
    )  # fmt: skip


def update_findings(comparison: StepComparison, behind: Callable[[list[Pair]], bool]) -> list[Finding]:
    """Finds parameters that are wrong after the step though their gradients are right.

    ``behind``: whether parameters are after the next step what they should be after this one.
    """
    apart = [pair for pair in comparison.updates.values() if pair.apart]
    wrong = [pair for pair in comparison.updates.values() if not pair.equal and not pair.apart]
    frozen = [pair for pair in wrong if pair.name not in comparison.gradients and not pair.reference.any()]
    still = [pair for pair in wrong if pair not in frozen and not pair.candidate[pair.covered].any()]
    rest = [pair for pair in wrong if pair not in frozen and pair not in still]
    findings = []
    if apart:
        kept = any(
            not part.cut_from(pair.candidate, tuple(next(iter(versions.values())).shape)).any()  # nothing has changed
            for pair in apart for part, versions in pair.apart
        )  # fmt: skip
        cause = "stale" if comparison.step or kept else "optimizer-state"
        ranks = ranks_text(sorted(ranks_of(apart)))
        why = f"{ranks} hold different values after the step, of gradients that are the same"
        findings.append(_update_finding(comparison, apart, cause, why))
    if frozen:
        why = "the reference leaves them as they are, and here they are trained"
        findings.append(_update_finding(comparison, frozen, "frozen", why))
    if still and behind(still):
        step = comparison.step + 1
        why = f"after step {step + 1} they are what they should be after step {step}: one step behind"
        findings.append(_update_finding(comparison, still, "stale", why))
    elif still:
        why = "they have the right gradient, and the step leaves them"
        findings.append(_update_finding(comparison, still, "no-gradient", why))
    if why := clipping_sentence(comparison, rest):
        findings.append(_update_finding(comparison, rest, "clipped", why))
    elif rest:
        why = "their gradient is right, and what the optimizer makes of it is not"
        names = (name for name in comparison.optimizer.split() if any(kind in name.lower() for kind in WHOLE_MATRIX))
        optimizer = next(names, "")
        if optimizer and all(pair.name in comparison.cut and pair.reference.dim() == 2 for pair in rest):
            why += f": {optimizer} needs the whole matrix of a gradient, and ranks step with their parts"
        else:
            why += (
                ": moments, weight decay or the master copy" if comparison.step else ": weight decay, groups or a copy"
            )
        findings.append(_update_finding(comparison, rest, "optimizer-state", why))
    return findings


def _update_finding(comparison: StepComparison, pairs: Sequence[Pair], cause: str, why: str) -> Finding:
    return replace(_finding(comparison, pairs, cause, why), what="parameters after the step")


def printed_findings(comparison: StepComparison) -> list[Finding]:
    """Finds a printed loss that is a multiple of the right one while the differentiated loss is right."""
    reference = comparison.reference_step
    wanted = sum(reference.losses)
    if not reference.printed or not wanted:
        return []
    shown = reference.printed[-1] / wanted
    together = sum(comparison.losses)
    mean = together / max(len(comparison.losses), 1)
    for rank, step in enumerate(comparison.steps):
        if not step.printed or not step.losses:
            continue
        printed, rank_loss = step.printed[-1], sum(step.losses)
        right = [shown * value for value in (mean, together, rank_loss, *step.losses, wanted) if value]
        tolerance = max(10 ** -min(len(f"{printed:.10g}".partition(".")[2]), 3), 1e-3)
        if any(math.isclose(printed, value, rel_tol=tolerance) for value in right):
            continue
        for value in (mean, rank_loss, wanted):
            factor = printed / (shown * value) if value else 0.0
            if named := layout_factor(comparison.layout, factor, tolerance):
                why = f"rank {rank} prints a loss of {printed:.6g} where it is {shown * value:.6g}: {named.text}"
                return [Finding(comparison.layout.name, comparison.step + 1, "printed", "printed-loss", why, factor)]
    return []
