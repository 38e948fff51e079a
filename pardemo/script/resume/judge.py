"""Compares a resumed run with the undisturbed one: samples, states, rates, numbers and length."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from pardemo.script.compare.closeness import nearly_equal
from pardemo.script.compare.comparison import LayoutComparison, compare_layout, holders_of
from pardemo.script.compare.differences import Finding
from pardemo.script.compare.parameter_map import ParameterMap, assembled
from pardemo.script.compare.reference import Reference
from pardemo.script.compare.runs import ProveError, Run
from pardemo.script.compare.samples import STRANGE, ranks_difference, samples_by_step, samples_difference, steps_away
from pardemo.script.record.rank_record import STATE, Tensors
from pardemo.script.resume.script_state import COPIES, KEPT, SLOTS
from pardemo.script.words import count_text


def moved_generators(reference: Run, resumed: Run, step: int, begins: int) -> list[str]:
    """Finds generators that the undisturbed run draws from around a step and that differ in the resumed run.

    Args:
        step: of the undisturbed run, counted from 0. begins: after how many of its steps the resumed one begins.

    Returns:
        names, as ``torch's``. One from which nothing is drawn may be anywhere.
    """
    names: dict[str, None] = {}
    for theirs, ours in zip(reference.records, resumed.records, strict=True):
        around = [step_record.generators for step_record in theirs.steps[max(0, step - 1) : step + 2]]
        for name, state in theirs.steps[step].generators.items():
            drawn = any(other.get(name, state) != state for other in around)
            if drawn and ours.steps[step - begins].generators.get(name, state) != state:
                names.setdefault(name)
    return list(names)


def generators_text(names: list[str]) -> str:
    """Says which generators differ: ``torch's and numpy's generators, from which it draws, are not where …``."""
    some = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    single = len(names) == 1
    return (
        f"{some} generator{'' if single else 's'}, from which the run draws, {'is' if single else 'are'} not where "
        f"{'it was' if single else 'they were'} without the stop: that is not restored"
    )


def length_difference(reference: Run, resumed: Run, begins: int) -> str:
    """Says what is wrong with the end of a run that goes on after ``begins`` steps; empty if nothing.

    The undisturbed run may have gone on when enough of it was seen: to be over before what was seen of it is too early
    all the same.
    """
    shortest = min(resumed.records, key=lambda record: len(record.steps))
    ours, wanted = len(shortest.steps), len(reference.records[0].steps) - begins
    if shortest.ended == "end" and ours < wanted:
        ended = reference.records[0].ended == "end"
        missing = "" if ended else "at least "
        return f"the run is over {missing}{count_text(wanted - ours, 'step')} before the undisturbed one"
    if reference.records[0].ended == "end" and ours > wanted:
        return "the run takes more steps than the undisturbed one: its count of steps or epochs begins anew"
    return ""


def rates_difference(reference: Run, resumed: Run, begins: int) -> tuple[str, int] | None:
    """Says what is wrong with the learning rates of a run that goes on after ``begins`` steps, if anything."""
    rates = [step.learning_rates for step in reference.records[0].steps]
    ours = [step.learning_rates for step in resumed.records[0].steps]
    wanted = rates[begins:]
    steps = min(len(wanted), len(ours))
    first = next((n for n in range(steps) if not _is_close(ours[n], wanted[n])), None)
    if first is None:
        return None
    sentence = f"the rate is {_rate_text(ours[first])} in place of {_rate_text(wanted[first])}"
    away = steps_away(ours[first:steps], rates, begins + first, min(2, steps - first), _is_close)
    if away:
        moved = f"{count_text(abs(away), 'step')} {'ahead' if away > 0 else 'behind'}"
        anew = ": it begins anew" if away == -begins else ""
        sentence = f"the scheduler is {moved}{anew}; {sentence}"
    return sentence, begins + first


def _is_close(a: list[float], b: list[float]) -> bool:
    """Whether rates are equal to rounding; so are 0 and what rounding leaves of it at a cosine's end."""
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-15) for x, y in zip(a, b, strict=True))


def _rate_text(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))


#: Of each step by its number, all ranks' tensors of a kind; one step after the other, since together they are many.
Steps = Callable[[], Iterable[tuple[int, Sequence[Tensors]]]]


