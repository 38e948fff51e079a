"""A resumed run beside the undisturbed one: its samples, states, rates, numbers and length."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from pardemo.script.compare import compare
from pardemo.script.compare.parameter_map import assembled, nearly_equal
from pardemo.script.compare.runs import Finding, ProveError, Reference, Run
from pardemo.script.compare.samples import STRANGE, ranks_difference, samples_by_step, samples_difference
from pardemo.script.record.records import STATE, Tensors
from pardemo.script.resume.recorder import KEPT, SLOTS


def moved_generators(reference: Run, resumed: Run, step: int, begins: int) -> list[str]:
    """Generators that the undisturbed run draws from around a step, and that are elsewhere in the resumed run.

    Args:
        step: of the undisturbed run, counted from 0. begins: behind how many of its steps the resumed one begins.

    Returns:
        names, as ``torch's``. One from which nothing is drawn may be anywhere.
    """
    found: dict[str, None] = {}
    for theirs, ours in zip(reference.records, resumed.records, strict=True):
        around = [one.generators for one in theirs.steps[max(0, step - 1) : step + 2]]
        for name, place in theirs.steps[step].generators.items():
            drawn = any(other.get(name, place) != place for other in around)
            if drawn and ours.steps[step - begins].generators.get(name, place) != place:
                found.setdefault(name)
    return list(found)


def generators_text(names: list[str]) -> str:
    """``torch's and numpy's generators, which this step draws from, are not where they were without the stop``."""
    some = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    one = len(names) == 1
    return (
        f"{some} generator{'' if one else 's'}, from which the run draws, {'is' if one else 'are'} not where "
        f"{'it was' if one else 'they were'} without the stop: that is not restored"
    )


def length_difference(reference: Run, resumed: Run, begins: int) -> str:
    """What is wrong with where a run ends that goes on behind ``begins`` steps, empty if nothing.

    The undisturbed run may have gone on when enough of it was seen: to be over before what was seen of it is too early
    all the same.
    """
    shortest = min(resumed.records, key=lambda record: len(record.steps))
    own, wanted = len(shortest.steps), len(reference.records[0].steps) - begins
    if shortest.ended == "end" and own < wanted:
        ended = reference.records[0].ended == "end"
        missing = wanted - own if ended else f"at least {wanted - own}"
        return f"the run is over {missing} step{'s' * (wanted - own > 1)} before the undisturbed one"
    if reference.records[0].ended == "end" and own > wanted:
        return "the run takes more steps than the undisturbed one: its count of steps or epochs begins anew"
    return ""


def rates_difference(reference: Run, resumed: Run, begins: int) -> tuple[str, int] | None:
    """What is wrong with the learning rates of a run that goes on behind ``begins`` steps, and since when; or None."""
    rates = [step.learning_rates for step in reference.records[0].steps]
    own = [step.learning_rates for step in resumed.records[0].steps]
    wanted = rates[begins:]
    steps = min(len(wanted), len(own))
    first = next((n for n in range(steps) if not _is_close(own[n], wanted[n])), None)
    if first is None:
        return None
    said = f"the rate is {_rate_text(own[first])} in place of {_rate_text(wanted[first])}"
    for place in range(len(rates)):
        pairs = list(zip(own[first:steps], rates[place:], strict=False))
        away = place - begins - first
        if away and len(pairs) >= min(2, steps - first) and all(_is_close(a, b) for a, b in pairs):
            moved = f"{abs(away)} step{'s' * (abs(away) > 1)} {'ahead' if away > 0 else 'behind'}"
            anew = ": it begins anew" if place == first else ""
            return f"the scheduler is {moved}{anew}; {said}", begins + first
    return said, begins + first


def _is_close(a: list[float], b: list[float]) -> bool:
    """Also 0 beside what rounding leaves of it at a cosine's end."""
    return len(a) == len(b) and all(
        abs(x - y) <= max(1e-9 * max(abs(x), abs(y)), 1e-15) for x, y in zip(a, b, strict=True)
    )


