"""From facts to findings: parameters that are wrong together, outputs that part, and the cause that explains them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pardemo.script.compare.gradients import BY_PARAMETER, TOGETHER, multiple_cause
from pardemo.script.compare.layouts import SIZES, Layout, layout_factor, size_text
from pardemo.script.compare.parameter_map import ParameterMap, Part
from pardemo.script.compare.runs import ComparedOutput, Facts, Finding, Pair, Run
from pardemo.world.errors import ranks_text


def initial_findings(
    other: Run,
    maps: ParameterMap,
    replicas: dict[str, list[tuple[Part, dict[int, torch.Tensor]]]],
    uncovered: set[str],
    order: Mapping[str, int],
    reference: Mapping[str, torch.Tensor],
) -> list[Finding]:
    """What is wrong with the parameters with which the layout begins.

    Args:
        uncovered: parameters of which no rank has some elements.
        order: the reference's modules by when they run. reference: its parameters.
    """

    def first(names: list[str]) -> str:
        """The module that runs first of those whose pieces have other values than the reference's."""
        modules = set()
        for rank, parts in maps.parts.items():
            for own_name, part in parts.items():
                if part.name in names and own_name in own[rank]:
                    value = own[rank][own_name]
                    if not torch.equal(part.cut_from(reference[part.name], tuple(value.shape)), value):
                        modules.add(own_name.rpartition(".")[0])
        modules = modules or {name.rpartition(".")[0] for name in names}
        return min(modules, key=lambda module: order.get(module, len(order)), default="")

    own = [other.tensors(0, rank, "before") for rank in range(other.layout.ranks)]
    unknown = {name for of_rank in maps.unknown.values() for name in of_rank}
    names = [
        name
        for name in sorted(unknown | maps.different | uncovered)
        if name in unknown | uncovered and _same_on_ranks(name, own)
    ]
    cause = "initial-parameters"
    if names and not unknown and all(name in reference and name not in maps.different for name in names):
        why = (
            "ranks hold one and the same part of them, and the other parts nobody: ranks that hold different parts "
            "have been given one rank's values, as a wrapper does that broadcasts them from its first rank"
        )
    elif names:
        cause = "same-random-numbers"
        why = (
            "their parts on different ranks are the same numbers: ranks that hold different parts of a parameter have "
            "drawn from one seed"
        )
    elif replicas:
        names = sorted(replicas)
        ranks = sorted({rank for apart in replicas.values() for _, versions in apart for rank in versions})
        why = (
            f"{ranks_text(ranks)} begin with different values of the same parameters: nobody broadcasts them, and the "
            "ranks' seeds differ"
        )
    elif maps.different:
        names = sorted(maps.different)
        why = (
            "they begin with other values than the reference's: build the whole model from one seed and cut it, or "
            "load the same weights"
        )
    else:
        return []
    return [Finding(other.layout.name, 1, "parameters", cause, why, parameters=tuple(names), module=first(names))]


def overwritten_finding(other: Run, names: list[str], order: Mapping[str, int]) -> Finding:
    """Parameters that no rank has, since ranks with other parts of the model were given the same values."""
    modules = {name.rpartition(".")[0] for name in names}
    return Finding(
        other.layout.name, 1, "parameters", "initial-parameters",
        "no rank has them, and other ranks have the same ones twice: ranks that hold different parts of the model have "
        "been given one rank's values, as a wrapper does that broadcasts them from its first rank",
        parameters=tuple(names), module=min(modules, key=lambda module: order.get(module, len(order)), default=""),
    )  # fmt: skip


def _same_on_ranks(name: str, own: list[dict[str, torch.Tensor]]) -> bool:
    some = [tensors[name] for tensors in own if name in tensors]
    return len(some) > 1 and any(torch.equal(a, b) for n, a in enumerate(some) for b in some[n + 1 :])


#: Modules that normalise over the samples that they see.
_BATCH = ("BatchNorm", "SyncBatchNorm")


