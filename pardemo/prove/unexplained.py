"""Tensors of findings that nobody explains: kept, so that a reader can go on where the verdict ends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pardemo.prove.facts import Facts, Finding
from pardemo.prove.record.facts import Tensors
from pardemo.prove.runner import Run

#: Bytes of the tensors that are kept of a finding. What is beyond is left out, and said to be.
MOST_BYTES = 64_000_000


@dataclass(frozen=True)
class Kept:
    """A finding's tensors, the reference's and the layout's.

    ``gradient/NAME/reference`` and ``gradient/NAME/layout`` in whole; where ranks hold the same part and have different
    values each one's, too, as ``gradient/NAME/rank 1``. Of a module's output what was recorded of it, two random
    projections of each row and its norm: ``output/NAME/rank 0/0/reference``, with the number of the call.
    ``left_out``: what there was no room for. ``sketches``: parameters of which these are sketches.
    """

    tensors: Tensors
    left_out: tuple[str, ...] = ()
    sketches: tuple[str, ...] = ()


def kept(findings: Sequence[Finding], facts: Facts, reference: Run) -> dict[Finding, Kept]:
    """The tensors of those findings that have no cause, up to :data:`MOST_BYTES` of each."""
    shapes = {
        piece.name: piece.whole or piece.shape
        for record in reference.records
        for piece in record.steps[facts.step].pieces
    }
    made = {finding: _of(finding, facts, shapes) for finding in findings if not finding.cause}
    return {finding: one for finding, one in made.items() if one.tensors or one.left_out}


def _of(finding: Finding, facts: Facts, shapes: dict[str, tuple[int, ...]]) -> Kept:
    tensors: Tensors = {}
    left_out, sketches, left = [], [], MOST_BYTES
    for name, group in _outputs(finding, facts) if finding.what == "forward" else _gradients(finding, facts):
        nbytes = sum(tensor.nbytes for tensor in group.values())
        if nbytes > left:
            left_out.append(name)
            continue
        left -= nbytes
        tensors |= group
        if finding.what != "forward" and tuple(facts.gradients[name].reference.shape) != shapes.get(name):
            sketches.append(name)
    return Kept(tensors, tuple(left_out), tuple(sketches))


def _gradients(finding: Finding, facts: Facts) -> Iterator[tuple[str, Tensors]]:
    """Of each parameter."""
    for name in finding.parameters:
        if name in facts.gradients:
            pair = facts.gradients[name]
            by_rank: dict[int, torch.Tensor] = {}
            for _, versions in pair.apart:
                by_rank |= versions
            yield (
                name,
                {
                    f"gradient/{name}/reference": pair.reference,
                    f"gradient/{name}/layout": pair.ours,
                    **{f"gradient/{name}/rank {rank}": tensor for rank, tensor in by_rank.items()},
                },
            )


def _outputs(finding: Finding, facts: Facts) -> Iterator[tuple[str, Tensors]]:
    """Of each call of the first module whose output is wrong, on each rank where it is."""
    numbers: dict[int, int] = {}
    for one in facts.parted:
        if one.module == finding.module:
            number = numbers[one.rank] = numbers.get(one.rank, -1) + 1
            key = f"output/{one.module}/rank {one.rank}/{number}"
            yield key, {f"{key}/reference": one.reference, f"{key}/layout": one.reference + one.difference}