def _rate_text(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))


#: Of each step by its number, all ranks' tensors of a kind; one step after the other, since together they are many.
Steps = Callable[[], Iterable[tuple[int, Sequence[Tensors]]]]


def state_kinds(run: Run, step: int) -> set[str]:
    """Kinds of states that any rank has in a step."""
    return {
        key.split("/", 1)[0]
        for rank in range(run.layout.ranks)
        for key in run.keys(step, rank)
        if key.startswith(STATE)
    }


def compare_states(
    kind: str, theirs: Sequence[Tensors], ours: Sequence[Tensors], steps: Steps, begins: int, tolerance: float
) -> tuple[bool, dict[str, list[str]]]:
    """Whether a state is equal to the last bit, and sentences about what is not equal, with the parameters.

    Args:
        theirs, ours: by rank, of the undisturbed and the resumed run. steps: the undisturbed run's in each step, one
            after the other; read where something is not equal.
    """
    what = SLOTS.get(kind.removeprefix(STATE), f"the optimizer's {kind.removeprefix(STATE)}")
    exact, told = True, dict[str, list[str]]()
    for rank, (wanted, own) in enumerate(zip(theirs, ours, strict=True)):
        for name, tensor in wanted.items():
            value = own.get(name)
            if value is not None and value.shape == tensor.shape and torch.equal(value, tensor):
                continue
            exact = False
            if value is not None and nearly_equal(value, tensor, tolerance):
                continue
            if value is None and not bool(tensor.any()):
                continue
            why = _state_difference(what, name, tensor, value, rank, steps, begins)
            names = told.setdefault(why, [])
            if name not in names:
                names.append(name)
    return exact, told


def _state_difference(
    what: str, name: str, wanted: torch.Tensor, own: torch.Tensor | None, rank: int, steps: Steps, begins: int
) -> str:
    if own is None or not bool(own.any()):
        return f"{what} starts at zero"
    for step, of_ranks in steps():
        tensors = of_ranks[rank]
        if step != begins and name in tensors and tensors[name].shape == own.shape and torch.equal(tensors[name], own):
            return f"{what} is the one before step {step + 1}"
    if wanted.dim() == 0 and own.dim() == 0:
        return f"{what} is {float(own):g} in place of {float(wanted):g}"
    if is_rounded_to_bf16(wanted, own):
        return f"{what} comes back rounded to bf16"
    if own.numel() == wanted.numel() and torch.equal(own.reshape(-1).sort().values, wanted.reshape(-1).sort().values):
        return f"{what} has its numbers in other places"
    return f"{what} is another one"