def output_finding(facts: Facts, parted: list[ComparedOutput]) -> Finding:
    """What is to be said of outputs that are not the reference's; the first module is where they part."""
    first = parted[0]
    if facts.moved:
        return _loaded_elsewhere(facts, first)
    ranks = sorted({output.rank for output in parted if output.module == first.module})
    cause, why = _output_cause(facts, first, [output for output in parted if output.module == first.module])
    where = f"the output of {first.module} ({first.kind}) is not the reference's on {ranks_text(ranks)}"
    size = float(first.reference.norm()) or 1.0
    return Finding(
        facts.layout.name, facts.step + 1, "forward", cause, f"{where}{': ' + why if why else ''}",
        None, float(first.difference.norm()) / size, (), first.module,
    )  # fmt: skip


def _loaded_elsewhere(facts: Facts, first: ComparedOutput) -> Finding:
    """Weights that were loaded into others: the first of their modules is where the layout parts."""
    names = sorted(facts.moved, key=lambda name: (facts.place(name.rpartition(".")[0]), name))
    return Finding(
        facts.layout.name, facts.step + 1, "forward", "initial-parameters",
        f"what some ranks have as {names[0]} are values of the reference's {facts.moved[names[0]]}: the weights were "
        "loaded or cut in other places", None, float(first.difference.norm()) / (float(first.reference.norm()) or 1.0),
        tuple(names), names[0].rpartition(".")[0],
    )  # fmt: skip


def _output_cause(facts: Facts, first: ComparedOutput, all_ranks: list[ComparedOutput]) -> tuple[str, str]:
    if first.kind.startswith(_BATCH):
        return "buffers", "it normalises by the samples of its own rank, which are fewer: choose SyncBatchNorm"
    if first.whole_inputs is False and "Embedding" in first.kind:
        return "positions", "what it looks up is not what the reference looks up for the same tokens"
    constant = _is_constant(first.difference)
    sizes = {"ranks": facts.layout.ranks} | facts.layout.sizes
    key = next((key for key in ("tp", "ep", "ranks") if sizes.get(key, 1) > 1), "")
    if key and constant and first.difference.abs().max() > 0:
        group = f"{sizes[key]} ranks ({size_text(key)})"
        return "counted-per-rank", f"the same is added everywhere, as a bias that each of {group} adds before the sum"
    if _is_rotation(first):
        return "positions", "it turns vectors by another angle: their lengths are right, as of rotated positions"
    if {"cp", "sp"} & facts.layout.sizes.keys() and _some_tokens_right(facts, all_ranks):
        return "mask", (
            "some tokens are right and others are not: these see others than in the reference, by the mask or by the "
            "positions of a cut sequence"
        )
    return "", ""


def _some_tokens_right(facts: Facts, wrong: list[ComparedOutput]) -> bool:
    """Whether some tokens' outputs are the reference's: a fault of the layer itself would change all of them.

    They are right on a rank that is not among those where the module is wrong; each stage has it on as many ranks.
    """
    if len({output.rank for output in wrong}) < facts.layout.ranks // facts.layout.size("pp"):
        return True
    return any(
        bool((output.difference.abs().amax(1) <= facts.tolerance * (output.reference.abs().max() or 1.0) * 10).any())
        for output in wrong
    )


def _is_constant(difference: torch.Tensor) -> bool:
    """Whether both projections are off by one number in every cell."""
    if len(difference) < 2:
        return False
    two = difference[:, :2]
    return bool((two - two.mean(0)).abs().max() <= 1e-6 * two.abs().max())


def _is_rotation(first: ComparedOutput) -> bool:
    """Whether all vectors have the reference's norm, and not its directions."""
    norms, scale = first.difference[:, 2].abs().max(), first.reference[:, 2].abs().max()
    own = first.reference[:, 2]
    if bool(own.max() - own.min() <= 1e-3 * scale):
        return False  # what normalises gives vectors of one length, whatever goes in
    return bool(norms <= 1e-6 * scale) and bool(first.difference[:, :2].abs().max() > 1e-3 * scale)


#: Relative: what a norm and a limit are rounded by where a step is fp32's, and a thousandth of what is looked for.
_NEAR = 1e-4


def clipping_sentence(facts: Facts, pairs: Sequence[Pair]) -> str:
    """Why these updates are off, if it is a clip of whole gradients; else nothing.

    The factor of an update is then the limit over the gradients' norm, where this layout clips; or the norm over the
    limit, where only the reference does. A limit is a number that people write: of two digits.
    """
    factors = [pair.factor for pair in pairs]
    if not pairs or len(pairs) < len(facts.updates) or facts.step >= len(facts.norms):  # a clip leaves no parameter out
        return ""
    factor, norm = factors[0], facts.norms[facts.step]
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


