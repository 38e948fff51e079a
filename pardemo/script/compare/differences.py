"""Holds what differs from the reference in a step of a layout, and keeps the tensors of what has no cause."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pardemo.script.compare.pairs import Pair
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.compare.runs import Run
from pardemo.script.record.rank_record import Step, Tensors

#: Bytes of the tensors that are kept of a finding. What is beyond is left out, and said to be.
MOST_BYTES = 64_000_000


@dataclass(frozen=True)
class KeptTensors:
    """The tensors of a finding in the reference and in the layout.

    ``gradient/NAME/reference`` and ``gradient/NAME/layout`` in whole; where ranks hold the same part and have different
    values each one's, too, as ``gradient/NAME/rank 1``. Of a module's output what was recorded of it, two random
    projections of each row and its norm: ``output/NAME/rank 0/0/reference``, with the number of the call.
    ``left_out``: what there was no room for. ``sketches``: parameters of which these are sketches.
    """

    tensors: Tensors
    left_out: tuple[str, ...] = ()
    sketches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A difference from the reference, in one layout from one step on."""

    layout: str
    step: int
    #: what differs, as ``gradients``
    what: str
    #: a short name, or empty where nobody knows
    cause: str
    #: the sentence for the reader
    why: str
    #: of gradients, or of what differs: the c for which c times the reference's is nearest, and what is left beside it
    factor: float | None = None
    rest: float | None = None
    #: the reference's names
    parameters: tuple[str, ...] = ()
    #: the first that is wrong, in the order of execution forwards, then backwards
    module: str = ""
    #: the script's line that does what is wrong, as ``train.py:31``, seen from the working folder
    line: str = field(default="", compare=False)
    #: of a finding without a cause
    tensors: KeptTensors | None = field(default=None, compare=False, repr=False)
    #: where these were written, in the folder of ``--out``
    tensors_file: str | None = field(default=None, compare=False)

    def explained(self, cause: str, why: str, **changes: Any) -> "Finding":
        """Returns the finding with a cause, and so without tensors."""
        return replace(self, cause=cause, why=why, tensors=None, **changes)

    def as_json(self) -> dict[str, Any]:
        """Returns the finding for JSON, which has no infinities."""
        left_out = ("line", "tensors", "tensors_file")
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in vars(self).items()
            if name not in left_out
        }


@dataclass(frozen=True)
class ComparedOutput:
    """A module's output on one rank, compared with the reference's. ``strict``: none of its parameters is cut.

    ``difference``: of the two projections, where a constant is added everywhere it is the same in all. [cells, 3]
    ``whole_inputs``: whether numbers that went in, as positions do, are the reference's; None where none did.
    """

    rank: int
    module: str
    kind: str
    order: int
    strict: bool
    difference: torch.Tensor
    reference: torch.Tensor
    whole_inputs: bool | None
    equal: bool = False


