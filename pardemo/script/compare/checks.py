"""Compares all but gradients: outputs, dropout's masks, buffers, clipping, learning rates, loss scales."""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations

import torch

from pardemo.script.compare.differences import ComparedOutput, Finding
from pardemo.script.compare.pairs import norm_of
from pardemo.script.compare.parameter_map import ParameterMap, reference_name, renamed_modules
from pardemo.script.compare.run_layouts import distinct_digits, layout_factor
from pardemo.script.compare.runs import Run
from pardemo.script.compare.samples import RowPosition, StepSamples
from pardemo.script.compare.step_pair import StepPair
from pardemo.script.record.rank_record import Mask, ModuleCall
from pardemo.script.runtime.call_sites import ROOT
from pardemo.world.errors import ranks_text

#: Ways to see an output as rows of samples. A flat one has the samples' tokens one after the other, in an order that
#: only the module knows: as experts do, which see the tokens that a router sends them.
BY_SAMPLES, BY_TOKENS, SHARED, FLAT, FLAT_BY_TOKENS = "[b, …]", "[s, b, …]", "[s, k]", "[b·s, k]", "[s·b, k]"


def rows_of_output(cells: torch.Tensor, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Returns all ways to read an output as rows of samples, each as [b, …, k].

    Args:
        tokens: of a sample, on this rank.
    """
    rows = {}
    if batch and cells.dim() >= 2:
        if cells.shape[0] == batch:
            rows[BY_SAMPLES] = cells
        if cells.dim() >= 3 and cells.shape[1] == batch:
            rows[BY_TOKENS] = cells.transpose(0, 1)
        if not rows and cells.dim() == 2 and cells.shape[0] == tokens:
            rows[SHARED] = cells.unsqueeze(0).expand(batch, -1, -1)
        if not rows and cells.dim() == 2 and cells.shape[0] == batch * tokens:
            rows[FLAT] = cells.reshape(batch, tokens, -1)
            rows[FLAT_BY_TOKENS] = cells.reshape(tokens, batch, -1).transpose(0, 1)
    return rows


class StepOutputs:
    """Reads a run's outputs of one step, once."""

    def __init__(self, run: Run, step: int, rank: int):
        self.record = run.records[rank].steps[step]
        self._tensors = run.tensors(step, rank, "output")
        self._whole = run.tensors(step, rank, "whole")
        inputs = run.tensors(step, rank, "input")
        self._tokens = [
            inputs[f"{number}/{micro.names[0]}"].shape[-1] if micro.names else 0
            for number, micro in enumerate(self.record.micro_batches)
        ]
        self.by_name = {(c.module, c.micro_batch, c.number): c for c in self.record.calls}
        #: of each module and the number of its call when it first ended
        self.order = {(c.module, c.number): at for at, c in reversed([*enumerate(self.record.calls)])}

    def rows(self, call: ModuleCall, whole: bool = False) -> dict[str, torch.Tensor]:
        """Returns the output as rows, in each way to see it; or numbers without a fraction that went in."""
        tensor = (self._whole if whole else self._tensors).get(call.key.removeprefix("output/"))
        if tensor is None:
            return {}
        batch = len(self.record.micro_batches[call.micro_batch].samples)
        return rows_of_output(tensor.unsqueeze(-1) if whole else tensor, batch, self._tokens[call.micro_batch])

    def all_of(self, module: str, width: int) -> torch.Tensor:
        """Returns all rows that a module has given in this step, in no order. [rows, 3]"""
        outputs = [self._tensors[call.key.removeprefix("output/")] for call in self.record.calls
                if call.module == module and call.shape[-1:] == (width,)]  # fmt: skip
        return torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in outputs])