def is_rounded_to_bf16(wanted: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether one is the other in bf16."""
    return wanted.is_floating_point() and wanted.shape == own.shape and torch.equal(
        wanted.to(torch.bfloat16).to(own.dtype), own
    )  # fmt: skip


#: Of a rank and a parameter, the elements whose gradient is rounding and nothing else.
Noise = dict[tuple[int, str], torch.Tensor]
#: Up to which part of the largest gradient of all a gradient may be rounding.
_ROUNDING = 1e-5
#: Of a tensor's largest number: less than the last bit of bf16, a few of fp32.
_BITS = 1e-6


@dataclass
class ResumedRun:
    """A resumed run beside the undisturbed one.

    ``begins``: behind how many steps of the undisturbed run it begins, by its parameters, or by the saves where they
    are no step's. ``exact``: whether all that was compared is equal to the last bit. ``noise``: of ranks' parameters
    the elements that are not compared, see :func:`rounding_only`. ``repeats``: whether the undisturbed run is the same
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

    def add(self, what: str, cause: str, why: str, names: Iterable[str] = (), step: int | None = None) -> None:
        """A finding; ``step`` is one of the undisturbed run, from 1; by default the first that is made once more."""
        step = self.begins + 1 if step is None else step
        self.findings.append(Finding(self.name, step, what, cause, why, None, None, tuple(names)))

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
                own = _without_noise(self.noise.get((rank, name)), tensor, ours[name]) if name in ours else None
                if own is not None and not self._equal(tensor, own, tolerance):
                    found.setdefault(name, (rank, tensor, ours[name]))
        return found

    def _equal(self, a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
        same = a.shape == b.shape and torch.equal(a, b)
        self.exact = self.exact and same
        return same or nearly_equal(b, a, tolerance)


def resumed_after(reference: Run, resumed: Run, expected: int) -> int | None:
    """Behind how many steps the undisturbed run has the parameters with which the resumed one begins; None if never."""
    own = [resumed.tensors(0, rank, "before") for rank in range(resumed.layout.ranks)]
    order = sorted(range(reference.steps), key=lambda step: (abs(step - expected), step))
    for step in order:
        theirs = [reference.tensors(step, rank, "before") for rank in range(reference.layout.ranks)]
        if all(_is_same(a, b) for a, b in zip(theirs, own, strict=True)):
            return step
    return None


def rounding_only(run: Run) -> Noise:
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


def _without_noise(noise: torch.Tensor | None, theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """``ours`` with ``theirs`` where only rounding is."""
    return ours if noise is None or noise.shape != ours.shape else torch.where(noise, theirs, ours)


def resumed_near(reference: Run, resumed: Run, expected: int, tolerance: float, noise: Noise) -> int | None:
    """As :func:`resumed_after`, of runs that differ by rounding: the step whose parameters are nearest; None if far."""
    own = [resumed.tensors(0, rank, "before") for rank in range(resumed.layout.ranks)]
    far = {}
    for step in range(reference.steps):
        theirs = [reference.tensors(step, rank, "before") for rank in range(reference.layout.ranks)]
        if all(a.keys() == b.keys() for a, b in zip(theirs, own, strict=True)):
            pairs = [
                (a[name], _without_noise(noise.get((rank, name)), a[name], b[name]))
                for rank, (a, b) in enumerate(zip(theirs, own, strict=True))
                for name in a
            ]
            far[step] = max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs)
    best = min(far, key=lambda step: (far[step], abs(step - expected)), default=None)
    return best if best is not None and far[best] <= tolerance else None


def _is_same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def judge_same_layout(beside: ResumedRun, parameters_of: int | None) -> None:
    """Adds what was not restored. ``parameters_of``: behind which step its parameters are; None of no step."""
    if parameters_of is None:
        _parameters(beside)
    samples, since = samples_difference(
        samples_by_step(beside.reference), samples_by_step(beside.resumed), beside.begins
    )
    if samples:
        names = moved_generators(beside.reference, beside.resumed, since, beside.begins)
        strange = names and STRANGE in samples  # made, or changed, by random numbers
        beside.add("data", "data", f"{samples}; {generators_text(names)}" if strange else samples, step=since + 1)
    elif beside.repeats:
        samples, since = ranks_difference(beside.reference, beside.resumed, beside.begins)
        if samples:
            beside.add("data", "data", samples, step=since + 1)
    if (rates := rates_difference(beside.reference, beside.resumed, beside.begins)) is not None:
        beside.add("learning rate", "learning-rate", rates[0], step=rates[1] + 1)
    _scales(beside)
    _compare_states_of_ranks(beside)
    _random(beside)
    if not beside.findings:
        _numbers(beside)
    if length := length_difference(beside.reference, beside.resumed, beside.begins):
        beside.add("length", "ends-elsewhere", length, step=beside.reference.steps)


def _parameters(beside: ResumedRun) -> None:
    """Which parameters are not those of the checkpoint."""
    apart = beside.differing("before")
    if not apart:
        return
    first = [beside.reference.tensors(0, rank, "before") for rank in beside.ranks]
    new = [name for name, (rank, _, ours) in apart.items() if torch.equal(ours, first[rank][name])]
    rounded = [name for name, (_, theirs, ours) in apart.items() if is_rounded_to_bf16(theirs, ours)]
    if new and beside.begins:
        why = "they are what a new run begins with: they are not in the checkpoint, or are not loaded"
        beside.add("parameters", "not-restored", why, new)
    elif len(rounded) == len(apart):
        why = "they come back rounded to bf16: the checkpoint has fewer bits than the run"
        beside.add("parameters", "precision", why, rounded)
    else:
        beside.add("parameters", "not-restored", "they are those of no step of the undisturbed run", apart)


def _scales(beside: ResumedRun) -> None:
    theirs = beside.reference.records[0].steps[beside.begins].scales
    ours = beside.resumed.records[0].steps[0].scales
    if theirs and ours and theirs[-1] != ours[-1]:
        why = f"the GradScaler begins at {ours[-1]:g} in place of {theirs[-1]:g}: its state is not restored"
        beside.add("loss scale", "loss-scale", why)


def _compare_states_of_ranks(beside: ResumedRun) -> None:
    def of(run: Run, step: int) -> Callable[[str], list[Tensors]]:
        return lambda kind: [run.tensors(step, rank, kind) for rank in beside.ranks]

    def without_noise(rank: int, name: str, value: torch.Tensor) -> torch.Tensor:
        return _without_noise(beside.noise.get((rank, name)), theirs[rank].get(name, value), value)

    kinds = state_kinds(beside.reference, beside.begins) | state_kinds(beside.resumed, 0)
    for kind in sorted(kinds):
        theirs, found = of(beside.reference, beside.begins)(kind), of(beside.resumed, 0)(kind)
        ours = [
            {name: without_noise(rank, name, value) if value.any() else value for name, value in own.items()}
            for rank, own in enumerate(found)
        ]  # a state of zeros is told as one

        def earlier(kind: str = kind) -> Iterator[tuple[int, list[Tensors]]]:
            return ((step, of(beside.reference, step)(kind)) for step in range(beside.reference.steps))

        exact, told = compare_states(kind, theirs, ours, earlier, beside.begins, beside.tolerance)
        beside.exact = beside.exact and exact
        for why, names in told.items():
            if kind == STATE + KEPT:
                beside.add("beside the model", "not-restored", why, names)
            else:
                beside.add("optimizer", "optimizer-state", why, names)


def _random(beside: ResumedRun) -> None:
    """Dropout's masks, where they are drawn; where nothing draws, nothing is lost."""
    steps = min(beside.reference.steps - beside.begins, min(len(record.steps) for record in beside.resumed.records))
    for step in range(steps):
        for rank in beside.ranks:
            theirs = beside.reference.records[rank].steps[beside.begins + step].masks
            ours = beside.resumed.records[rank].steps[step].masks
            same_inputs = [a.input for a in theirs] == [b.input for b in ours]
            if theirs and same_inputs and [a.dropped for a in theirs] != [b.dropped for b in ours]:
                why = "dropout draws other masks than without the stop: where the generator was is not restored"
                beside.add("random numbers", "random-state", why, step=beside.begins + step + 1)
                return


def _numbers(beside: ResumedRun) -> None:
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
            names = moved_generators(beside.reference, beside.resumed, beside.begins, beside.begins)
            if kind == "gradient" and names:
                beside.add(what, "random-state", f"{why}; {generators_text(names)}", apart)
            else:
                beside.add(what, "not-restored" if kind == "buffer" else "", why, apart)
            return


def _losses(beside: ResumedRun) -> bool:
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
            names = moved_generators(beside.reference, beside.resumed, beside.begins, beside.begins)
            why = f"{why}; {generators_text(names)}" if names else why
            beside.add("loss", "random-state" if names else "", why)
            return True
    return False


@dataclass
class Reshaped:
    """A run that goes on in another layout, beside the undisturbed one.

    ``begins``: behind how many steps it goes on, by its parameters; None of no step. ``states``: whether optimizers'
    states were compared themselves; where an engine keeps them flat, only what its step makes of them is.
    """

    begins: int | None
    findings: list[Finding]
    states: bool


def judge_reshaped(name: str, reference: Run, resumed: Run, expected: int, tolerance: float) -> Reshaped:
    """Holds a resumed run against the undisturbed one.

    Raises:
        ProveError: the two cannot be compared: other global batches, or other parameters.
    """
    begins, compared, truth, own = None, None, None, resumed
    for step in sorted(range(reference.steps), key=lambda step: (step != expected, step)):
        truth, own = Reference(reference.since(step), tolerance), _copy_of(resumed)
        try:
            compared = compare.compare_layout(truth, own)
        except ProveError:  # nothing of it is where this step's parameters are
            continue
        if _same_parameters(compared):
            begins = step
            break
    if begins is None:
        truth, own = Reference(reference.since(expected), tolerance), _copy_of(resumed)
        compared = compare.compare_layout(truth, own)
    assert compared is not None
    assert truth is not None
    behind = expected if begins is None else begins
    findings: list[Finding] = []
    states_seen = False
    if compared.unmatched:
        findings.append(Finding(name, behind + 1, "parameters", "not-restored", compared.unmatched))
    if begins is not None:
        of_states, states_seen = _states(name, truth, own, compared, behind)
        findings += of_states
    told = {one.cause for one in findings}
    for finding in compared.findings:
        if finding.cause == "optimizer-state" and "optimizer-state" in told:
            continue  # which state it is stands there
        if finding.cause == "data":
            said, since = samples_difference(samples_by_step(reference), samples_by_step(resumed), behind)
            finding = replace(finding, why=said, step=since + 1 - behind) if said else finding
        if finding.cause == "learning-rate" and (rates := rates_difference(reference, resumed, behind)) is not None:
            finding = replace(finding, why=rates[0], step=rates[1] + 1 - behind, factor=None)
        findings.append(replace(finding, layout=name, step=finding.step + behind))
    return Reshaped(begins, findings, states_seen)


def _copy_of(run: Run) -> Run:
    """A run's own copy of what is known of its pieces: a comparison cuts those that are several of the reference's."""
    records = [replace(record, steps=[replace(step) for step in record.steps]) for record in run.records]
    return replace(run, records=records, strips={})


def _same_parameters(compared: compare.Comparison) -> bool:
    """Whether the run begins with the parameters of the step that it was held against, whatever its samples are."""
    begun = any(finding.what == "parameters" and finding.step == 1 for finding in compared.findings)
    return not compared.unmatched and not compared.maps.different and not begun


def _states(
    name: str, truth: Reference, resumed: Run, compared: compare.Comparison, behind: int
) -> tuple[list[Finding], bool]:
    """Optimizers' states, put together from all ranks' parts as the parameters are; and whether there were any."""
    found, matched = [], False
    kinds = sorted(state_kinds(truth.run, 0))
    for kind in kinds:
        wanted = truth.in_whole(0, kind)
        holders = compare.holders_of(resumed, 0, kind, compared.maps)
        theirs, ours = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for parameter, tensor in wanted.items():
            of = truth.whole[0].before.get(parameter)
            if of is None or (tensor.dim() and tensor.shape != of.shape):
                continue  # as Adafactor's sums of rows and columns: how these are cut nothing says
            some = holders.get(parameter, [])
            theirs[parameter] = tensor
            if some and tensor.dim() == 0:  # a count, which each rank has: one that differs counts
                values = [value.double() for _, _, value in some]
                ours[parameter] = next((value for value in values if not torch.equal(value, tensor)), values[0])
            elif some:  # zero where no rank has a part
                ours[parameter] = assembled(tuple(tensor.shape), some).value
        matched = matched or bool(ours)
        if not ours and any(key.startswith(f"{kind}/") for key in resumed.keys(0, 0)):
            continue  # they are there, and kept in a form that says not whose they are
        _, told = compare_states(kind, [theirs], [ours], tuple, 0, truth.tolerance)
        found += [Finding(name, behind + 1, "optimizer", "optimizer-state", why, None, None, tuple(names))
                  for why, names in told.items()]  # fmt: skip
    return found, matched
