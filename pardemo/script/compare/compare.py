"""The model's modules in the order of execution, and of each what was compared in a step: the map on the page."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from pardemo.script.compare import causes, checks
from pardemo.script.compare.parameter_map import ParameterMap, Part, assembled, map_parameters
from pardemo.script.compare.runs import (
    TOLERANCES,
    Facts,
    Finding,
    Kept,
    Pair,
    ProveError,
    Reference,
    Run,
    compare_pair,
    kept_tensors,
    layer_scales,
)
from pardemo.script.compare.samples import StepSamples, match_samples
from pardemo.script.record import records
from pardemo.script.words import count_text

#: What a cell says. One that is empty has nothing to compare: a module without parameters has no gradient.
EQUAL, DIFFERENT, NOT_COMPARED, NOTHING = "equal", "different", "not compared", ""
#: What each column is about, and how that is called in a sentence.
COLUMNS = {"forward": "outputs of modules", "gradient": "gradients", "update": "changes of parameters"}
ROOT = "(root)"


@dataclass(frozen=True)
class Cell:
    """What was compared of a module: a state, and the factor where all of it is off by one number."""

    state: str = NOTHING
    factor: float | None = None


@dataclass(frozen=True)
class ModuleRow:
    """A module: its name, its class, and what was compared of it. Of parameters only its own count."""

    module: str
    kind: str
    cells: tuple[Cell, Cell, Cell]


@dataclass(frozen=True)
class ModelMap:
    """A step of a layout beside the reference's.

    ``rows``: modules in a tree, each before those inside it, and those in the order in which they run. ``counts``: of
    each of :data:`COLUMNS` how many were compared, and of how many. ``root``: the name of the whole model.
    """

    step: int
    rows: tuple[ModuleRow, ...]
    counts: Mapping[str, tuple[int, int]]
    root: str = ROOT


def step_map(facts: Facts, reference: Reference, alike: set[str]) -> ModelMap:
    """The map of a step of which outputs, gradients and parameters were looked at.

    Where outputs part, gradients and parameters are not: they are of what was wrong before them.

    Args:
        alike: modules whose outputs are the reference's.
    """
    parted = {output.module for output in facts.parted}
    outputs = dict.fromkeys(facts.order, NOT_COMPARED)
    outputs |= dict.fromkeys(alike, EQUAL) | dict.fromkeys(parted, DIFFERENT)
    truth = reference.whole[facts.step]
    if parted:
        return _build_map(reference, facts.step, outputs, {}, {})
    wrong = causes.wrong_gradients(facts)
    gradients = {
        name: _cell(facts.gradients.get(name), name in wrong)
        for name in truth.before
        if name in truth.gradients or name in facts.gradients or name in wrong
    }
    updates = {}
    for name in truth.before:
        pair = facts.updates.get(name)
        updates[name] = _cell(pair, pair is not None and bool(not pair.equal or pair.apart))
    return _build_map(reference, facts.step, outputs, gradients, updates)


def empty_map(reference: Reference, step: int) -> ModelMap:
    """The map of a step of which samples or the first parameters differ: nothing that follows was looked at."""
    return _build_map(reference, step, {}, {}, {})


def _cell(pair: Pair | None, wrong: bool) -> Cell:
    if wrong:
        plain = pair is not None and not pair.apart and pair.rest <= 1e-6
        return Cell(DIFFERENT, pair.factor if plain and pair is not None else None)
    return Cell(NOT_COMPARED if pair is None else EQUAL)


def _build_map(
    reference: Reference,
    step: int,
    outputs: Mapping[str, str],
    gradients: Mapping[str, Cell],
    updates: Mapping[str, Cell],
) -> ModelMap:
    """A map of what is known of modules' outputs and of parameters; of the others it says that nothing is."""
    truth, order = reference.whole[step], reference.order[step]
    calls = [call for record in reference.run.records for call in record.steps[step].calls]
    kinds = {call.module: call.kind for call in calls}
    root = next((name for name in reversed(order) if kinds.get(name) == name), ROOT)  # the model is called by its class
    own: dict[str, list[str]] = {}
    for name in truth.before:
        own.setdefault(name.rpartition(".")[0] or root, []).append(name)
    rows = []
    for module in tree([*order, *own], order, root):
        names = own.get(module, [])
        trained = [name for name in names if name in truth.gradients or name in gradients]
        cells = (
            Cell(outputs.get(module, NOT_COMPARED) if module in order else NOTHING),
            _merge_cells(gradients.get(name, Cell(NOT_COMPARED)) for name in trained),
            _merge_cells(updates.get(name, Cell(NOT_COMPARED)) for name in names),
        )
        rows.append(ModuleRow(module, kinds.get(module, ""), cells))
    trained = [name for name in truth.before if name in truth.gradients or name in gradients]
    counts = {
        "forward": (sum(outputs.get(module, NOT_COMPARED) != NOT_COMPARED for module in order), len(order)),
        "gradient": (_count_compared(gradients, trained), len(trained)),
        "update": (_count_compared(updates, truth.before), len(truth.before)),
    }
    return ModelMap(step + 1, tuple(rows), counts, root)