#: Causes that a layout by itself has no better name for than these.
_OPEN = ("", "loss")
#: Numbers that the differences have to have in common before anything is said of them.
_LEAST = 8


@dataclass(frozen=True)
class UnexplainedGradients:
    """Gradients of a layout that are wrong, and of which the layout by itself does not say why.

    ``losses``: the reference's, and the layout's as the mean of its ranks' and as their sum.
    """

    finding: Finding
    pairs: tuple[Pair, ...]
    tolerance: float
    losses: tuple[float, float, float]


def unexplained_gradients(findings: Sequence[Finding], facts: Facts) -> UnexplainedGradients | None:
    """The finding of a layout that other layouts may explain; None where there is none, or more than one."""
    some = [finding for finding in findings if finding.what == "gradients" and finding.cause in _OPEN]
    if len(some) != 1 or any(facts.gradients[name].apart for name in some[0].parameters if name in facts.gradients):
        return None
    pairs = tuple(facts.gradients[name] for name in some[0].parameters if name in facts.gradients)
    sums = [sum(step.losses) for step in facts.steps if step.losses]
    mean = sum(sums) / len(sums) if sums else math.nan
    return UnexplainedGradients(some[0], pairs, facts.tolerance, (sum(facts.reference_step.losses), mean, sum(sums)))