def parted_outputs(
    step_pair: StepPair, samples: StepSamples, maps: ParameterMap
) -> tuple[list[ComparedOutput], set[str]]:
    """Returns outputs that differ from the reference's, in order of execution, and modules whose outputs are equal.

    What was compared and is in neither is a part of an output, as the sum of one rank's share is.
    """
    reference, other, step = step_pair
    reference_outputs = StepOutputs(reference.run, step, 0)
    parted: list[ComparedOutput] = []
    equal: dict[str, bool] = {}
    for rank, parts in maps.parts.items():
        candidate = StepOutputs(other, step, rank)
        renamed = renamed_modules(parts)
        # of a module with a parameter of which the rank has a part, the output may be a part, too
        cut = {name.rpartition(".")[0] for name, part in parts.items() if part.is_cut}
        missing = reference.whole[step].before.keys() - {part.name for part in parts.values()}
        compared = []
        for call in candidate.record.calls:
            name = reference_name(call.module, renamed)
            if not _is_whole(name, call.kind, missing):
                continue
            rows = range(len(candidate.record.micro_batches[call.micro_batch].samples))
            positions = [samples.positions.get((rank, call.micro_batch, row)) for row in rows]
            known = [position for position in positions if position is not None]
            output = None
            if len(known) == len(positions):
                output = _compare_call(candidate, reference_outputs, call, known, name, reference.tolerance)
            if output is not None:
                inside = "" if call.module == ROOT else f"{call.module}."
                strict = not any(part == call.module or part.startswith(inside) for part in cut)
                compared.append(replace(output, rank=rank, strict=strict))
        for output in compared:
            equal[output.module] = output.equal and equal.get(output.module, True)
        parted += _that_stay_apart(compared)
    return sorted(parted, key=lambda output: output.order), {name for name, always in equal.items() if always}


def _is_whole(name: str, kind: str, missing: set[str]) -> bool:
    """Whether a module has all of its parameters here: a container that is cut over stages gives something else."""
    model = name in (ROOT, kind)  # which may be called by its class
    return not any(model or module.startswith(f"{name}.") for module in missing)


def _compare_call(
    candidate: StepOutputs,
    outputs: StepOutputs,
    call: ModuleCall,
    positions: list[RowPosition],
    name: str,
    tolerance: float,
) -> ComparedOutput | None:
    """Compares a call with those of the reference's module ``name``; None where there is none to compare with.

    ``positions``: where the call's rows are in the reference.
    """
    best: ComparedOutput | None = None
    for way, rows_here in candidate.rows(call).items() if positions else ():
        wanted = _reference_rows(outputs, name, call, positions, way, rows_here.shape[1:], False)
        if wanted is None or not wanted.numel():  # as of an expert without tokens
            continue
        difference = rows_here - wanted
        scale = wanted.abs().max().item() or 1.0
        off = difference.abs().amax(dim=tuple(range(1, difference.dim()))) > tolerance * scale * 10
        equal = not bool(off.any())
        dispatched = way in (FLAT, FLAT_BY_TOKENS) and not equal
        if dispatched and _all_rows_present(rows_here, outputs.all_of(name, call.shape[-1]), scale, tolerance):
            continue
        inputs = None
        if (integers := candidate.rows(call, True).get(way)) is not None:
            expected = _reference_rows(outputs, name, call, positions, way, integers.shape[1:], True)
            inputs = None if expected is None else bool(torch.equal(integers, expected))
        if best is None or equal:
            apart, rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (difference, wanted))
            order = outputs.order[name, call.number]
            best = ComparedOutput(-1, name, call.kind, order, False, apart, rows, inputs, equal)
    return best


def _all_rows_present(rows: torch.Tensor, wanted: torch.Tensor, scale: float, tolerance: float) -> bool:
    """Whether each of the rows is one of the reference's, wherever: the same tokens in another order."""
    parts = rows.reshape(-1, rows.shape[-1]).split(256)
    return all(
        bool(((part[:, None] - wanted[None]).abs().amax(-1).amin(1) <= tolerance * scale * 10).all()) for part in parts
    )


def _reference_rows(
    outputs: StepOutputs,
    name: str,
    call: ModuleCall,
    positions: list[RowPosition],
    way: str,
    shape: torch.Size,
    whole: bool,
) -> torch.Tensor | None:
    """Returns the reference's rows for these positions in a call's shape; None where it has no such output."""
    expected = []
    by_micro: dict[int, torch.Tensor | None] = {}
    for position in positions:
        if position.micro_batch not in by_micro:
            output = outputs.by_name.get((name, position.micro_batch, call.number))
            fits = output is not None and (whole or output.shape[-1:] == call.shape[-1:])
            by_micro[position.micro_batch] = (
                outputs.rows(output, whole).get(way) if output is not None and fits else None
            )
        rows = by_micro[position.micro_batch]
        if rows is None:
            return None
        row = rows[position.row]
        if position.tokens is not None and row.dim() == len(shape):
            for axis, (size, our_size) in enumerate(zip(row.shape, shape, strict=True)):
                if size == position.length and our_size == len(position.tokens) != size:
                    row = row.index_select(axis, position.tokens)
        if row.shape != shape:
            return None
        expected.append(row)
    return torch.stack(expected)