def _count_compared(cells: Mapping[str, Cell], names: Iterable[str]) -> int:
    return sum(name in cells and cells[name].state != NOT_COMPARED for name in names)


def _merge_cells(cells: Iterable[Cell]) -> Cell:
    """Of a module's parameters: different where one is, equal only where all are."""
    some = list(cells)
    for state in (DIFFERENT, NOT_COMPARED, EQUAL):
        these = [cell for cell in some if cell.state == state]
        if these:
            factors = {None if cell.factor is None else f"{cell.factor:.4g}" for cell in these}
            return Cell(state, these[0].factor if len(factors) == 1 else None)
    return Cell()


def tree(names: Iterable[str], order: Mapping[str, int], root: str = ROOT) -> list[str]:
    """Names and those around them, each before what is inside it; those inside one in the order in which they run.

    >>> tree(["head", "blocks.0.up", "embed"], {"embed": 0, "blocks.0.up": 1, "head": 2})
    ['embed', 'blocks', 'blocks.0', 'blocks.0.up', 'head']

    Args:
        order: of those that run, when they end. root: the name of the whole model, which comes first.
    """
    inside: dict[str, list[str]] = {}
    first: dict[str, float] = {}
    given = list(dict.fromkeys(names))
    for name in given:
        at = order.get(name, float("inf"))
        while name not in first or at < first[name]:
            around = name.rpartition(".")[0]
            if name not in first and name != root:
                inside.setdefault(around, []).append(name)
            first[name] = min(at, first.get(name, at))
            if not around:
                break
            name = around
    found = [root] if root in first else []
    left = sorted(inside.get("", []), key=first.__getitem__, reverse=True)
    while left:
        name = left.pop()
        found.append(name)
        left += sorted(inside.get(name, []), key=first.__getitem__, reverse=True)
    return found


@dataclass
class Comparison:
    """A layout's findings, none where it trains as the reference does.

    ``unmatched``: parameters that could not be compared, in a sentence; ``strange``: since one of the models has no
    parameter of this name. ``in_part``: what was not there to be compared. ``maps``: which parts the pieces are.
    ``left_open``: what other layouts may explain. ``model``: its modules in the last step that was compared. ``kept``:
    tensors of findings that nobody explains.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unmatched: str = ""
    strange: bool = False
    in_part: str = ""
    maps: ParameterMap = field(default_factory=ParameterMap)
    steps: int = 0
    parameters: int = 0
    left_open: causes.UnexplainedGradients | None = None
    model: ModelMap | None = None
    kept: dict[Finding, Kept] = field(default_factory=dict)


def tolerance_of(run: Run, double: bool) -> float:
    """What may differ in this run's types."""
    types = {name for record in run.records for name in (*record.dtypes, *record.computed_in) if name in TOLERANCES}
    return max((TOLERANCES[name] for name in types), default=TOLERANCES["float64" if double else "float32"])


def compare_layout(reference: Reference, other: Run) -> Comparison:
    """Holds a layout's run against the reference's.

    Raises:
        ProveError: the layouts have other global batches, or models with other parameters.
    """
    comparison = Comparison()
    maps = comparison.maps = _map_pieces(reference, other, comparison)
    comparison.unmatched, comparison.strange = _unmatched_parameters(reference, other, maps)
    for step in range(min(reference.run.steps, other.steps)):
        if scaled := checks.scale_findings(reference.run, other, step):
            comparison.findings += scaled
            comparison.model, comparison.steps = empty_map(reference, step), step + 1
            break  # its samples are of another step
        found = match_samples(reference.run, other, step)
        if found.error:
            raise ProveError(found.error)
        if found.note and found.note not in comparison.notes:
            comparison.notes.append(found.note)
        findings = [found.finding] if found.finding else []
        if step == 0 and not findings:
            findings += _initial_findings(reference, other, maps)
            comparison.strange &= not findings
        findings += checks.mask_findings(other, step, found)
        if not any(finding.what in ("data", "parameters") for finding in findings):
            findings += _number_findings(reference, other, step, maps, found, comparison)
        else:
            comparison.model = empty_map(reference, step)
        comparison.findings += findings
        comparison.steps = step + 1
        if any(finding.what not in ("random numbers", "printed") for finding in findings):
            break  # what follows in later steps is of this
    comparison.findings = list(_merged_findings(comparison.findings))
    return comparison


