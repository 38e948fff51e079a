"""Compares a layout's run with the reference's, step by step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pardemo.script.compare import checks
from pardemo.script.compare.across_layouts import unexplained_gradients
from pardemo.script.compare.closeness import nearly_equal
from pardemo.script.compare.differences import Finding, StepComparison, UnexplainedGradients, with_tensors
from pardemo.script.compare.findings import gradient_findings, printed_findings, update_findings, wrong_gradients
from pardemo.script.compare.initial_parameters import initial_findings
from pardemo.script.compare.module_map import ModelMap, step_map
from pardemo.script.compare.pairs import Pair, compare_pair, layer_scales
from pardemo.script.compare.parameter_map import (
    Assembled,
    Holders,
    ParameterMap,
    assembled,
    map_parameters,
)
from pardemo.script.compare.reference import Reference
from pardemo.script.compare.runs import ProveError, Run
from pardemo.script.compare.samples import StepSamples, match_samples
from pardemo.script.compare.step_pair import StepPair
from pardemo.script.record import rank_record
from pardemo.script.words import count_text


@dataclass
class LayoutComparison:
    """The result of comparing a layout with the reference: its findings, none where both train alike."""

    #: which parts of the reference's parameters the pieces are
    maps: ParameterMap
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: parameters that could not be compared, in a sentence
    unmatched: str = ""
    #: whether they could not because one of the models has no parameter of this name
    strange: bool = False
    #: their names
    not_compared: tuple[str, ...] = ()
    #: how many were compared, to the first that differs
    steps: int = 0
    #: what was not there to be compared, in a sentence
    in_part: str = ""
    #: what other layouts may explain
    left_open: UnexplainedGradients | None = None
    #: its modules in the last step that was compared
    model: ModelMap | None = None


def compare_layout(reference: Reference, other: Run) -> LayoutComparison:
    """Compares a layout's run with the reference's.

    Raises:
        ProveError: the layouts have other global batches, or models with other parameters.
    """
    compared = LayoutComparison(_map_pieces(reference, other))
    before = _assemble(reference, holders_of(other, 0, "before", compared.maps))
    compared.not_compared = _not_compared(reference, compared.maps, before)
    compared.unmatched, compared.strange = _unmatched_parameters(reference, compared.maps, before)
    for step in range(min(reference.run.steps, other.steps)):
        compared.steps = step + 1
        compared.model = step_map(reference, step)
        findings = _step_findings(StepPair(reference, other, step), before, compared)
        compared.findings += findings
        if any(finding.what not in ("random numbers", "printed") for finding in findings):
            break  # what follows in later steps is of this
    compared.findings = _merged_findings(compared.findings)
    return compared


def _step_findings(step_pair: StepPair, before: Mapping[str, Assembled], compared: LayoutComparison) -> list[Finding]:
    if scaled := checks.scale_findings(step_pair):
        return scaled  # its samples are of another step
    samples = match_samples(step_pair)
    if samples.note and samples.note not in compared.notes:
        compared.notes.append(samples.note)
    findings = [samples.finding] if samples.finding else []
    if step_pair.step == 0 and not findings:
        findings = initial_findings(step_pair.reference, step_pair.other, compared.maps, before)
        compared.strange &= not findings
    begun_alike = not findings
    findings += checks.mask_findings(step_pair)
    return findings + _number_findings(step_pair, samples, compared) if begun_alike else findings


def _merged_findings(findings: list[Finding]) -> list[Finding]:
    """Merges findings that say the same of different parameters."""
    seen: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        known = seen.setdefault((finding.what, finding.cause, finding.why), finding)
        if set(finding.parameters) - set(known.parameters):
            names = tuple(sorted({*known.parameters, *finding.parameters}))
            rest = max((value for value in (known.rest, finding.rest) if value is not None), default=None)
            alike = (
                known.factor is not None and finding.factor is not None and math.isclose(known.factor, finding.factor)
            )
            seen[finding.what, finding.cause, finding.why] = replace(
                known, parameters=names, rest=rest, factor=known.factor if alike else None,
                tensors=None,  # those of some of the parameters would be taken for those of all
            )  # fmt: skip
    return list(seen.values())


def _map_pieces(reference: Reference, other: Run) -> ParameterMap:
    """Finds which part of the reference each piece is, by the values before the first step."""
    parameters = reference.whole[0]
    names = {other_name: name for name, others in parameters.tied.items() for other_name in others}
    pieces = {}
    for rank, record in enumerate(other.records):
        tensors = other.tensors(0, rank, "before")
        values = [(piece, tensors[piece.name].double()) for piece in record.steps[0].pieces]
        pieces[rank] = [(rank_record.scale_piece(piece, tuple(value.shape)), value) for piece, value in values]
    maps = map_parameters(parameters.before, pieces, names, max(reference.tolerance * 1e-2, 1e-12))
    if not any(maps.parts.values()):
        piece_names = sorted({piece.name for rank_pieces in pieces.values() for piece, _ in rank_pieces})
        raise ProveError(
            f"the model of {other.layout.name} has other parameters than the reference's: it has "
            f"{', '.join(piece_names[:3])} …, the reference {', '.join(sorted(parameters.before)[:3])} …"
        )
    other.cut(maps.strips)
    for rank in maps.parts:
        maps.leave_out_unused(rank, other.tensors(0, rank, "gradient"))
    return maps


def _not_compared(reference: Reference, maps: ParameterMap, before: Mapping[str, Assembled]) -> tuple[str, ...]:
    """Parameters that are no part of the reference's, and the reference's that no ranks have in whole."""
    initial = reference.whole[0].before
    return (*maps.unknown, *(name for name in initial if name not in before or not bool(before[name].covered.all())))


def _unmatched_parameters(
    reference: Reference, maps: ParameterMap, before: Mapping[str, Assembled]
) -> tuple[str, bool]:
    """Finds parameters that are no part of the reference's or that no rank has, and whether nothing has their names."""
    parameters, unknown = reference.whole[0], maps.unknown
    names = parameters.before.keys() | {name for tied in parameters.tied.values() for name in tied}
    strange = [name for name in unknown if name not in names]
    count = count_text(len(unknown), "parameter")
    if strange:
        return f"{count} match nowhere in the reference, as {strange[0]}: {unknown[strange[0]]}", True
    if unknown:
        return f"{count} could not be compared, as {': '.join(next(iter(unknown.items())))}", False
    if missing := [name for name in parameters.before if name not in before]:
        return f"{count_text(len(missing), 'parameter')} of the reference are on no rank, as {missing[0]}", True
    for name in parameters.before:
        if not bool(before[name].covered.all()):
            return f"{name} is on no rank in whole, and not all of its parts are on one", False
    return "", False


