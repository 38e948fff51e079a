"""The undisturbed run, each stop, each run that goes on, and what is said of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pardemo.prove import compare, proof, runner
from pardemo.prove.facts import Finding
from pardemo.prove.layouts import Layout
from pardemo.prove.reference import Reference
from pardemo.prove.runner import Options, ProveError, Run
from pardemo.prove.stopping import plan, reshaped, same_layout, stops
from pardemo.prove.stopping.launched import follower, in_folder, killed
from pardemo.prove.stopping.recorder import whole_saves
from pardemo.prove.stopping.stops import NEVER, Stop

#: What two layouts' rounding makes of parameters in some steps, relative to each tensor's largest number.
ROUNDED = 1e-3


@dataclass
class Trial:
    """A stop, and the run that goes on.

    ``expected``: behind how many steps the last whole save is; ``in_save``: whether the stop cut a later one off;
    ``overdue``: whether the script had not ended within the grace that SIGTERM leaves, and was killed;
    ``asynchronous``: whether the script goes on while it saves,
    so that nobody knows whether this one is whole. ``begins``: behind how many the run goes on, None where its
    parameters are those of no step. ``exact``: whether all compared is equal to the last bit. ``states``: whether
    the optimizer's states were compared themselves; if not, by what its step makes of them. ``error``: why nothing
    could be compared.
    """

    stop: Stop
    layout: Layout
    expected: int
    asynchronous: bool
    in_save: bool = False
    overdue: bool = False
    begins: int | None = None
    exact: bool = False
    states: bool = True
    error: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def name(self) -> str:
        within = ", within a save" * (self.in_save and self.stop.kind != "save")
        late = f", which had not ended it after {self.stop.grace_s:g} s" * self.overdue
        return f"{self.stop.text}{within}{late}, resumed with {self.layout.name}"

    @property
    def lost(self) -> int:
        """Steps that are made once more."""
        over = self.stop.done + (self.stop.moment == "step")
        return max(0, over - (self.expected if self.begins is None else self.begins))


@dataclass
class Verdict:
    """What came out of all trials. ``masks``: whether dropout draws any in the undisturbed run."""

    layout: Layout
    masks: bool = False
    steps: int = 0
    saved: list[int] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        from pardemo.prove.stopping.text import screen

        return screen(self)

    @property
    def findings(self) -> list[Finding]:
        return [finding for trial in self.trials for finding in trial.findings]

    @property
    def equal(self) -> bool:
        """Whether all trials were run, and go on as if nothing had happened."""
        return not self.findings and not any(trial.error for trial in self.trials)


def run(
    layouts: Sequence[Layout],
    resumed: Sequence[Layout],
    options: Options,
    kinds: Sequence[str],
    seed: int,
    grace_s: float = stops.GRACE_S,
) -> Verdict:
    """Stops the script in the first layout, and resumes it in each.

    Args:
        layouts: with the line that begins. resumed: the same, with the line that goes on.

    Raises:
        ProveError: the undisturbed run could not be run, is not the same twice, or saves nothing in time.
    """
    scratch = runner.scratch()
    try:
        return _verdict(layouts, resumed, options, kinds, seed, grace_s, Path(scratch))
    finally:
        runner.remove(scratch)


def _verdict(
    layouts: Sequence[Layout], resumed: Sequence[Layout], options: Options, kinds: Sequence[str], seed: int,
    grace_s: float, scratch: Path,
) -> Verdict:  # fmt: skip
    first, exact, options = _undisturbed(layouts[0], options, scratch)
    masks = any(step.masks for record in first.records for step in record.steps)
    made = Verdict(layouts[0], masks, first.steps)
    records = [record.steps for record in first.records]
    made.saved, asynchronous = _saved(first)
    saves_s = {number: max((steps[number].saves for steps in records), key=sum) for number in range(first.steps)}
    try:
        drawn = stops.drawn(
            kinds, first.steps, made.saved, {n: s for n, s in saves_s.items() if s}, layouts[0].ranks, seed
        )
    except ValueError as error:
        raise ProveError(str(error)) from None
    if "save" in kinds and not any(stop.kind == "save" for stop in drawn):
        made.notes.append("no stop during a save: none by torch.save, safetensors or torch.distributed.checkpoint was "
                          "seen behind a step that has an earlier save to go back to")  # fmt: skip
    if not drawn:
        raise ProveError(f"{made.notes[-1]}: there is nothing to stop; say other --stops")
    drawn = [replace(stop, grace_s=grace_s) for stop in drawn]
    made.notes += first.records[0].notes
    if options.sketched:
        made.notes.append(f"{runner.elements(first):,} elements: parameters are compared by sketches")
    pairs = [(stop, layouts[0], resumed[0]) for stop in drawn]
    others = zip(layouts[1:], resumed[1:], strict=True)
    pairs += [(drawn[number % len(drawn)], own, layout) for number, (own, layout) in enumerate(others)]
    tolerance = compare.tolerance_of(first, options.double)
    for number, (stop, own, layout) in enumerate(pairs):
        place = scratch / f"trial{number}"
        expected = max(one for one in made.saved if 0 < one < stop.done + (stop.kind != "save"))
        trial = Trial(stop, layout, expected, asynchronous, stop.kind == "save")
        resumed_run = _run(trial, layouts[0], first, options, place, made.saved)
        if resumed_run is not None:
            try:
                if own is layouts[0]:
                    _judge(trial, first, resumed_run, tolerance, exact)
                else:
                    _judge_reshaped(trial, first, resumed_run, tolerance, own, options, place)
            except ProveError as error:
                trial.error = str(error)
        made.trials.append(trial)
        runner.remove(str(place))
    return made


def _saved(first: Run) -> tuple[list[int], bool]:
    """Behind which steps the script saves, and whether it goes on meanwhile.

    Files change there; where calls that save were seen, a file that changes behind other steps is a log.
    """
    records = [record.steps for record in first.records]
    changed = [number for number, step in enumerate(records[0]) if step.saved]
    called = [number for number in changed if any(steps[number].saves for steps in records if number < len(steps))]
    asynchronous = any(step.asynchronous for steps in records for step in steps)
    return (changed if asynchronous else called or changed), asynchronous


def _undisturbed(layout: Layout, options: Options, scratch: Path) -> tuple[Run, bool, Options]:
    """The run that nothing stops, whether it is the same twice to the last bit, and the options for all others."""
    again = _recorded(layout, replace(options, sketched=True), scratch / "again")
    runner.must(again)
    if runner.elements(again) > runner.SKETCHED:
        options = replace(options, sketched=True)
    first = _recorded(layout, options, scratch / "first")
    runner.must(first)
    proof.hashed(first)
    proof.deterministic(first, again, compare.tolerance_of(first, options.double), options.sketched)
    try:
        proof.deterministic(first, again, 0.0, options.sketched)
    except ProveError:
        return first, False, options
    return first, True, options


def _recorded(
    layout: Layout, options: Options, place: Path, stop: Stop | None = None, saves: Path | None = None
) -> Run:
    """A run whose saves lie in ``saves``; of itself where it is None."""
    saves = saves or place / "saves"
    saves.mkdir(parents=True, exist_ok=True)
    follow = follower(str(saves), stop, str(place / "stop"))
    return runner.ran(in_folder(layout, saves), replace(options, follow=follow), place / "recorded")


def _run(made: Trial, begun: Layout, first: Run, options: Options, place: Path, saved: Sequence[int]) -> Run | None:
    """Stops a run and resumes it; the run that went on, where it took a step."""
    stop, saves, marker = made.stop, place / "saves", place / "stopped" / "stop"
    if stop.kind == "launcher":
        marker = place / "stop"
        made.error = killed(begun, options, place, stop, saves)
    else:
        stopped = _recorded(begun, replace(options, steps=first.steps), place / "stopped", stop, saves)
        made.error = _not_stopped(stop, stopped, marker.exists(), first)
        made.overdue = stop.kind == "term" and "killed by SIGALRM" in stopped.error
    if made.error:
        return None
    if not made.asynchronous and not _is_whole(first, made.expected, str(marker)):
        made.in_save, made.expected = True, max((one for one in saved if 0 < one < made.expected), default=0)
        if not made.expected:
            made.error = "it cut off the only save: there is nothing to go back to"
            return None
    expected = made.expected
    length = len(first.records[0].steps)
    more = length - expected + (first.records[0].ended == "end")
    resumed = _recorded(made.layout, replace(options, steps=max(2, more)), place / "resumed", None, saves)
    if resumed.timed_out:
        made.error = f"the run that goes on: {resumed.error}"
        return None
    if resumed.error:
        why = "after a stop within a save, the script cannot go on" if made.in_save else "it cannot go on"
        made.findings.append(Finding(made.name, expected + 1, "resume", "cannot-resume", f"{why}: {resumed.error}"))
        return None
    if not resumed.steps:
        why = f"it takes no step, and the undisturbed run takes {length - expected} more"
        made.findings.append(Finding(made.name, expected + 1, "length", "ends-elsewhere", why))
        return None
    return resumed


def _is_whole(first: Run, done: int, marker: str) -> bool:
    """Whether every rank had made its saves behind so many steps when a run was stopped, as far as calls were seen.

    A rank that saves makes no other wait where the script has no barrier, and ends soon after the one that is killed.
    """
    return all(
        whole_saves(marker, rank, done) >= len(record.steps[done].saves) for rank, record in enumerate(first.records)
    )


def _not_stopped(stop: Stop, stopped: Run, marked: bool, first: Run) -> str:
    """Why a run was not stopped as it should have been; empty if it was. ``marked``: whether the stop was begun."""
    if not marked:
        return f"before the stop, {stopped.error}" if stopped.error else NEVER
    if stop.kind == "term" and not stopped.error and stopped.steps >= first.steps:
        return "after SIGTERM the script went on to its end, in its time of grace: nothing is left to resume"
    return NEVER if not stopped.error and stop.kind != "term" else ""


def _judge(made: Trial, first: Run, resumed: Run, tolerance: float, exact: bool) -> None:
    """A run that goes on in the layout in which it was stopped. ``exact``: whether the undisturbed one repeats itself
    to the last bit."""
    made.begins = same_layout.begins_behind(first, resumed, made.expected)
    if made.begins is None and not exact:
        made.begins = same_layout.begins_near(first, resumed, made.expected, tolerance, {})
    made.exact = _judge_beside(made, first, resumed, tolerance, {}, exact) and exact and not made.findings


def _judge_beside(
    made: Trial, undisturbed: Run, resumed: Run, tolerance: float, noise: same_layout.Noise, repeats: bool = False
) -> bool:
    """Adds what differs, rank by rank, from an undisturbed run in the same layout; whether nothing does, bit by bit."""
    begins = made.expected if made.begins is None else made.begins
    beside = same_layout.Beside(made.name, undisturbed, resumed, begins, tolerance, noise=noise, repeats=repeats)
    if not _elsewhere(made):
        same_layout.judge(beside, made.begins)
    made.findings += beside.findings
    return beside.exact


def _judge_reshaped(
    made: Trial, first: Run, resumed: Run, tolerance: float, own: Layout, options: Options, place: Path
) -> None:
    """A run that goes on in another layout.

    Where nothing says how the undisturbed run's parameters were cut, as Megatron's, it is held against an undisturbed
    run in its own layout, which has come to the same numbers but for rounding.
    """
    try:
        Reference(first, tolerance)
    except ProveError:
        undisturbed = _recorded(own, options, place / "own")
        runner.must(undisturbed)
        noise, rounded = same_layout.only_rounding(undisturbed), max(ROUNDED, tolerance)
        made.begins = same_layout.begins_near(undisturbed, resumed, made.expected, rounded, noise)
        _judge_beside(made, undisturbed, resumed, rounded, noise)
        return
    found = reshaped.judge(made.name, first, resumed, made.expected, tolerance)
    made.begins, made.states = found.begins, found.states
    if _elsewhere(made):
        return
    made.findings += found.findings
    behind = made.expected if made.begins is None else made.begins
    if plan.length_said(first, resumed, behind):  # other ranks may fill up, or leave out, an epoch's last batch
        undisturbed = _recorded(own, options, place / "own")
        runner.must(undisturbed)
        if told := plan.length_said(undisturbed, resumed, behind):
            made.findings.append(Finding(made.name, first.steps, "length", "ends-elsewhere", told))


def _elsewhere(made: Trial) -> bool:
    """Whether the run begins anew, of which all else follows; adds that, and that it goes on behind an older save."""
    if made.begins is None or made.begins >= made.expected or (made.begins and made.asynchronous):
        return False
    if made.asynchronous:
        made.error = "it begins anew, and saves are made by another thread: perhaps none was whole at the stop"
        return True
    if made.begins == 0:
        made.findings.append(
            Finding(
                made.name,
                1,
                "resume",
                "begins-anew",
                f"it begins anew: nothing of the save after step {made.expected} is used",
            )
        )
        return True
    if made.stop.kind != "save":
        made.findings.append(
            Finding(
                made.name,
                made.begins + 1,
                "resume",
                "older-save",
                f"it continues after step {made.begins}, and the last whole save is the one after step {made.expected}",
            )
        )
    return False