def _merged_findings(findings: list[Finding]) -> Iterator[Finding]:
    """Each finding once; those that say the same of other parameters as one."""
    seen: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = finding.what, finding.cause, finding.why
        known = seen.get(key)
        if known is None:
            seen[key] = finding
        elif set(finding.parameters) - set(known.parameters):
            names = tuple(sorted({*known.parameters, *finding.parameters}))
            rest = max((value for value in (known.rest, finding.rest) if value is not None), default=None)
            alike = (
                known.factor is not None and finding.factor is not None and math.isclose(known.factor, finding.factor)
            )
            seen[key] = replace(known, parameters=names, rest=rest, factor=known.factor if alike else None)
    yield from seen.values()


def _map_pieces(reference: Reference, other: Run, comparison: Comparison) -> ParameterMap:
    """Which part of the reference each piece is, by the values before the first step."""
    truth = reference.whole[0]
    names = {other_name: name for name, others in truth.tied.items() for other_name in others}
    pieces = {}
    for rank, record in enumerate(other.records):
        tensors = other.tensors(0, rank, "before")
        values = [(piece, tensors[piece.name].double()) for piece in record.steps[0].pieces]
        pieces[rank] = [(records.scale_piece(piece, tuple(value.shape)), value) for piece, value in values]
    found = map_parameters(truth.before, pieces, names, max(reference.tolerance * 1e-2, 1e-12))
    if not any(found.parts.values()):
        some = sorted({piece.name for own in pieces.values() for piece, _ in own})
        raise ProveError(
            f"the model of {other.layout.name} has other parameters than the reference's: it has "
            f"{', '.join(some[:3])} …, the reference {', '.join(sorted(truth.before)[:3])} …"
        )
    other.cut(found.strips)
    for rank in found.parts:
        found.leave_out_unused(rank, other.tensors(0, rank, "gradient"))
    comparison.parameters = len({part.name for own in found.parts.values() for part in own.values()})
    return found


def _unmatched_parameters(reference: Reference, other: Run, maps: ParameterMap) -> tuple[str, bool]:
    """Parameters that are no part of the reference's, or that no rank has, and whether nothing has their names."""
    truth, holders = reference.whole[0], holders_of(other, 0, "before", maps)
    unknown = {name: why for own in maps.unknown.values() for name, why in own.items()}
    names = truth.before.keys() | {name for tied in truth.tied.values() for name in tied}
    for name, why in unknown.items():
        if name not in names:
            return f"{count_text(len(unknown), 'parameter')} match nowhere in the reference, as {name}: {why}", True
    if unknown:
        name = next(iter(unknown))
        return f"{count_text(len(unknown), 'parameter')} could not be compared, as {name}: {unknown[name]}", False
    missing = [name for name in truth.before if name not in holders]
    if missing:
        return f"{count_text(len(missing), 'parameter')} of the reference are on no rank, as {missing[0]}", True
    for name, whole in truth.before.items():
        if not bool(assembled(tuple(whole.shape), holders[name]).covered.all()):
            return f"{name} is on no rank in whole, and not all of its parts are on one", False
    return "", False


def _initial_findings(reference: Reference, other: Run, maps: ParameterMap) -> list[Finding]:
    """Parameters before the first step: the reference's, and equal on ranks that hold the same."""
    if twice := _overwritten_names(reference, other, maps):
        return [causes.overwritten_finding(other, twice, reference.order[0])]
    replicas = _differing_replicas(reference, other, 0, "before", maps)
    unknown = {name for own in maps.unknown.values() for name in own}
    uncovered = {
        name
        for name, some in holders_of(other, 0, "before", maps).items()
        if not assembled(tuple(reference.whole[0].before[name].shape), some).covered.all()
    }
    if not maps.different and not replicas and not unknown and not uncovered:
        return []
    return causes.initial_findings(other, maps, replicas, uncovered, reference.order[0], reference.whole[0].before)