def compare_states(
    kind: str, theirs: Sequence[Tensors], ours: Sequence[Tensors], steps: Steps, begins: int, tolerance: float
) -> tuple[bool, dict[str, list[str]]]:
    """Whether a state is equal to the last bit, and sentences about what is not equal, with the parameters.

    Args:
        theirs, ours: by rank, of the undisturbed and the resumed run. steps: the undisturbed run's in each step, one
            after the other; read where something is not equal.
    """
    slot = SLOTS.get(kind.removeprefix(STATE), f"the optimizer's {kind.removeprefix(STATE)}")
    exact, names_by_reason = True, dict[str, list[str]]()
    for rank, (wanted, values) in enumerate(zip(theirs, ours, strict=True)):
        for name, tensor in wanted.items():
            value = values.get(name)
            if value is not None and value.shape == tensor.shape and torch.equal(value, tensor):
                continue
            exact = False
            if value is not None and nearly_equal(value, tensor, tolerance):
                continue
            if value is None and (kind == STATE + COPIES or not bool(tensor.any())):
                continue  # a copy that a step makes for itself is not there at first
            why = _state_difference(slot, name, tensor, value, rank, steps, begins)
            names = names_by_reason.setdefault(why, [])
            if name not in names:
                names.append(name)
    return exact, names_by_reason


def _state_difference(
    slot: str, name: str, wanted: torch.Tensor, ours: torch.Tensor | None, rank: int, steps: Steps, begins: int
) -> str:
    if ours is None or not bool(ours.any()):
        return f"{slot} starts at zero"
    for step, states_by_rank in steps():
        then = states_by_rank[rank].get(name)
        if step != begins and then is not None and then.shape == ours.shape and torch.equal(then, ours):
            return f"{slot} is the one before step {step + 1}"
    if wanted.dim() == 0 and ours.dim() == 0:
        return f"{slot} is {float(ours):g} in place of {float(wanted):g}"
    if is_rounded_to_bf16(wanted, ours):
        return f"{slot} comes back rounded to bf16"
    if ours.numel() == wanted.numel() and torch.equal(ours.reshape(-1).sort().values, wanted.reshape(-1).sort().values):
        return f"{slot} has its numbers in other places"
    return f"{slot} is another one"