def holders_of(other: Run, step: int, kind: str, maps: ParameterMap) -> dict[str, Holders]:
    """Returns the ranks' parts of each of the reference's parameters, of one kind of tensor."""
    holders: dict[str, Holders] = {}
    for rank, parts in maps.parts.items():
        tensors = other.tensors(step, rank, kind)
        for name, part in parts.items():
            if name in tensors:
                holders.setdefault(part.name, []).append((rank, part, tensors[name]))
    return holders


def _assemble(reference: Reference, holders: Mapping[str, Holders]) -> dict[str, Assembled]:
    before = reference.whole[0].before
    return {name: assembled(tuple(before[name].shape), parts) for name, parts in holders.items()}


def _pairs(reference: Reference, step: int, kind: str, tensors: Mapping[str, Assembled]) -> dict[str, Pair]:
    """Compares gradients, or each parameter's change in the step where its gradient is more than rounding."""
    state, is_update = reference.whole[step], kind == "update"
    wanted = state.gradients
    if is_update:
        wanted = {name: state.after[name] - state.before[name] for name in state.after if name in state.before}
    scale = layer_scales(wanted)
    pairs = {}
    for name in (name for name in tensors if name in wanted):
        assembled, floor, tolerance = tensors[name], scale[name], reference.tolerance_of(name)
        candidate, covered = assembled.value, assembled.covered
        if is_update:
            if name in state.gradients:
                covered = covered & reference.more_than_rounding(name, step)
            # what is left of a small change to a large value is rounded by the value
            rounding = _epsilon(tolerance) * float(state.before[name].abs().max()) if covered.numel() else 0.0
            floor, tolerance = max(floor, rounding / tolerance), tolerance * 10
            candidate = candidate - state.before[name]
        noise = reference.allowed(kind, name, step)
        pairs[name] = compare_pair(name, wanted[name], candidate, covered, floor, tolerance, assembled.apart, noise)
    return pairs