def _overwritten_names(reference: Reference, other: Run, maps: ParameterMap) -> list[str]:
    """Parameters that no rank holds, or not in whole, though the ranks have pieces enough: some have another's values.

    Of parameters of one kind and shape, as experts, there are as many pieces as the reference has, or more.
    """
    truth, holders = reference.whole[0].before, holders_of(other, 0, "before", maps)
    kind = {name: (re.sub(r"\d+", "#", name), tuple(whole.shape)) for name, whole in truth.items()}
    wanted = Counter(kind.values())
    pieces = Counter(kind[name] for name, some in holders.items() for _ in some)
    missing = [name for name in truth if name not in holders]
    return sorted(name for name in missing if 1 < wanted[kind[name]] <= pieces[kind[name]])


def holders_of(other: Run, step: int, kind: str, maps: ParameterMap) -> dict[str, list[tuple[int, Part, torch.Tensor]]]:
    holders: dict[str, list[tuple[int, Part, torch.Tensor]]] = {}
    for rank, own in maps.parts.items():
        tensors = other.tensors(step, rank, kind)
        for name, part in own.items():
            if name in tensors:
                holders.setdefault(part.name, []).append((rank, part, tensors[name]))
    return holders


def _differing_replicas(reference: Reference, other: Run, step: int, kind: str, maps: ParameterMap) -> dict[str, list]:
    """Parameters whose ranks hold the same part and other values."""
    found = {}
    for name, some in holders_of(other, step, kind, maps).items():
        apart = assembled(tuple(reference.whole[step].before[name].shape), some).apart
        if apart:
            found[name] = apart
    return found


def _gradient_pairs(reference: Reference, other: Run, step: int, maps: ParameterMap) -> dict[str, Pair]:
    """Gradients, each beside the reference's."""
    wanted = reference.whole[step].gradients
    scale = layer_scales(wanted)
    pairs = {}
    for name, some in holders_of(other, step, "gradient", maps).items():
        if name not in wanted:
            continue
        whole = assembled(tuple(wanted[name].shape), some)
        pairs[name] = compare_pair(
            name, wanted[name], whole.value, whole.covered, scale[name], reference.tolerance_of(name), whole.apart,
            reference.allowed("gradient", name, step),
        )  # fmt: skip
    return pairs


def _update_pairs(
    reference: Reference, other: Run, step: int, maps: ParameterMap, gradients: dict[str, Pair]
) -> dict[str, Pair]:
    """What the step changed of each parameter, where its gradient is more than rounding."""
    truth = reference.whole[step]
    wanted = {name: truth.after[name] - truth.before[name] for name in truth.after if name in truth.before}
    scale = layer_scales(wanted)
    pairs = {}
    for name, some in holders_of(other, step, "after", maps).items():
        if name not in wanted:
            continue
        whole = assembled(tuple(wanted[name].shape), some)
        covered, own = whole.covered, reference.tolerance_of(name)
        if name in truth.gradients:
            covered = covered & reference.more_than_rounding(name, step)
        # what is left of a small change to a large value is rounded by the value
        rounding = _epsilon(own) * float(truth.before[name].abs().max()) if covered.numel() else 0.0
        floor = max(scale[name], rounding / own)
        ours = whole.value - truth.before[name]
        noise = reference.allowed("update", name, step)
        pairs[name] = compare_pair(name, wanted[name], ours, covered, floor, own * 10, whole.apart, noise)
    return pairs


def _epsilon(tolerance: float) -> float:
    return 2.3e-16 if tolerance < 1e-6 else 1.2e-7 if tolerance < 1e-3 else 8e-3


def _number_findings(
    reference: Reference, other: Run, step: int, maps: ParameterMap, samples: StepSamples, comparison: Comparison
) -> list[Finding]:
    """Outputs, gradients, clipping, learning rates, parameters after the step."""
    facts, alike = _facts(reference, other, step, maps, samples)
    if _all_gradients_right(facts, reference):
        facts.parted = []  # whether it trains alike gradients say: an output may be a part, or be called otherwise
    comparison.model = step_map(facts, reference, alike)
    findings = buffers = checks.buffer_findings(reference, other, step)
    if not facts.parted or not findings or not facts.parted[0].module.startswith(findings[0].module):
        findings = causes.gradient_findings(facts)
    comparison.left_open = causes.unexplained_gradients(findings, facts)
    findings = findings or checks.clipping_findings(reference, other, step)
    findings = findings or causes.update_findings(
        facts, lambda pairs: _is_one_step_behind(reference, other, step, maps, pairs)
    )
    findings = findings or buffers
    comparison.kept |= kept_tensors(findings, facts, reference.run)
    return findings or causes.printed_findings(facts)