def _that_stay_apart(compared: list[ComparedOutput]) -> list[ComparedOutput]:
    """Leaves out differences that vanish later, such as the partial sums of a cut module."""
    apart = [index for index, output in enumerate(compared) if not output.equal]
    strict = [index for index in apart if compared[index].strict]
    last = max((index for index, output in enumerate(compared) if output.equal), default=-1)
    after = [index for index in apart if index > last]
    if not strict and len(compared) - 1 not in after:
        return []
    first = min([*strict, *after])
    return [compared[index] for index in apart if index == first or compared[index].strict or index > last]


#: A mask of fewer elements may be the same by chance.
LEAST = 32


#: What is said of ranks' masks, and of where they are.
_MASKS = {
    "same-random-numbers": "draw the same dropout mask for different inputs, at {}: seed each rank by its own number "
    "where its part is its own",
    "different-random-numbers": "draw different dropout masks for the same input, at {}: what they hold alike has "
    "to be drawn alike",
}


def mask_findings(step_pair: StepPair) -> list[Finding]:
    """Finds what is wrong with a step's dropout masks."""
    steps = step_pair.records
    samples = [[micro.samples for micro in rank_step.micro_batches] for rank_step in steps]
    forward = [_forward_masks(rank_step.masks) for rank_step in steps]
    groups: dict[str, list[set[int]]] = {}  # of each cause, ranks that belong together
    first: dict[str, Mask] = {}
    for rank, other_rank in combinations(range(len(steps)), 2):
        for draw, a in forward[rank].items():
            b = forward[other_rank].get(draw, a)
            if a.elements < LEAST or a.elements != b.elements:
                continue
            if a.input != b.input and a.dropped == b.dropped:
                cause = "same-random-numbers"
            elif a.input == b.input and a.dropped != b.dropped and samples[rank] == samples[other_rank]:
                # replicas may have one input by chance, as memory that nobody has written yet
                cause = "different-random-numbers"
            else:
                continue
            some = groups.setdefault(cause, [])
            touched = [group for group in some if group & {rank, other_rank}]
            groups[cause] = [group for group in some if group not in touched] + [{rank, other_rank}.union(*touched)]
            first.setdefault(cause, a)
    findings = [finding for rank_step in steps if (finding := _recomputed_finding(step_pair, rank_step.masks))][:1]
    for cause, mask in sorted(first.items(), reverse=True):
        ranks = " and ".join(ranks_text(sorted(group)) for group in sorted(groups[cause], key=min))
        why = f"{ranks} {_MASKS[cause].format(mask.line)}"
        findings.append(step_pair.finding("random numbers", cause, why, module=mask.module))
    return findings


def _forward_masks(masks: list[Mask]) -> dict[tuple[str, int], Mask]:
    """Returns the forward passes' masks by module and number of the draw."""
    counts: Counter[str] = Counter()
    by_call = {}
    for mask in (mask for mask in masks if not mask.repeated):
        by_call[mask.module, counts[mask.module]] = mask
        counts[mask.module] += 1
    return by_call


def _recomputed_finding(step_pair: StepPair, masks: list[Mask]) -> Finding | None:
    """Finds a mask that a recomputation draws anew for the same input."""
    for mask in (mask for mask in masks if mask.repeated):
        before = [m for m in masks if not m.repeated and m.input == mask.input and m.line == mask.line]
        if before and all(m.dropped != mask.dropped for m in before):
            return step_pair.finding(
                "random numbers", "recomputed-differently",
                f"the forward pass is computed again with another dropout mask, at {mask.line}: the gradient is that "
                "of a network which nobody ran",
                module=mask.module,
            )  # fmt: skip
    return None


def buffer_findings(step_pair: StepPair) -> list[Finding]:
    """Finds buffers that are saved with the model and differ from the reference's on some ranks.

    A batch norm's statistics are left out: they are of a rank's own samples, and its output says whether that matters.
    """
    reference, other, step = step_pair
    norms = {name for record in other.records for name in record.batch_norms}
    by_rank = [other.tensors(step, rank, "buffer") for rank in range(other.layout.ranks)]
    ranks: dict[str, list[int]] = {}
    for name, value in reference.run.tensors(step, 0, "buffer").items():
        if name.rpartition(".")[0] in norms or not value.is_floating_point():
            continue
        for rank, tensors in enumerate(by_rank):
            candidate = tensors.get(name, value)
            limit = reference.tolerance * 10 * value.abs().max() if value.numel() else 0.0
            if candidate.shape == value.shape and bool(((candidate - value).abs() > limit).any()):
                ranks.setdefault(name, []).append(rank)
    if not ranks:
        return []
    name = next(iter(ranks))
    return [
        step_pair.finding(
            "buffers", "buffers",
            f"the buffer{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} on {ranks_text(ranks[name])} "
            f"{'are' if len(ranks) > 1 else 'is'} not the reference's: what is kept beside parameters has to be the "
            "same on all ranks, too",
            module=name.rpartition(".")[0],
        )
    ]  # fmt: skip