def _epsilon(tolerance: float) -> float:
    return 2.3e-16 if tolerance < 1e-6 else 1.2e-7 if tolerance < 1e-3 else 8e-3


def _number_findings(step_pair: StepPair, samples: StepSamples, compared: LayoutComparison) -> list[Finding]:
    """Compares outputs, gradients, clipping, learning rates, and parameters after the step."""
    (reference, _, step), maps = step_pair, compared.maps
    comparison, alike = _compare_step(step_pair, maps, samples)
    pairs = [comparison.gradients.get(name) for name in reference.whole[step].gradients]
    every = bool(pairs) and all(pair is not None and bool(pair.covered.all()) for pair in pairs)
    if every and not wrong_gradients(comparison):
        comparison.parted = []  # whether it trains alike gradients say: an output may be a part, or be called otherwise
    compared.model = step_map(reference, step, comparison, alike)
    findings = buffers = checks.buffer_findings(step_pair)
    if not comparison.parted or not findings or not comparison.parted[0].module.startswith(findings[0].module):
        findings = gradient_findings(comparison)
    compared.left_open = unexplained_gradients(findings, comparison)
    findings = findings or checks.clipping_findings(step_pair)
    findings = findings or update_findings(comparison, lambda pairs: _is_one_step_behind(step_pair, maps, pairs))
    return with_tensors(findings or buffers, comparison, reference.run) or printed_findings(comparison)


def _compare_step(step_pair: StepPair, maps: ParameterMap, samples: StepSamples) -> tuple[StepComparison, set[str]]:
    """Compares the layout with the reference in a step; also returns the modules whose outputs are equal."""
    reference, other, step = step_pair

    def holders(kind: str) -> dict[str, Holders]:
        return holders_of(other, step, kind, maps)

    def shapes(parts: Holders) -> dict[int, tuple[int, ...]]:
        return {rank: tuple(tensor.shape) for rank, _, tensor in parts}

    parameters, before = reference.whole[step], holders("before")
    parted, alike = checks.parted_outputs(step_pair, samples, maps)
    names: dict[int, dict[str, set[str]]] = {}
    for rank, record in enumerate(step_pair.records):
        rank_names = names.setdefault(rank, {})
        for piece in record.pieces:
            if (part := maps.parts[rank].get(piece.name)) is not None:
                rank_names.setdefault(part.name, set()).update((piece.name, *piece.tied))
    accumulated = {
        name: parts for name, parts in holders("accumulated").items() if shapes(parts) == shapes(before[name])
    }  # FSDP2's are whole until they are reduced
    comparison = StepComparison(
        other.layout, step, reference.tolerance, reference.order[step],
        gradients=_pairs(reference, step, "gradient", _assemble(reference, holders("gradient"))),
        updates=_pairs(reference, step, "update", _assemble(reference, holders("after"))),
        earlier=[reference.whole[at].gradients for at in range(step)], parted=parted, tied=parameters.tied,
        cut={part.name for parts in maps.parts.values() for part in parts.values() if part.is_cut},
        holders={name: len(parts) for name, parts in before.items()},
        together={name for name, parameter in _assemble(reference, holders("applied")).items() if not parameter.apart},
        names=names, norms=reference.norms, moved=maps.moved,
        accumulated={
            name: parameter.value for name, parameter in _assemble(reference, accumulated).items()
            if parameter.covered.all() and not parameter.apart
        },
        optimizer=reference.run.records[0].optimizer, steps=step_pair.records,
        reference_step=step_pair.reference_record,
    )  # fmt: skip
    return comparison, alike


def _is_one_step_behind(step_pair: StepPair, maps: ParameterMap, pairs: list[Pair]) -> bool:
    """Whether these parameters have only after the next step the values that they should have after this one."""
    reference, other, step = step_pair
    if step + 1 >= min(other.steps, reference.run.steps):
        return False
    later, wanted = _assemble(reference, holders_of(other, step + 1, "after", maps)), reference.whole[step].after
    return all(
        nearly_equal(later[pair.name].value, wanted[pair.name].double(), reference.tolerance * 10) for pair in pairs
    )