def _facts(
    reference: Reference, other: Run, step: int, maps: ParameterMap, samples: StepSamples
) -> tuple[Facts, set[str]]:
    """What the layout has and has not in common with the reference in a step, and modules whose outputs are equal."""
    truth = reference.whole[step]
    facts = Facts(
        other.layout, step, reference.tolerance, reference.order[step], tied=truth.tied, moved=maps.moved,
        norms=reference.norms, optimizer=reference.run.records[0].optimizer,
        earlier=[reference.whole[before].gradients for before in range(step)],
        steps=[record.steps[step] for record in other.records], reference_step=reference.run.records[0].steps[step],
    )  # fmt: skip
    renamed, cut = {}, {}
    for rank, own in maps.parts.items():
        renamed[rank] = _renamed_modules(own)
        parted = {name: part for name, part in own.items() if any(places is not None for places in part.index)}
        cut[rank] = {name.rpartition(".")[0] for name, part in parted.items() if part.flat is None}
        facts.cut |= {part.name for part in parted.values()}
    missing = {rank: truth.before.keys() - {part.name for part in own.values()} for rank, own in maps.parts.items()}
    facts.parted, alike = checks.parted_outputs(
        reference.run, other, step, samples, renamed, cut, missing, reference.tolerance
    )
    facts.gradients = _gradient_pairs(reference, other, step, maps)
    facts.updates = _update_pairs(reference, other, step, maps, facts.gradients)
    held = holders_of(other, step, "before", maps)
    facts.holders = {name: len(some) for name, some in held.items()}
    before = {name: {rank: tensor.shape for rank, _, tensor in some} for name, some in held.items()}
    for rank, recorded in enumerate(facts.steps):
        for piece in recorded.pieces:
            if piece.name in maps.parts[rank]:
                names = facts.names.setdefault(rank, {}).setdefault(maps.parts[rank][piece.name].name, set())
                names |= {piece.name, *piece.tied}
    for name, some in holders_of(other, step, "applied", maps).items():
        if not assembled(tuple(truth.before[name].shape), some).apart:
            facts.together.add(name)
    for name, some in holders_of(other, step, "accumulated", maps).items():
        if {rank: tensor.shape for rank, _, tensor in some} != before[name]:
            continue  # FSDP2's are whole until they are reduced
        whole = assembled(tuple(truth.before[name].shape), some)
        if whole.covered.all() and not whole.apart:
            facts.accumulated[name] = whole.value
    return facts, alike


def _all_gradients_right(facts: Facts, reference: Reference) -> bool:
    """Whether all of the reference's gradients are there in whole, and none is wrong: outputs were right, then."""
    found = [facts.gradients.get(name) for name in reference.whole[facts.step].gradients]
    whole = bool(found) and all(pair is not None and bool(pair.covered.all()) for pair in found)
    return whole and not causes.wrong_gradients(facts)


def _is_one_step_behind(reference: Reference, other: Run, step: int, maps: ParameterMap, pairs: list[Pair]) -> bool:
    """Whether these parameters are after the next step what they should be after this one."""
    if step + 1 >= min(other.steps, reference.run.steps):
        return False
    holders = holders_of(other, step + 1, "after", maps)
    wanted = reference.whole[step].after
    return all(
        bool(
            (assembled(tuple(wanted[pair.name].shape), holders[pair.name]).value - wanted[pair.name])
            .abs().max() <= reference.tolerance * 10 * wanted[pair.name].abs().max()
        )
        for pair in pairs
    )  # fmt: skip


def _renamed_modules(own: Mapping[str, Part]) -> dict[str, str]:
    """Modules that have another name in the reference, and those around them, as far as all their parts agree."""
    renamed: dict[str, set[str]] = {}
    for name, part in own.items():
        here, there = name.split(".")[:-1], part.name.split(".")[:-1]
        while here and there:
            renamed.setdefault(".".join(here), set()).add(".".join(there))
            if here[-1] != there[-1] and not (here[-1].isdigit() and there[-1].isdigit()):
                break
            here, there = here[:-1], there[:-1]
    return {name: next(iter(names)) for name, names in renamed.items() if len(names) == 1}