def clipping_findings(step_pair: StepPair) -> list[Finding]:
    """Finds gradient norms and learning rates that differ from the reference's."""
    reference = step_pair.reference_record
    findings: list[Finding] = []
    for rank, candidate in enumerate(step_pair.records):
        if reference.clips and candidate.clips and not findings:
            wanted, norm = reference.clips[-1], candidate.clips[-1]
            if not math.isclose(wanted, norm, rel_tol=step_pair.reference.tolerance * 10):
                why = _explain_norm(step_pair, rank, wanted, norm)
                findings.append(step_pair.finding("clipping", "wrong-norm", why, norm / wanted))
        rates = set(reference.learning_rates), set(candidate.learning_rates)
        if all(rates) and not all(
            any(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-300) for b in rates[0]) for a in rates[1]
        ):
            findings.append(_rate_finding(step_pair, max(rates[0]), max(rates[1])))
            break
    return findings


def _rate_finding(step_pair: StepPair, wanted: float, rate: float) -> Finding:
    reference, other, step = step_pair
    rates = [record.learning_rates[-1:] for record in reference.run.records[0].steps]
    later = [number for number, at_step in enumerate(rates) if at_step and math.isclose(at_step[0], rate, rel_tol=1e-9)]
    why = f"the learning rate of step {step + 1} is {rate:.6g}, and the reference's {wanted:.6g}"
    if later:
        why += f", which has {rate:.6g} in step {later[0] + 1}"
    factor = rate / wanted if wanted else None
    if named := layout_factor(other.layout, factor or 0.0, 1e-6):
        why += f": {named.text}"
    steps = other.layout.values.get("accumulate")
    if not later and isinstance(steps, int) and steps > 1:
        why += f"; a scheduler that is stepped for each of {steps} micro-batches is ahead"
    return step_pair.finding("learning rate", "learning-rate", why, factor)


def _explain_norm(step_pair: StepPair, rank: int, wanted: float, norm: float) -> str:
    reference, other, step = step_pair
    norms_text = distinct_digits(norm, wanted)
    why = f"gradients are right, and clipped by a norm of {norms_text[0]} where it is {norms_text[1]}"
    if math.isclose(norm_of(other.tensors(step, rank, "gradient")), norm, rel_tol=reference.tolerance * 10):
        return f"{why}: that is the norm of what rank {rank} holds, and not of the whole model"
    if norm <= wanted:
        return f"{why}: parts of it are missing"
    why += ": parts of it are counted more than once"
    surplus = norm**2 - wanted**2
    for name, gradient in reference.whole[step].gradients.items():
        if math.isclose(norm_of({name: gradient}) ** 2, surplus, rel_tol=1e-4):
            why += f", {name}'s twice"
    return why


def scale_findings(step_pair: StepPair) -> list[Finding]:
    """Finds loss scales that differ from the reference's, or between ranks."""
    reference, steps = step_pair.reference_record, [record for record in step_pair.records if record.scales]
    if not steps:
        return []
    skipped, scales = sorted({record.skipped for record in steps}), sorted({record.scales[-1] for record in steps})
    if len(skipped) > 1:
        why = (
            f"before it some ranks skip {skipped[-1]} steps and others {skipped[0]}: each looks for infinities in what "
            "it holds itself; the answer has to be one for all, as ShardedGradScaler's is"
        )
    elif len(scales) > 1:
        why = f"ranks scale their losses by {scales[0]:g} to {scales[-1]:g}: the number has to be one for all"
    elif skipped[0] != reference.skipped:
        why = (
            f"before it {skipped[0]} steps are skipped, and {reference.skipped} in the reference: gradients of the "
            f"scaled loss are not finite, at last at a scale of {scales[0]:g}"
        )
    else:
        return []
    return [step_pair.finding("loss scale", "loss-scale", why)]
