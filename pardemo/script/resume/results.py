"""Holds the result of stopping and resuming a script, trials and their verdict, and writes its screen and its JSON."""

from dataclasses import dataclass, field
from typing import Any

from pardemo.script.compare.differences import Finding
from pardemo.script.compare.results import runs_screen
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.resume.stops import Stop


@dataclass
class Trial:
    """A stop of a run, and the run that goes on from it.

    ``expected``: after how many steps the last complete save is; ``in_save``: whether the stop cut a later one off;
    ``overdue``: whether the script had not ended within the grace that SIGTERM leaves, and was killed;
    ``asynchronous``: whether the script goes on while it saves,
    so that nobody knows whether this one is whole. ``begins``: after how many the run goes on, None where its
    parameters are those of no step. ``exact``: whether all compared is equal to the last bit. ``states``: whether
    the optimizer's states were compared themselves; if not, by what its step makes of them. ``error``: why nothing
    could be compared.
    """

    stop: Stop
    layout: RunLayout
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
        """Number of steps that are repeated after the stop."""
        over = self.stop.done + (self.stop.moment == "step")
        return max(0, over - (self.expected if self.begins is None else self.begins))

    def as_json(self) -> dict[str, Any]:
        """Returns the trial's row for JSON."""
        return {
            "stop": self.stop.text, "kind": self.stop.kind, "layout": self.layout.name, "behind": self.begins,
            "expected": self.expected, "again": self.lost, "exact": self.exact, "in_save": self.in_save,
            "overdue": self.overdue, "states_compared": self.states, "error": self.error or None,
            "findings": [finding.as_json() for finding in self.findings],
        }  # fmt: skip


@dataclass
class StopVerdict:
    """The outcome of all trials. ``masks``: whether dropout draws any in the undisturbed run."""

    layout: RunLayout
    masks: bool = False
    steps: int = 0
    saved: list[int] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return stops_screen(self)

    @property
    def findings(self) -> list[Finding]:
        return [finding for trial in self.trials for finding in trial.findings]

    @property
    def equal(self) -> bool:
        """Whether all trials were run, and go on as if nothing had happened."""
        return not self.findings and not any(trial.error for trial in self.trials)

    def as_json(self) -> dict[str, Any]:
        """Returns what ``pardemo prove --stop --json`` prints."""
        return {
            "equal": self.equal,
            "layout": self.layout.name,
            "steps": self.steps,
            "saved": self.saved,
            "trials": [trial.as_json() for trial in self.trials],
            "findings": [finding.as_json() for finding in self.findings],
            "notes": self.notes,
        }


def stops_screen(verdict: StopVerdict) -> str:
    """Lists each stop with what was lost, and the verdict."""
    steps = [str(number) for number in verdict.saved if number]
    saves = f"saved after step{'s' * (len(steps) != 1)} {', '.join(steps)}"
    head = f"undisturbed  {verdict.layout.name}: {verdict.steps} steps, {saves}"
    parts = [(_trial(trial), [] if trial.error else trial.findings) for trial in verdict.trials]
    return runs_screen(head, parts, verdict.notes, stops_verdict(verdict))


def stops_verdict(verdict: StopVerdict) -> str:
    """Returns the verdict on all stops."""
    if verdict.findings:
        return "something is lost"
    if any(trial.error for trial in verdict.trials):
        return "not compared: a run could not be compared"
    return "nothing is lost" + (", to the last bit" if all(trial.exact for trial in verdict.trials) else "")


def _trial(trial: Trial) -> str:
    if trial.error:
        return f"?  {trial.name}: {trial.error}"
    if trial.begins is None and trial.findings:
        return f"✗  {trial.name}"
    repeated = "1 step is" if trial.lost == 1 else f"{trial.lost} steps are"
    again = f"; {repeated} repeated" if trial.lost else ""
    equal = "" if trial.findings else ", equal to the last bit" if trial.exact else ", equal to rounding"
    unseen = "" if trial.states else "; the optimizer's states by what its step makes of them alone"
    mark = "✗" if trial.findings else "✓"
    return f"{mark}  {trial.name}: continues after step {trial.begins}{again}{equal}{unseen}"
