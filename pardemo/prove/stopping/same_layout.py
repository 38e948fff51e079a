"""A run that goes on in the layout in which it was stopped, beside the undisturbed one: rank by rank, bit by bit."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from pardemo.prove.facts import Finding
from pardemo.prove.proof import alike
from pardemo.prove.record.facts import Tensors
from pardemo.prove.runner import STATE, Run
from pardemo.prove.stopping import generators, plan, states, stream
from pardemo.prove.stopping.state import KEPT

#: Of a rank and a parameter, the elements whose gradient is rounding and nothing else.
Noise = dict[tuple[int, str], torch.Tensor]
#: Up to which part of the largest gradient of all a gradient may be rounding.
_ROUNDING = 1e-5
#: Of a tensor's largest number: less than the last bit of bf16, a few of fp32.
_BITS = 1e-6


@dataclass
class Beside:
    """A resumed run beside the undisturbed one.

    ``begins``: behind how many steps of the undisturbed run it begins, by its parameters, or by the saves where they
    are no step's. ``exact``: whether all that was compared is equal to the last bit. ``noise``: of ranks' parameters
    the elements that are not compared, see :func:`only_rounding`. ``repeats``: whether the undisturbed run is the same
    each time to the last bit, so that what is not equal is no rounding.
    """

    name: str
    reference: Run
    resumed: Run
    begins: int
    tolerance: float
    exact: bool = True
    findings: list[Finding] = field(default_factory=list)
    noise: Noise = field(default_factory=dict)
    repeats: bool = False

    def add(self, step: int, what: str, cause: str, why: str, names: Iterable[str] = (), factor: float | None = None):
        """A finding; ``step`` counts those of the undisturbed run, from 1."""
        self.findings.append(Finding(self.name, step, what, cause, why, factor, None, tuple(names)))

    @property
    def ranks(self) -> range:
        return range(self.reference.layout.ranks)

    def differing(self, kind: str) -> dict[str, tuple[int, torch.Tensor, torch.Tensor]]:
        """Tensors of a kind in the resumed run's first step that are not the undisturbed one's: rank, theirs, ours.

        Parameters come from a file, and a step changes little of them: there, what repeats itself has no rounding.
        """
        found: dict[str, tuple[int, torch.Tensor, torch.Tensor]] = {}
        strict = self.repeats and (kind == "before" or (kind == "after" and self.exact))
        tolerance = _BITS if strict else self.tolerance
        for rank in self.ranks:
            theirs = self.reference.tensors(self.begins, rank, kind)
            ours = self.resumed.tensors(0, rank, kind)
            for name, tensor in theirs.items():
                own = _but(self.noise.get((rank, name)), tensor, ours[name]) if name in ours else None
                if own is not None and not self._equal(tensor, own, tolerance):
                    found.setdefault(name, (rank, tensor, ours[name]))
        return found

    def _equal(self, a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
        same = a.shape == b.shape and torch.equal(a, b)
        self.exact = self.exact and same
        return same or alike(b, a, tolerance)


def begins_behind(reference: Run, resumed: Run, expected: int) -> int | None:
    """Behind how many steps the undisturbed run has the parameters with which the resumed one begins; None if never."""
    own = [resumed.tensors(0, rank, "before") for rank in range(resumed.layout.ranks)]
    order = sorted(range(reference.steps), key=lambda step: (abs(step - expected), step))
    for step in order:
        theirs = [reference.tensors(step, rank, "before") for rank in range(reference.layout.ranks)]
        if all(_same(a, b) for a, b in zip(theirs, own, strict=True)):
            return step
    return None


def only_rounding(run: Run) -> Noise:
    """Elements whose true gradient is zero, as that of the biases of keys: Adam makes steps of what rounding leaves.

    So they are others in each layout, and nothing follows from them.
    """
    gradients = [[run.tensors(step, rank, "gradient") for step in range(run.steps)] for rank in range(run.layout.ranks)]
    largest = max(
        (float(g.abs().max()) for own in gradients for of in own for g in of.values() if g.numel()), default=0.0
    )
    return {
        (rank, name): torch.stack([of[name].abs() for of in own if name in of]).amax(0) <= _ROUNDING * largest
        for rank, own in enumerate(gradients)
        for name in own[0]
    }


def _but(noise: torch.Tensor | None, theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """``ours`` with ``theirs`` where only rounding is."""
    return ours if noise is None or noise.shape != ours.shape else torch.where(noise, theirs, ours)


def begins_near(reference: Run, resumed: Run, expected: int, tolerance: float, noise: Noise) -> int | None:
    """As :func:`begins_behind`, of runs that differ by rounding: the step whose parameters are nearest; None if far."""
    own = [resumed.tensors(0, rank, "before") for rank in range(resumed.layout.ranks)]
    far = {}
    for step in range(reference.steps):
        theirs = [reference.tensors(step, rank, "before") for rank in range(reference.layout.ranks)]
        if all(a.keys() == b.keys() for a, b in zip(theirs, own, strict=True)):
            pairs = [
                (a[name], _but(noise.get((rank, name)), a[name], b[name]))
                for rank, (a, b) in enumerate(zip(theirs, own, strict=True))
                for name in a
            ]
            far[step] = max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs)
    best = min(far, key=lambda step: (far[step], abs(step - expected)), default=None)
    return best if best is not None and far[best] <= tolerance else None


def _same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def judge(beside: Beside, parameters_of: int | None) -> None:
    """Adds what was not restored. ``parameters_of``: behind which step its parameters are; None of no step."""
    if parameters_of is None:
        _parameters(beside)
    samples, since = stream.said(stream.of(beside.reference), stream.of(beside.resumed), beside.begins)
    if samples:
        names = generators.moved(beside.reference, beside.resumed, since, beside.begins)
        strange = names and stream.STRANGE in samples  # made, or changed, by random numbers
        beside.add(since + 1, "data", "data", f"{samples}; {generators.told(names)}" if strange else samples)
    elif beside.repeats:
        samples, since = stream.of_ranks(beside.reference, beside.resumed, beside.begins)
        if samples:
            beside.add(since + 1, "data", "data", samples)
    _rates(beside)
    _scales(beside)
    _states(beside)
    _random(beside)
    if not beside.findings:
        _numbers(beside)
    _length(beside)


def _parameters(beside: Beside) -> None:
    """Which parameters are not those of the checkpoint."""
    apart = beside.differing("before")
    if not apart:
        return
    first = [beside.reference.tensors(0, rank, "before") for rank in beside.ranks]
    new = [name for name, (rank, _, ours) in apart.items() if torch.equal(ours, first[rank][name])]
    rounded = [name for name, (_, theirs, ours) in apart.items() if states.rounded(theirs, ours)]
    if new and beside.begins:
        beside.add(
            beside.begins + 1,
            "parameters",
            "not-restored",
            "they are what a new run begins with: they are not in the checkpoint, or are not loaded",
            new,
        )
    elif len(rounded) == len(apart):
        beside.add(beside.begins + 1, "parameters", "precision",
                   "they come back rounded to bf16: the checkpoint has fewer bits than the run", rounded)  # fmt: skip
    else:
        beside.add(beside.begins + 1, "parameters", "not-restored",
                   "they are those of no step of the undisturbed run", apart)  # fmt: skip


def _rates(beside: Beside) -> None:
    if (told := plan.rates_said(beside.reference, beside.resumed, beside.begins)) is not None:
        beside.add(told[1] + 1, "learning rate", "learning-rate", told[0])


def _scales(beside: Beside) -> None:
    theirs = beside.reference.records[0].steps[beside.begins].scales
    ours = beside.resumed.records[0].steps[0].scales
    if theirs and ours and theirs[-1] != ours[-1]:
        beside.add(
            beside.begins + 1,
            "loss scale",
            "loss-scale",
            f"the GradScaler begins at {ours[-1]:g} in place of {theirs[-1]:g}: its state is not restored",
        )


def _states(beside: Beside) -> None:
    def of(run: Run, step: int) -> Callable[[str], list[Tensors]]:
        return lambda kind: [run.tensors(step, rank, kind) for rank in beside.ranks]

    kinds = states.kinds(beside.reference, beside.begins) | states.kinds(beside.resumed, 0)
    for kind in sorted(kinds):
        theirs, found = of(beside.reference, beside.begins)(kind), of(beside.resumed, 0)(kind)
        ours = [
            {name: _but(beside.noise.get((rank, name)), theirs[rank].get(name, value), value) if value.any() else value
             for name, value in own.items()}  # a state of zeros is told as one
            for rank, own in enumerate(found)
        ]  # fmt: skip

        def earlier(kind: str = kind) -> Iterator[tuple[int, list[Tensors]]]:
            return ((step, of(beside.reference, step)(kind)) for step in range(beside.reference.steps))

        exact, told = states.compared(kind, theirs, ours, earlier, beside.begins, beside.tolerance)
        beside.exact = beside.exact and exact
        for why, names in told.items():
            if kind == STATE + KEPT:
                beside.add(beside.begins + 1, "beside the model", "not-restored", why, names)
            else:
                beside.add(beside.begins + 1, "optimizer", "optimizer-state", why, names)


def _random(beside: Beside) -> None:
    """Dropout's masks, where they are drawn; where nothing draws, nothing is lost."""
    steps = min(beside.reference.steps - beside.begins, min(len(record.steps) for record in beside.resumed.records))
    for step in range(steps):
        for rank in beside.ranks:
            theirs = beside.reference.records[rank].steps[beside.begins + step].masks
            ours = beside.resumed.records[rank].steps[step].masks
            same_inputs = [a.input for a in theirs] == [b.input for b in ours]
            if theirs and same_inputs and [a.dropped for a in theirs] != [b.dropped for b in ours]:
                beside.add(
                    beside.begins + step + 1,
                    "random numbers",
                    "random-state",
                    "dropout draws other masks than without the stop: where the generator was is not restored",
                )
                return


