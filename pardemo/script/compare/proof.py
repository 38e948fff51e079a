"""Proves that layouts train alike; large models are compared by sketches first, in full where these differ."""

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from pardemo.argument_checks import whole_number
from pardemo.script.compare import across_layouts, replayed_inputs, run_layouts, runs
from pardemo.script.compare.closeness import nearly_equal
from pardemo.script.compare.comparison import LayoutComparison, compare_layout
from pardemo.script.compare.differences import Finding
from pardemo.script.compare.multiplied import counted_by_each_rank
from pardemo.script.compare.reference import Reference, noise_between, tolerance_of
from pardemo.script.compare.results import LayoutResult, Proof
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.compare.runs import ProveError, Run, RunOptions
from pardemo.script.record import rank_record
from pardemo.script.record.numbers import SHORT
from pardemo.script.record.rank_record import Step
from pardemo.script.words import count_text

#: Elements of the parameters that are recorded in full where a layout parts.
IN_FULL = 50_000_000


def compare_in_full(
    reference: Reference, other: Run, compared: LayoutComparison, options: RunOptions, folder: Path
) -> LayoutComparison:
    """Compares a layout again that was compared by sketches, with the differing parameters recorded in full.

    Both are run again for it, up to the step in which they part. Where no parameters part, nothing is run. What
    sketches say of a part that does not begin at one of their blocks is not true, and does not come again.
    """
    parted = [name for finding in compared.findings for name in finding.parameters]
    unknown, pieces = sorted(compared.maps.unknown), compared.maps.parameters_of_pieces()
    sizes = runs.elements(reference.run) | {
        name: size for name, size in runs.elements(other).items() if name in unknown
    }
    fused = [
        name for names in pieces.values() if len(names) > 1 and names.intersection(parted) for name in sorted(names)
    ]
    chosen = _within_budget([*parted, *fused, *unknown], sizes)
    if not chosen:
        return compared
    named = chosen | {piece for piece, names in pieces.items() if names & chosen}
    # parameters that sketches have nothing of may part in any step
    steps = options.steps if compared.unmatched else max(finding.step for finding in compared.findings)
    options = replace(options, steps=steps, in_full=tuple(sorted(named)))
    again = [
        runs.run_layout(run.layout, options, folder / name)
        for run, name in ((reference.run, "first"), (other, "second"))
    ]
    try:
        if any(run.error or not run.steps for run in again):
            return compared
        in_full = compare_layout(Reference(again[0], reference.tolerance, reference.noise), again[1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not in_full.findings and not chosen.issuperset(parted):  # what parts is past the budget
        return compared
    elements = sum(sizes.get(name, 0) for name in chosen)
    many = f"{count_text(len(chosen), 'parameter')} of {elements:,} elements"
    in_full.notes.append(f"{other.layout.name}: {many}, compared in full")
    return in_full


def _within_budget(names: Iterable[str], sizes: dict[str, int]) -> set[str]:
    """Returns as many of the names, in their order, as the budget has room for."""
    chosen: set[str] = set()
    left = IN_FULL
    for name in dict.fromkeys(names):
        if 0 < sizes.get(name, 0) <= left:
            left -= sizes[name]
            chosen.add(name)
    return chosen


def compare_layouts(layouts: Sequence[RunLayout], options: RunOptions) -> Proof:
    """Runs a script in each layout, and compares all with the first.

    Raises:
        ProveError: the reference could not be run, took no step, or is not the same twice.
    """
    with runs.scratch_folder() as folder:
        return _proof(layouts, options, Path(folder))


def prepare_reference(layout: RunLayout, options: RunOptions, folder: Path) -> tuple[Reference, RunOptions, list[str]]:
    """Runs the reference into a folder; returns it, the options of all other runs, and the short types it computes in.

    Raises:
        ProveError: it could not be run, took no step, does not train, or is not the same twice.
    """
    run, _, tolerance, options = run_twice(
        lambda options, name: runs.run_layout(layout, options, folder / name), options
    )
    reference = Reference(run, tolerance)
    _require_training(reference)
    # types of few bits that the script computes in or keeps parameters in
    types = {name for record in run.records for name in (*record.computed_in, *record.dtypes)}
    if short := sorted(types & SHORT.keys()):
        rounded = runs.run_layout(layout, replace(options, rounded=True), folder / "rounded")
        runs.require_steps(rounded)
        reference.noise = noise_between(reference, rounded)
    return reference, options, short


def _proof(layouts: Sequence[RunLayout], options: RunOptions, folder: Path) -> Proof:
    reference, options, short = prepare_reference(layouts[0], options, folder)
    run = reference.run
    steps = run.steps
    proof = Proof(
        [LayoutResult(layouts[0], steps_run=steps, steps_compared=steps)], list(run.records[0].notes),
        asked=options.steps, parameters=len(reference.whole[0].before), tolerance=reference.tolerance, rounded=short,
        replayed=options.replay is not None,
    )  # fmt: skip
    if options.sketched:
        proof.notes.append(f"{sum(runs.elements(run).values()):,} elements: parameters are compared by sketches")
    for number, layout in enumerate(layouts[1:], 1):
        result, notes = _run_and_compare(reference, layout, options, folder / str(number))
        proof.layouts.append(result)
        proof.notes += [note for note in notes if note not in proof.notes]
    across_layouts.explain_across([result for result in proof.layouts[1:] if not result.error])
    for result in proof.layouts:
        result.left_open = None  # whole gradients, which nobody asks for any more
    return proof


def _run_and_compare(
    reference: Reference, layout: RunLayout, options: RunOptions, folder: Path
) -> tuple[LayoutResult, list[str]]:
    """Runs a layout and compares it with the reference; also returns notes about the comparison."""
    run = Run(layout)
    try:
        run = runs.run_layout(layout, options, folder)
        compared = compare_run(reference, run, options, folder)
    except ProveError as error:
        return LayoutResult(layout, str(error), error.details), replayed_inputs.replay_notes(run, options.steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result_of(run, compared, options)


def result_of(run: Run, compared: LayoutComparison, options: RunOptions) -> tuple[LayoutResult, list[str]]:
    """Makes a layout's result of its run and of the comparison with the reference; also returns notes about it."""
    layout, records = run.layout, [record.steps for record in run.records]
    result = LayoutResult(
        layout, steps_run=min(options.steps, *map(len, records)), steps_compared=compared.steps,
        not_compared=compared.not_compared,
    )  # fmt: skip
    if compared.unmatched and (compared.strange or not compared.findings):
        result.error = compared.unmatched
        return result, []
    result.error = "" if compared.findings else compared.in_part
    result.findings = [replace(finding, line=_line_of(finding, records)) for finding in compared.findings]
    result.model, result.left_open = compared.model, compared.left_open
    notes = [*([f"{layout.name}: {compared.unmatched}"] if compared.unmatched else []), *compared.notes]
    return result, [*replayed_inputs.replay_notes(run, compared.steps), *notes]


#: By what a finding is of: what the step does there, whose line it has.
_DONE_BY = {
    "gradients": rank_record.BACKWARD, "parameters after the step": rank_record.STEP, "learning rate": rank_record.STEP,
    "loss scale": rank_record.STEP, "clipping": rank_record.CLIP, "printed": rank_record.PRINT,
}  # fmt: skip


def _line_of(finding: Finding, ranks: Sequence[Sequence[Step]]) -> str:
    """Returns the script's line of the call that a finding is about, as seen from the working folder.

    It calls the module, goes backward, clips, steps, prints the loss. Where it clips within its engine's step, that.
    """
    done = _DONE_BY.get(finding.what)
    wanted = [done, rank_record.STEP] if done else [rank_record.called(finding.module), rank_record.FORWARD]
    lines = [steps[finding.step - 1].lines for steps in ranks if len(steps) >= finding.step]
    site = next((line for event in wanted for rank_lines in lines if (line := rank_lines.get(event))), "")
    inside = os.path.join(os.getcwd(), "")
    return site.removeprefix(inside)


def compare_run(reference: Reference, other: Run, options: RunOptions, folder: Path) -> LayoutComparison:
    """Compares a layout's run with the reference.

    Raises:
        ProveError: it could not be run, or not be compared.
    """
    if other.error:
        raise ProveError(other.error, other.details)
    if not other.steps:
        raise ProveError(f"{other.layout.name} took no step of an optimizer after a backward pass")
    require_hashed_samples(other)
    compared = compare_layout(reference, other)
    _require_same_draws(reference.run, other, compared)
    compared.in_part = _partial_reason(reference.run, other)
    if options.sketched and (compared.findings or compared.unmatched):
        compared = compare_in_full(reference, other, compared, options, folder / "full")
    case = compared.left_open
    if case and (explained := counted_by_each_rank(reference, other, compared, case, options, folder / "multiplied")):
        compared.findings = [explained if finding == case.finding else finding for finding in compared.findings]
        compared.left_open = None
    replayed_inputs.judge_replay(other, compared)
    return compared


#: Causes of what differs where random numbers do.
_NO_OTHER_CAUSE = ("", "data", "loss", "follows")


def _require_same_draws(reference: Run, other: Run, compared: LayoutComparison) -> None:
    """Raises an error where something differs without a cause, and ranks draw other numbers than the reference.

    The second step tells it: in the first, models and data are made.
    """
    records = [reference.records[0], *other.records]
    unexplained = all(finding.cause in _NO_OTHER_CAUSE for finding in compared.findings)
    if not compared.findings or not unexplained or any(len(record.steps) < 2 for record in records):
        return
    wanted, *drawn = (record.steps[1].draws for record in records)
    first = compared.findings[0]
    if first.cause == "data" and len(drawn) > 1 and all(draws == drawn[0] for draws in drawn):
        return  # ranks that draw alike have the same samples
    if lines := [line for draws in drawn for line, numbers in draws.items() if wanted.get(line) != numbers]:
        raise ProveError(
            f"step {first.step} differs in {first.what}, and {lines[0]} draws other random numbers than in the "
            "reference, so that nothing is known: draw those of the whole batch on each rank, or by a sample's number"
        )


def _require_training(reference: Reference) -> None:
    """Raises an error where nothing has a gradient, or nothing changes: no layout could differ from it."""
    gradients = [tensor for parameters in reference.whole for tensor in parameters.gradients.values()]
    changed = any(
        not torch.equal(tensor, parameters.before[name])
        for parameters in reference.whole for name, tensor in parameters.after.items() if name in parameters.before
    )  # fmt: skip
    why = "" if changed else "no parameter of its models changes in {}: is the learning rate 0, as in a warm-up?"
    if gradients and not any(bool(tensor.any()) for tensor in gradients):  # some engines show none
        why = "its gradients are zero in {}; look at what the loss is computed from"
    if why:
        steps = count_text(reference.run.steps, "step")
        raise ProveError(f"the reference, {reference.run.layout.name}, does not train: {why.format(steps)}")


def _partial_reason(reference: Run, other: Run) -> str:
    """Says what of a layout could not be compared, though the rest was equal; empty where all was."""
    steps = [min((len(record.steps) for record in run.records), default=0) for run in (reference, other)]
    if other.steps < reference.steps and steps[1] < steps[0]:
        return (
            f"it ended after {count_text(other.steps, 'step')} of {reference.steps}: these are equal, and what would "
            "have come is not known"
        )
    if other.layout.ranks > 1 and all(record.alone for record in other.records):
        return (
            f"no collective is called: each of the {other.layout.ranks} ranks trains by itself, as if it were the only "
            "one; the script needs torch.distributed.init_process_group, and gradients that are summed"
        )
    return ""


def require_hashed_samples(run: Run) -> None:
    """Raises an error where the model's inputs cannot be seen: then no rank's samples are known."""
    kinds = {kind for record in run.records for micro in record.steps[0].micro_batches for kind in micro.unseen}
    if kinds:
        raise ProveError(
            f"the samples of {run.layout.name} cannot be compared: the model is called with "
            f"{', '.join(sorted(kinds))}, of which nothing can be hashed; call it with tensors, in lists, dicts or "
            "dataclasses where you like"
        )


def run_twice(run: Callable[[RunOptions, str], Run], options: RunOptions) -> tuple[Run, Run, float, RunOptions]:
    """Runs the reference twice; returns both runs, the tolerance for its types, and the options of all other runs.

    The first of the two keeps sketches of parameters, which are enough to see whether the second is the same; if the
    model is a large one, they all do from then on.

    Args:
        run: runs it into a folder by its name.

    Raises:
        ProveError: it could not be run, took no step, or is not the same twice: nothing could be held against it.
    """
    again = run(replace(options, sketched=True), "again")
    runs.require_steps(again)
    if sum(runs.elements(again).values()) > runs.SKETCHED:
        options = replace(options, sketched=True)
    first = run(options, "first")
    runs.require_steps(first)
    require_hashed_samples(first)
    tolerance = tolerance_of(first, options.double)
    if difference := difference_between(first, again, tolerance, options.sketched):
        lines = [line for record in first.records for line in record.unseeded]
        seed = f": {lines[0]} draws without a seed" if lines else ""
        raise ProveError(
            f"the script is not the same twice: two runs of {first.layout.name} have different {difference}{seed}; "
            "seed all that it draws from, and compare again"
        )
    return first, again, tolerance, options


def difference_between(first: Run, second: Run, tolerance: float, sketched: bool) -> str:
    """Says what differs in two runs of a layout, as ``samples in step 2``; empty where nothing does.

    ``sketched``: whether the first kept sketches of parameters, as the second did.
    """
    kinds = {"before": "parameters", "input": "samples", "output": "outputs", "gradient": "gradients"}
    for step, rank, kind in product(range(min(first.steps, second.steps)), range(first.layout.ranks), kinds):
        a, b = first.tensors(step, rank, kind), second.tensors(step, rank, kind)
        if kind in ("before", "gradient") and not sketched:
            a = {name: rank_record.sketch_of(tensor) for name, tensor in a.items()}
        if a.keys() != b.keys() or any(not nearly_equal(a[name], b[name], tolerance) for name in a):
            return f"{kinds[kind]} in step {step + 1}"
    return ""


def script(
    line: str | Sequence[str], layouts: Sequence[str], *, double: bool = False, steps: int = 3, timeout_s: float = 600.0
) -> Proof:
    """Runs a training script in each layout, and compares all with the first: ``pardemo prove`` in Python.

    >>> script("train.py --batch {batch}", ["ranks=1 batch=8", "ranks=4 batch=2"]).equal    # doctest: +SKIP
    True

    Args:
        line: the script and its own arguments, with ``{names}`` that the layouts say.
        layouts: as ``"ranks=4 batch=2"``; the first is the reference.
        double: turns the script's numbers to fp64, so that a difference is a difference.
        steps: first steps to compare. timeout_s: for each layout.

    Raises:
        ValueError: a layout or the line cannot be read; one line.
        ProveError: the reference could not be run, took no step, or is not the same twice.
    """
    words = run_layouts.words_of(line) if isinstance(line, str) else list(line)
    options = runs.RunOptions(steps=whole_number(steps, "steps"), double=double, timeout_s=timeout_s)
    return compare_layouts(run_layouts.from_texts(layouts, words), options)