@dataclass
class StepComparison:
    """A step of one layout, compared with the reference's. Parameters have the reference's names."""

    layout: RunLayout
    #: its number, from 0 on
    step: int
    #: relative difference that counts as rounding
    tolerance: float
    #: modules as they run in the reference, by their number
    order: dict[str, int]
    #: each parameter's gradient beside the reference's
    gradients: dict[str, Pair] = field(default_factory=dict)
    #: each parameter's change in the step beside the reference's
    updates: dict[str, Pair] = field(default_factory=dict)
    #: the reference's gradients in the steps before
    earlier: list[dict[str, torch.Tensor]] = field(default_factory=list)
    #: outputs that differ, in the order of execution
    parted: list[ComparedOutput] = field(default_factory=list)
    #: parameters' other names
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: parameters of which some rank has a part
    cut: set[str] = field(default_factory=set)
    #: how many ranks hold each parameter
    holders: dict[str, int] = field(default_factory=dict)
    #: parameters whose gradients are the same on all ranks when the optimizer steps, if they were clipped before
    together: set[str] = field(default_factory=set)
    #: of each rank and parameter the names under which the rank has it, several where it is tied there
    names: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    #: the norm of the reference's whole gradient in each step
    norms: list[float] = field(default_factory=list)
    #: of parameters whose pieces have the values of another one, that one
    moved: dict[str, str] = field(default_factory=dict)
    #: of each parameter the gradients that it had after each micro-batch but the last, added up
    accumulated: dict[str, torch.Tensor] = field(default_factory=dict)
    #: the classes of the reference's optimizers, and what they are made of
    optimizer: str = ""
    #: the record of the step on each rank
    steps: Sequence[Step] = ()
    #: the record of the step in the reference
    reference_step: Step = field(default_factory=Step)

    @property
    def predicate_tolerance(self) -> float:
        """A tolerance for what is computed with both tensors: ten times the comparison's."""
        return self.tolerance * 10

    @property
    def losses(self) -> list[float]:
        """The loss of each rank in the step, of those that have one: a pipeline's other stages have none."""
        return [sum(step.losses) for step in self.steps if step.losses]

    def first_module(self, names: Iterable[str]) -> str:
        """Returns the module of these parameters that a backward pass reaches first: the one that ran last."""
        modules = [alias.rpartition(".")[0] for name in names for alias in (name, *self.tied.get(name, ()))]
        return max(modules, key=self.position, default="")

    def position(self, module: str) -> int:
        """Returns a module's number in the reference's order of execution, or that of the nearest module around it."""
        while module and module not in self.order:
            module = module.rpartition(".")[0]
        return self.order.get(module, -1)


@dataclass(frozen=True)
class UnexplainedGradients:
    """Wrong gradients of a layout for which this layout alone gives no reason.

    ``losses``: the reference's, and the layout's as the mean of its ranks' and as their sum.
    """

    finding: Finding
    pairs: tuple[Pair, ...]
    tolerance: float
    losses: tuple[float, float, float]

    @property
    def loss_is_right(self) -> bool:
        return any(math.isclose(self.losses[0], loss, rel_tol=self.tolerance * 10) for loss in self.losses[1:])


def with_tensors(findings: Sequence[Finding], comparison: StepComparison, reference: Run) -> list[Finding]:
    """Returns the findings, those without a cause with their tensors, up to :data:`MOST_BYTES` of each."""
    pieces = [piece for record in reference.records for piece in record.steps[comparison.step].pieces]
    shapes = {piece.name: piece.whole or piece.shape for piece in pieces}
    completed = []
    for finding in findings:
        tensors: Tensors = {}
        left_out, sketches = [], []
        groups = _output_tensors if finding.what == "forward" else _gradient_tensors
        for name, group in groups(finding, comparison) if not finding.cause else ():
            if sum(tensor.nbytes for tensor in (*tensors.values(), *group.values())) > MOST_BYTES:
                left_out.append(name)
                continue
            tensors |= group
            if groups is _gradient_tensors and tuple(comparison.gradients[name].reference.shape) != shapes.get(name):
                sketches.append(name)
        kept = KeptTensors(tensors, tuple(left_out), tuple(sketches)) if tensors or left_out else None
        completed.append(replace(finding, tensors=kept))
    return completed


def _gradient_tensors(finding: Finding, comparison: StepComparison) -> Iterator[tuple[str, Tensors]]:
    """Yields the gradients of each parameter of the finding."""
    for name in finding.parameters:
        if (pair := comparison.gradients.get(name)) is not None:
            group = {"reference": pair.reference, "layout": pair.candidate}
            for _, versions in pair.apart:
                group |= {f"rank {rank}": tensor for rank, tensor in versions.items()}
            yield name, {f"gradient/{name}/{key}": tensor for key, tensor in group.items()}


def _output_tensors(finding: Finding, comparison: StepComparison) -> Iterator[tuple[str, Tensors]]:
    """Yields each call's output of the first module that is wrong, on each rank where it is."""
    numbers: dict[int, int] = {}
    for output in comparison.parted:
        if output.module == finding.module:
            number = numbers[output.rank] = numbers.get(output.rank, -1) + 1
            key = f"output/{output.module}/rank {output.rank}/{number}"
            yield key, {f"{key}/reference": output.reference, f"{key}/layout": output.reference + output.difference}