def _numbers(beside: Beside) -> None:
    """Gradients, the loss, buffers and updates of the first step, when all that they are made of is right."""
    for kind, what in (("buffer", "buffers"), ("gradient", "gradients"), ("after", "parameters after the step")):
        if kind == "gradient" and beside.repeats and _losses(beside):
            return
        if kind == "after" and beside.begins + 1 >= len(beside.reference.records[0].steps):
            continue
        if apart := beside.differing(kind):
            why = {
                "buffer": "buffers are not restored",
                "gradient": "the samples and the parameters are right, and the gradients are not",
                "after": "the gradient is right, and what the optimizer makes of it is not: a part of its state, or of "
                "its options, is not restored",
            }[kind]  # fmt: skip
            names = generators.moved(beside.reference, beside.resumed, beside.begins, beside.begins)
            if kind == "gradient" and names:
                beside.add(beside.begins + 1, what, "random-state", f"{why}; {generators.told(names)}", apart)
            else:
                beside.add(beside.begins + 1, what, "not-restored" if kind == "buffer" else "", why, apart)
            return


def _losses(beside: Beside) -> bool:
    """Whether the first step differentiates another loss: random numbers that are no dropout's show in it, as noise."""
    for rank in beside.ranks:
        run = beside.reference.records[rank].steps
        theirs, ours = run[beside.begins].losses, beside.resumed.records[rank].steps[0].losses
        beside.exact = beside.exact and theirs == ours
        size = max((abs(loss) for step in run for loss in step.losses), default=0.0)
        for wanted, own in zip(theirs, ours, strict=False):
            if math.isnan(wanted) or abs(own - wanted) <= beside.tolerance * size:
                continue
            why = f"the samples and the parameters are right, and the loss is {own:.6g} in place of {wanted:.6g}"
            names = generators.moved(beside.reference, beside.resumed, beside.begins, beside.begins)
            why = f"{why}; {generators.told(names)}" if names else why
            beside.add(beside.begins + 1, "loss", "random-state" if names else "", why)
            return True
    return False


def _length(beside: Beside) -> None:
    if told := plan.length_said(beside.reference, beside.resumed, beside.begins):
        beside.add(beside.reference.steps, "length", "ends-elsewhere", told)