def explain_across(
    findings: Sequence[Finding],
    left: Mapping[str, UnexplainedGradients],
    layouts: Sequence[Layout],
    failed: Sequence[str] = (),
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
        keys = [key for key in ("ranks", *SIZES) if _grows_with(key, times, some, compared, wrong)]
        if keys:
            return [_explained(finding, keys, times, some) for finding in findings]
    return list(findings)


def _grows_with(
    key: str,
    times: bool,
    some: Sequence[tuple[Layout, UnexplainedGradients]],
    compared: Sequence[Layout],
    wrong: set[str],
) -> bool:
    """Whether differences grow with this number of the layouts; and layouts in which it is 1 are right."""
    sizes = {layout.name: layout.sizes.get(key, 1) for layout in compared}
    numbers = [sizes[layout.name] for layout, _ in some]
    if min(numbers) < 2 or len(set(numbers)) < 2 or any(sizes[name] == 1 and name in wrong for name in sizes):
        return False
    shares = [number - 1 if times else 1 / number - 1 for number in numbers]
    _, first = some[0]
    return all(
        _are_parallel(first, one, share / shares[0]) for (_, one), share in zip(some[1:], shares[1:], strict=True)
    ) and _losses_agree(some, shares)  # fmt: skip


def _are_parallel(first: UnexplainedGradients, second: UnexplainedGradients, ratio: float) -> bool:
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


def _loss_is_right(left: UnexplainedGradients) -> bool:
    wanted, mean, total = left.losses
    return any(math.isclose(wanted, made, rel_tol=left.tolerance * 10) for made in (mean, total))


def _losses_agree(some: Sequence[tuple[Layout, UnexplainedGradients]], shares: Sequence[float]) -> bool:
    """Whether the losses are right in all layouts, or off as the gradients are."""
    if all(_loss_is_right(one) for _, one in some):
        return True
    off = [one.losses[1] - one.losses[0] for _, one in some]
    allowed = [one.tolerance * 100 * abs(one.losses[0]) for _, one in some]
    return all(
        abs(value - off[0] * share / shares[0]) <= limit * (1 + abs(share / shares[0])) < 0.1 * abs(value)
        for value, share, limit in zip(off, shares, allowed, strict=True)
    )


def _explained(
    finding: Finding, keys: Sequence[str], times: bool, some: Sequence[tuple[Layout, UnexplainedGradients]]
) -> Finding:
    """The finding with the cause, if it is one of those that were open."""
    if finding not in [one.finding for _, one in some]:
        return finding
    named = " or ".join(f"the {size_text(key)}" for key in keys)
    numbers = " and ".join(str(layout.sizes[keys[0]]) for layout, _ in some)
    loss = all(_loss_is_right(one) for _, one in some)
    same = "the reference's" if loss else "off in the same way"
    how = f"is {'multiplied' if times else 'divided'} by {named}"
    why = (
        f"a part of the gradient, as of an auxiliary loss, {how}: what is wrong in layouts of {numbers} is the same "
        f"tensor, and changes as that number does; the loss that is differentiated is {same}"
    )
    cause = ("counted-per-rank" if loss else "sum-for-mean") if times else "mean-for-sum"
    return replace(finding, cause=cause, why=why)


#: Optimizers whose step of a part of a matrix is no part of the step of the whole.
WHOLE_MATRIX = ("Muon", "Shampoo", "SOAP", "DistributedShampoo", "Adafactor")
#: Optimizers whose step does not change when all gradients are multiplied by a number.
SCALE_FREE = ("Adam", "Adagrad", "Adamax", "NAdam", "RAdam", "Lion", "LAMB", "RMSprop", "Muon", "Adafactor")


def gradient_findings(facts: Facts) -> list[Finding]:
    """Outputs that part, or gradients that are wrong, with their causes."""
    if facts.parted:
        return [output_finding(facts, facts.parted)]
    wrong = _wrong_pairs(facts)
    findings: list[Finding] = []
    missing = _pairs_without_gradient(facts)
    if missing:
        findings.append(_finding(facts, missing, "no-gradient", "no gradient arrives, and they stay as they are"))
    wrong = [pair for pair in wrong if pair.name not in {one.name for one in missing}]
    for cause in BY_PARAMETER:
        alone = {pair.name: cause.explains([pair], facts) for pair in wrong}
        some = [pair for pair in wrong if alone[pair.name]]
        if some and (why := cause.explains(some, facts)):
            findings.append(_finding(facts, some, cause.name, why))
        elif some:  # each for itself, and not all alike
            findings += [
                _finding(facts, [pair for pair in some if alone[pair.name] == why], cause.name, why)
                for why in dict.fromkeys(alone[pair.name] or "" for pair in some)
            ]
        wrong = [pair for pair in wrong if not alone[pair.name]]
    findings += _findings_by_factor(facts, wrong)
    return [_as_consequence(facts, one, findings) for one in findings]


def _as_consequence(facts: Facts, finding: Finding, others: Sequence[Finding]) -> Finding:
    """A finding that nobody can explain, as what may follow of one that a backward pass comes to before all of it."""
    if finding.cause or not finding.parameters:
        return finding
    last = facts.place(facts.first(finding.parameters))
    apart = _ranks_apart(facts, finding)
    for one in others:
        if (
            one.cause
            and one.what == "gradients"
            and last < facts.place(one.module)
            and _ranks_apart(facts, one) == apart
        ):
            why = f"they lie before {one.module}, where gradients are wrong already: mend that first, this may follow"
            return replace(finding, cause="follows", why=why)
    return finding


def _ranks_apart(facts: Facts, finding: Finding) -> set[int]:
    """Ranks that have different gradients of these parameters."""
    pairs = [facts.gradients[name] for name in finding.parameters if name in facts.gradients]
    return {rank for pair in pairs for _, versions in pair.apart for rank in versions}


def _wrong_pairs(facts: Facts) -> list[Pair]:
    """Parameters whose gradient is not the reference's, unless what the optimizer made of it is."""
    free = facts.optimizer.startswith(SCALE_FREE) or not facts.optimizer
    # a step of clipped gradients does not change with their size; gradients were noted before they were clipped
    free |= bool(facts.reference_step.clips and facts.steps[0].clips)
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


def wrong_gradients(facts: Facts) -> set[str]:
    """Parameters whose gradient is wrong, or missing on all ranks."""
    return {pair.name for pair in [*_wrong_pairs(facts), *_pairs_without_gradient(facts)]}


def _pairs_without_gradient(facts: Facts) -> list[Pair]:
    """Parameters that have no gradient on any rank, and do not change as the reference's do."""
    return [
        update
        for name, update in facts.updates.items()
        if name not in facts.gradients
        and not update.equal
        and not update.ours[update.covered].any()
        and update.reference.any()
    ]


def _findings_by_factor(facts: Facts, wrong: list[Pair]) -> list[Finding]:
    """What is left, by factor: plain multiples, then what is off in another way."""
    made = []
    limit = min(max(facts.tolerance * 100, 1e-6), 0.1)
    groups: dict[float | None, list[Pair]] = {}
    for pair in wrong:
        plain = pair.rest <= limit and math.isfinite(pair.factor)
        if pair.reference.numel() == 1:  # a number is always some times another one
            plain = plain and multiple_cause([pair], facts) is not None
        key = next((k for k in groups if k is not None and plain and math.isclose(k, pair.factor, rel_tol=1e-3)), None)
        groups.setdefault(key if key is not None else pair.factor if plain else None, []).append(pair)
    for key, some in sorted(groups.items(), key=lambda item: item[0] is None):
        if key is not None and (named := multiple_cause(some, facts)):
            made.append(_finding(facts, some, *named))
        else:
            told = ((cause.name, why) for cause in TOGETHER if (why := cause.explains(some, facts)))
            made.append(_finding(facts, some, *next(told, ("", "nobody here knows why"))))
    return made


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


def update_findings(facts: Facts, behind: Callable[[list[Pair]], bool]) -> list[Finding]:
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
        made.append(_update_finding(facts, apart, _stale_cause(apart, facts), why))
    rest = [pair for pair in wrong if not pair.apart]
    frozen = [pair for pair in rest if pair.name not in facts.gradients and not pair.reference.any()]
    if frozen:
        made.append(
            _update_finding(facts, frozen, "frozen", "the reference leaves them as they are, and here they are trained")
        )
    rest = [pair for pair in rest if pair not in frozen]
    still = [pair for pair in rest if not pair.ours[pair.covered].any()]
    if still and behind(still):
        why = f"after step {facts.step + 2} they are what they should be after step {facts.step + 1}: one step behind"
        made.append(_update_finding(facts, still, "stale", why))
    elif still:
        made.append(
            _update_finding(facts, still, "no-gradient", "they have the right gradient, and the step leaves them")
        )
    rest = [pair for pair in rest if pair not in still]
    if why := clipping_sentence(facts, rest):
        made.append(_update_finding(facts, rest, "clipped", why))
    elif rest:
        why = "their gradient is right, and what the optimizer makes of it is not"
        whole = facts.optimizer if facts.optimizer.startswith(WHOLE_MATRIX) else ""
        if whole and all(pair.name in facts.cut and pair.reference.dim() == 2 for pair in rest):
            why += f": {whole} needs the whole matrix of a gradient, and ranks step with their parts"
        else:
            why += ": moments, weight decay or the master copy" if facts.step else ": weight decay, groups or a copy"
        made.append(_update_finding(facts, rest, "optimizer-state", why))
    return made


def _stale_cause(apart: list[Pair], facts: Facts) -> str:
    """Whether on some ranks the parameters are those of before the step."""
    for pair in apart:
        for part, versions in pair.apart:
            before = pair.ours  # what changed; zero where nothing did
            shape = tuple(next(iter(versions.values())).shape)
            if not part.cut_from(before, shape).any():
                return "stale"
    return "stale" if facts.step else "optimizer-state"


def _update_finding(facts: Facts, pairs: Sequence[Pair], cause: str, why: str) -> Finding:
    return replace(_finding(facts, pairs, cause, why), what="parameters after the step")


def printed_findings(facts: Facts) -> list[Finding]:
    """A printed loss that is a number of the layout times what it should be, where what is differentiated is right."""
    truth = facts.reference_step
    wanted = sum(truth.losses)
    if not truth.printed or not wanted:
        return []
    shown = truth.printed[-1] / wanted
    sums = [sum(step.losses) for step in facts.steps if step.losses]
    mean, together = sum(sums) / len(sums) if sums else 0.0, sum(sums)
    for rank, step in enumerate(facts.steps):
        if not step.printed or not step.losses:
            continue
        printed, of_rank = step.printed[-1], sum(step.losses)
        right = [shown * value for value in (mean, together, of_rank, *step.losses, wanted) if value]
        tolerance = max(10 ** -min(len(f"{printed:.10g}".partition(".")[2]), 3), 1e-3)
        if any(math.isclose(printed, value, rel_tol=tolerance) for value in right):
            continue
        for value in (mean, of_rank, wanted):
            factor = printed / (shown * value) if value else 0.0
            if named := layout_factor(facts.layout, factor, tolerance):
                why = f"rank {rank} prints a loss of {printed:.6g} where it is {shown * value:.6g}: {named.text}"
                return [Finding(facts.layout.name, facts.step + 1, "printed", "printed-loss", why, factor)]
    return []
