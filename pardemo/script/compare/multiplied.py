"""Finds parameters in no module that each rank of a group adds, by running the reference with them multiplied."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from pardemo.script.compare import runs
from pardemo.script.compare.comparison import LayoutComparison
from pardemo.script.compare.differences import Finding, UnexplainedGradients
from pardemo.script.compare.pairs import compare_pair, layer_scales
from pardemo.script.compare.reference import Reference
from pardemo.script.compare.run_layouts import size_text
from pardemo.script.compare.runs import Run, RunOptions
from pardemo.script.record.parameters import Multiplied

#: Runs of the reference that are spent on it: of some parameters alone, and of all that have one axis together.
MOST_RUNS = 6


def counted_by_each_rank(
    reference: Reference,
    other: Run,
    compared: LayoutComparison,
    case: UnexplainedGradients,
    options: RunOptions,
    folder: Path,
) -> Finding | None:
    """Explains wrong gradients by a parameter in no module that each rank adds; None where that does not explain them.

    No module's output shows what such a parameter is used for, and gradients and the loss are wrong by no number: the
    loss is taken elsewhere. So it is tried: a bias that n ranks add before their sum counts as one that is n times as
    large, and the reference, run with such a one, then has this layout's loss and gradients.

    Args:
        case: the finding that has no cause yet. folder: for the runs, removed behind each.
    """
    if options.sketched or case.loss_is_right:  # a bias that counts n times changes the loss
        return None
    for names, number in _attempts(reference, other, compared):
        multiplied = Multiplied(case.finding.step - 1, names, number)
        run = runs.run_layout(
            reference.run.layout, replace(options, steps=case.finding.step, multiplied=multiplied), folder
        )
        try:
            if not run.error and run.steps == case.finding.step and _is_the_layouts(reference, run, case):
                return case.finding.explained("counted-per-rank", _why(other, names, number), parameters=names)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return None


def _attempts(reference: Reference, other: Run, compared: LayoutComparison) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields which parameters to multiply, and by what: those in no module that every rank has whole."""
    parts = [{part.name: part for part in rank_parts.values()} for rank_parts in compared.maps.parts.values()]
    bare = [
        name for name in reference.whole[0].before
        if name.startswith("optimizer.") and all(name in held and not held[name].is_cut for held in parts)
    ]  # fmt: skip
    together = tuple(name for name in bare if reference.whole[0].before[name].dim() == 1)
    tried = list(dict.fromkeys([together, *((name,) for name in bare)])) if bare else []
    numbers = dict.fromkeys(size for key in _KEYS if (size := other.layout.sizes.get(key, 1)) > 1)
    attempts = [(names, number) for number in numbers for names in tried if names]
    yield from attempts[:MOST_RUNS]


#: Groups whose ranks may add up what they have, those that cut a layer first.
_KEYS = ("tp", "ep", "cp", "sp", "ranks")


def _why(other: Run, names: tuple[str, ...], number: int) -> str:
    key = next(key for key in _KEYS if other.layout.sizes.get(key, 1) == number)
    text = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return (
        f"each of {number} ranks ({size_text(key)}) counts {text}, as a bias that each of them adds before the sum: "
        f"run with it {number} times as large, the reference has this layout's loss and gradients"
    )


def _is_the_layouts(reference: Reference, run: Run, case: UnexplainedGradients) -> bool:
    """Whether a run of the reference has a layout's loss and wrong gradients, and all others as they were."""
    step = case.finding.step - 1
    losses = run.records[0].steps[step].losses
    if not any(math.isclose(sum(losses), loss, rel_tol=reference.tolerance * 10) for loss in case.losses[1:]):
        return False
    tried, wrong = Reference(run, reference.tolerance).whole[step].gradients, {pair.name: pair for pair in case.pairs}
    wanted, scale = reference.whole[step].gradients, layer_scales(tried)
    if tried.keys() != wanted.keys():
        return False
    for name, gradient in tried.items():
        pair = wrong.get(name)
        candidate = wanted[name] if pair is None else pair.candidate
        covered = torch.ones_like(candidate, dtype=torch.bool) if pair is None else pair.covered
        near = compare_pair(name, gradient, candidate, covered, scale[name], reference.tolerance * 10, [])
        if not near.equal:
            return False
    return True