def is_rounded_to_bf16(wanted: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether one tensor is the other rounded to bf16."""
    return wanted.is_floating_point() and wanted.shape == ours.shape and torch.equal(
        wanted.to(torch.bfloat16).to(ours.dtype), ours
    )  # fmt: skip


#: Of a rank and a parameter, the elements whose gradient is rounding and nothing else.
Noise = dict[tuple[int, str], torch.Tensor]
#: Up to which part of the largest gradient of all a gradient may be rounding.
_ROUNDING = 1e-5
#: Of a tensor's largest number: less than the last bit of bf16, a few of fp32.
_BITS = 1e-6


@dataclass
class ResumedRun:
    """A resumed run to compare with the undisturbed one.

    ``run``: that goes on. ``expected``: after how many steps the last complete save is. ``begins``: after how many
    steps of the undisturbed run it begins, by its parameters; None where they are no step's. ``exact``: whether all
    that was compared is equal to the last bit. ``noise``: of ranks' parameters the elements that are not compared, see
    :func:`rounding_only`. ``repeats``: whether the undisturbed run is the same each time to the last bit, so that what
    is not equal is no rounding. ``compared``: on another layout, all parameters in whole; else each rank is held
    against the same one. ``states``: whether optimizers' states were compared themselves; where an engine keeps them
    flat, only what its step makes of them is.
    """

    name: str
    reference: Run
    run: Run
    expected: int
    begins: int | None
    tolerance: float
    noise: Noise = field(default_factory=dict)
    repeats: bool = False
    compared: LayoutComparison | None = None
    states: bool = True
    exact: bool = True
    findings: list[Finding] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Number of steps after which it goes on, by its parameters or, if these do not say it, by the saves."""
        return self.expected if self.begins is None else self.begins

    def add(self, subject: str, cause: str, why: str, names: Iterable[str] = (), step: int | None = None) -> None:
        """Adds a finding; ``step`` is one of the undisturbed run, from 1; by default the first that is repeated."""
        step = self.last_step + 1 if step is None else step
        self.findings.append(Finding(self.name, step, subject, cause, why, None, None, tuple(names)))

    @property
    def ranks(self) -> range:
        return range(self.reference.layout.ranks)

    def tensors(self, kind: str) -> tuple[list[Tensors], list[Tensors]]:
        """Returns each rank's tensors of a kind in the resumed run's first step: the undisturbed run's and its own.

        These have the undisturbed run's elements where only rounding is.
        """
        theirs = [self.reference.tensors(self.last_step, rank, kind) for rank in self.ranks]
        ours = [self.run.tensors(0, rank, kind) for rank in self.ranks]
        for (rank, name), noise in self.noise.items():
            value = ours[rank].get(name)
            if value is not None and (value.any() or not kind.startswith(STATE)):  # a state of zeros is told as one
                ours[rank][name] = _without_noise(noise, theirs[rank].get(name, value), value)
        return theirs, ours

    def differing(self, kind: str) -> dict[str, tuple[int, torch.Tensor, torch.Tensor]]:
        """Finds tensors of a kind in the resumed run's first step that differ: by name (rank, undisturbed, resumed).

        Parameters come from a file, and a step changes little of them: there, what repeats itself has no rounding.
        """
        tensors: dict[str, tuple[int, torch.Tensor, torch.Tensor]] = {}
        strict = self.repeats and (kind == "before" or (kind == "after" and self.exact))
        for rank, (theirs, ours) in enumerate(zip(*self.tensors(kind), strict=True)):
            for name in (name for name in theirs if name in ours):
                same = theirs[name].shape == ours[name].shape and torch.equal(theirs[name], ours[name])
                self.exact &= same
                if not same and not nearly_equal(ours[name], theirs[name], _BITS if strict else self.tolerance):
                    tensors.setdefault(name, (rank, theirs[name], ours[name]))
        return tensors


def rounding_only(run: Run) -> Noise:
    """Finds elements whose true gradient is zero, as of the biases of keys: Adam makes steps of what rounding leaves.

    So they are others in each layout, and nothing follows from them.
    """
    gradients = [[run.tensors(step, rank, "gradient") for step in range(run.steps)] for rank in range(run.layout.ranks)]
    largest = max(
        (float(g.abs().max()) for steps in gradients for step in steps for g in step.values() if g.numel()), default=0.0
    )
    return {
        (rank, name): torch.stack([step[name].abs() for step in steps if name in step]).amax(0) <= _ROUNDING * largest
        for rank, steps in enumerate(gradients)
        for name in steps[0]
    }


def _without_noise(noise: torch.Tensor | None, theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Returns ``ours`` with ``theirs`` where only rounding is."""
    if noise is None or not noise.shape == ours.shape == theirs.shape:
        return ours
    return torch.where(noise, theirs, ours)


def resumed_after(reference: Run, resumed: Run, expected: int, tolerance: float, noise: Noise) -> int | None:
    """Finds after how many steps the undisturbed run's parameters are nearest those that the resumed run begins with.

    None where they are farther than ``tolerance``, relative; of several steps the one nearest the expected.
    """
    ours = [resumed.tensors(0, rank, "before") for rank in range(resumed.layout.ranks)]
    far = {}
    for step in range(reference.steps):
        theirs = [reference.tensors(step, rank, "before") for rank in range(reference.layout.ranks)]
        if _shapes(theirs) == _shapes(ours):
            pairs = [
                (a[name], _without_noise(noise.get((rank, name)), a[name], b[name]))
                for rank, (a, b) in enumerate(zip(theirs, ours, strict=True))
                for name in a
            ]
            far[step] = max(float((a - b).double().norm() / a.double().norm().clamp_min(1e-30)) for a, b in pairs)
    best = min(far, key=lambda step: (far[step], abs(step - expected)), default=None)
    return best if best is not None and far[best] <= tolerance else None


def _shapes(tensors_by_rank: Sequence[Tensors]) -> list[dict[str, torch.Size]]:
    return [{name: tensor.shape for name, tensor in tensors.items()} for tensors in tensors_by_rank]


def compare_full_parameters(name: str, reference: Run, resumed: Run, expected: int, tolerance: float) -> ResumedRun:
    """Compares a run that goes on in another layout with the undisturbed one from each step on, until one is right.

    Raises:
        ProveError: the two cannot be compared: other global batches, or other parameters.
    """

    def held_against(step: int) -> tuple[Run, LayoutComparison]:
        """Compares with the undisturbed run from a step on; on a copy, since a comparison cuts fused pieces."""
        records = [replace(record, steps=[replace(step) for step in record.steps]) for record in resumed.records]
        cut_run = replace(resumed, records=records, strips={})
        return cut_run, compare_layout(Reference(reference.since(step), tolerance), cut_run)

    begins = None
    for step in sorted(range(reference.steps), key=lambda step: (step != expected, step)):
        with contextlib.suppress(ProveError):  # nothing of it is where this step's parameters are
            cut_run, compared = held_against(step)
            begun = any(finding.what == "parameters" and finding.step == 1 for finding in compared.findings)
            if not compared.unmatched and not compared.maps.different and not begun:  # whatever its samples are
                begins = step
                break
    else:
        cut_run, compared = held_against(expected)
    return ResumedRun(name, reference, cut_run, expected, begins, tolerance, compared=compared, states=False)


def judge_resumed(resumed: ResumedRun) -> None:
    """Adds to a resumed run's findings what was not restored."""
    reference, run, last_step, compared = resumed.reference, resumed.run, resumed.last_step, resumed.compared
    if compared is None and resumed.begins is None:
        _parameters(resumed)
    if compared is not None and compared.unmatched:
        resumed.add("parameters", "not-restored", compared.unmatched)
    apart = {finding.cause for finding in compared.findings} if compared else {"data", "learning-rate", "loss-scale"}
    if "data" in apart:
        _samples(resumed)
    if "learning-rate" in apart and (rates := rates_difference(reference, run, last_step)) is not None:
        resumed.add("learning rate", "learning-rate", rates[0], step=rates[1] + 1)
    theirs, ours = reference.records[0].steps[last_step].scales, run.records[0].steps[0].scales
    if "loss-scale" in apart and theirs and ours and theirs[-1] != ours[-1]:
        why = f"the GradScaler begins at {ours[-1]:g} in place of {theirs[-1]:g}: its state is not restored"
        resumed.add("loss scale", "loss-scale", why)
    if compared is None or resumed.begins is not None:
        _states(resumed)
    if compared is None:
        _random(resumed)
        if not resumed.findings:
            _numbers(resumed)
    causes = {finding.cause for finding in resumed.findings}
    explained = causes & {"data", "learning-rate", "loss-scale", "optimizer-state"}
    for finding in compared.findings if compared else ():
        if finding.cause not in explained:  # by what was looked at for itself
            step = finding.step + last_step
            resumed.findings.append(replace(finding, layout=resumed.name, step=step, tensors=None))


def _parameters(resumed: ResumedRun) -> None:
    """Says which parameters are not those of the checkpoint."""
    apart = resumed.differing("before")
    if not apart:
        return
    first = [resumed.reference.tensors(0, rank, "before") for rank in resumed.ranks]
    new = [name for name, (rank, _, ours) in apart.items() if torch.equal(ours, first[rank][name])]
    rounded = [name for name, (_, theirs, ours) in apart.items() if is_rounded_to_bf16(theirs, ours)]
    if new and resumed.last_step:
        why = "they are what a new run begins with: they are not in the checkpoint, or are not loaded"
        resumed.add("parameters", "not-restored", why, new)
    elif len(rounded) == len(apart):
        why = "they come back rounded to bf16: the checkpoint has fewer bits than the run"
        resumed.add("parameters", "precision", why, rounded)
    else:
        resumed.add("parameters", "not-restored", "they are those of no step of the undisturbed run", apart)


def _samples(resumed: ResumedRun) -> None:
    reference, run, last_step = resumed.reference, resumed.run, resumed.last_step
    why, since = samples_difference(samples_by_step(reference), samples_by_step(run), last_step)
    if why and resumed.compared is None and STRANGE in why:  # made, or changed, by random numbers
        names = moved_generators(reference, run, since, last_step)
        why = f"{why}; {generators_text(names)}" if names else why
    if not why and resumed.repeats:
        why, since = ranks_difference(reference, run, last_step)
    if why:
        resumed.add("data", "data", why, step=since + 1)


def _states(resumed: ResumedRun) -> None:
    """Adds findings about optimizers' states and what the script keeps outside of the optimizers."""
    keys = {key for rank in resumed.ranks for key in resumed.reference.keys(resumed.last_step, rank)}
    keys |= {key for rank in range(resumed.run.layout.ranks) for key in resumed.run.keys(0, rank)}
    reference = Reference(resumed.reference.since(resumed.last_step), resumed.tolerance) if resumed.compared else None
    for kind in sorted({key.split("/", 1)[0] for key in keys if key.startswith(STATE)}):
        untracked = kind in (STATE + KEPT, STATE + COPIES)
        if reference is None or resumed.compared is None:
            theirs, ours = resumed.tensors(kind)
        elif untracked:  # which all ranks have alike; what is in shards nobody can put together
            ours = [resumed.run.tensors(0, 0, kind)]
            wanted = resumed.reference.tensors(resumed.last_step, 0, kind).items()
            theirs = [{k: v for k, v in wanted if v.is_floating_point() and ours[0].get(k, v).shape == v.shape}]
        else:
            in_whole, parts = _states_in_whole(reference, resumed.run, resumed.compared.maps, kind)
            resumed.states |= bool(parts)
            if not parts and any(key.startswith(f"{kind}/") for key in resumed.run.keys(0, 0)):
                continue  # they are there, and kept in a form that says not whose they are
            theirs, ours = [in_whole], [parts]
        steps: Steps = partial(_states_by_step, resumed, kind) if reference is None else tuple
        exact, names_by_reason = compare_states(kind, theirs, ours, steps, resumed.last_step, resumed.tolerance)
        resumed.exact &= exact
        for why, names in names_by_reason.items():
            if untracked:
                resumed.add("beside the model", "not-restored", why, names)
            else:
                resumed.add("optimizer", "optimizer-state", why, names)


def _states_by_step(resumed: ResumedRun, kind: str) -> Iterator[tuple[int, list[Tensors]]]:
    for step in range(resumed.reference.steps):
        yield step, [resumed.reference.tensors(step, rank, kind) for rank in resumed.ranks]


def _states_in_whole(reference: Reference, resumed: Run, maps: ParameterMap, kind: str) -> tuple[Tensors, Tensors]:
    """Returns states of a kind, the undisturbed run's and the resumed one's, put together from all ranks' parts."""
    holders = holders_of(resumed, 0, kind, maps)
    theirs, ours = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for parameter, tensor in reference.in_whole(0, kind).items():
        before = reference.whole[0].before.get(parameter)
        if before is None or (tensor.dim() and tensor.shape != before.shape):
            continue  # as Adafactor's sums of rows and columns: how these are cut nothing says
        some = holders.get(parameter, [])
        theirs[parameter] = tensor
        if some and tensor.dim() == 0:  # a count, which each rank has: one that differs counts
            values = [value.double() for _, _, value in some]
            ours[parameter] = next((value for value in values if not torch.equal(value, tensor)), values[0])
        elif some:  # zero where no rank has a part
            ours[parameter] = assembled(tuple(tensor.shape), some).value
    return theirs, ours


def _random(resumed: ResumedRun) -> None:
    """Adds a finding about dropout's masks, where they are drawn; where nothing draws, nothing is lost."""
    steps = min(resumed.reference.steps - resumed.last_step, min(len(record.steps) for record in resumed.run.records))
    for step in range(steps):
        for rank in resumed.ranks:
            theirs = resumed.reference.records[rank].steps[resumed.last_step + step].masks
            ours = resumed.run.records[rank].steps[step].masks
            same_inputs = [a.input for a in theirs] == [b.input for b in ours]
            if theirs and same_inputs and [a.dropped for a in theirs] != [b.dropped for b in ours]:
                why = "dropout draws other masks than without the stop: where the generator was is not restored"
                resumed.add("random numbers", "random-state", why, step=resumed.last_step + step + 1)
                return


def _numbers(resumed: ResumedRun) -> None:
    """Adds findings about the first step's gradients, loss, buffers and updates, when all they are made of is right."""
    for kind, label in (("buffer", "buffers"), ("gradient", "gradients"), ("after", "parameters after the step")):
        if kind == "gradient" and resumed.repeats and _losses(resumed):
            return
        if kind == "after" and resumed.last_step + 1 >= len(resumed.reference.records[0].steps):
            continue
        if apart := resumed.differing(kind):
            why = {
                "buffer": "buffers are not restored",
                "gradient": "the samples and the parameters are right, and the gradients are not",
                "after": "the gradient is right, and what the optimizer makes of it is not: a part of its state, or of "
                "its options, is not restored",
            }[kind]  # fmt: skip
            names = moved_generators(resumed.reference, resumed.run, resumed.last_step, resumed.last_step)
            if kind == "gradient" and names:
                resumed.add(label, "random-state", f"{why}; {generators_text(names)}", apart)
            else:
                resumed.add(label, "not-restored" if kind == "buffer" else "", why, apart)
            return


def _losses(resumed: ResumedRun) -> bool:
    """Whether the first step differentiates another loss: random numbers that are no dropout's show in it, as noise."""
    for rank in resumed.ranks:
        steps = resumed.reference.records[rank].steps
        theirs, ours = steps[resumed.last_step].losses, resumed.run.records[rank].steps[0].losses
        resumed.exact = resumed.exact and theirs == ours
        size = max((abs(loss) for step in steps for loss in step.losses), default=0.0)
        for wanted, got in zip(theirs, ours, strict=False):
            if math.isnan(wanted) or abs(got - wanted) <= resumed.tolerance * size:
                continue
            why = f"the samples and the parameters are right, and the loss is {got:.6g} in place of {wanted:.6g}"
            names = moved_generators(resumed.reference, resumed.run, resumed.last_step, resumed.last_step)
            why = f"{why}; {generators_text(names)}" if names else why
            resumed.add("loss", "random-state" if names else "", why)
            return True
    return False
