"""What a proof says, and what came out of stops: on one screen, and as JSON."""

import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from pardemo.script.compare.compare import ModelMap
from pardemo.script.compare.layouts import Layout
from pardemo.script.compare.reference import Finding, Kept
from pardemo.script.resume.stops import Stop
from pardemo.script.words import count_text, first_of


@dataclass
class Proof:
    """What came out.

    ``failed``: layouts that could not be run or compared, with one line each; ``details``: their ranks' tracebacks.
    ``maps``: of each layout its modules in the last step compared. ``kept``: tensors of findings that nobody explains;
    ``files``: where they were written, in the folder of ``--out``. ``asked``: how many steps were to be compared.
    ``rounded``: short types in which the reference computes, by whose rounding tolerances were found.
    """

    layouts: list[Layout]
    findings: list[Finding] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    parameters: int = 0
    tolerance: float = 0.0
    maps: dict[str, ModelMap] = field(default_factory=dict)
    kept: dict[Finding, Kept] = field(default_factory=dict)
    files: dict[Finding, str] = field(default_factory=dict)
    asked: int = 0
    rounded: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether all layouts were run, and train as the reference does."""
        return not self.findings and not self.failed

    def __str__(self) -> str:
        return proof_screen(self)

    def as_json(self) -> dict[str, Any]:
        """As ``pardemo prove --json`` prints it."""
        different = {finding.layout for finding in self.findings}
        return {
            "equal": self.equal,
            "layouts": [
                {"layout": layout.name, "ranks": layout.ranks, "line": " ".join(layout.line),
                 "error": self.failed.get(layout.name), "equal": layout.name not in {*self.failed, *different}}
                for layout in self.layouts
            ],
            "findings": [
                json_row(asdict(finding)) | {"tensors": self.files.get(finding)} for finding in self.findings
            ],
            "steps": self.steps, "asked": self.asked, "parameters": self.parameters, "tolerance": self.tolerance,
            "notes": self.notes,
        }  # fmt: skip


def json_row(row: dict[str, Any]) -> dict[str, Any]:
    """No infinities and no tuples, which JSON has not."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else list(value) if isinstance(value, tuple)
        else value for key, value in row.items()
    }  # fmt: skip


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
class StopVerdict:
    """What came out of all trials. ``masks``: whether dropout draws any in the undisturbed run."""

    layout: Layout
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


EQUAL = "trains as the reference does"
WIDTH = 100
#: A tolerance above that is not fp64's.
PRECISE = 1e-6


def proof_screen(proof: Proof) -> str:
    """All layouts, and what is wrong in each."""
    lines = []
    lines.append(f"reference  {reference_text(proof)}")
    for layout in proof.layouts[1:]:
        if layout.name in proof.failed:
            lines += [f"?  {layout.name}", *indented(proof.failed[layout.name])]
            continue
        found = [finding for finding in proof.findings if finding.layout == layout.name]
        lines.append(f"{'✗' if found else '✓'}  {layout.name}" + ("" if found else f": {EQUAL}"))
        for finding in found:
            lines += _finding(finding)
    for note in proof.notes:
        lines += textwrap.wrap(f"note: {note}", WIDTH)
    lines.append(proof_verdict(proof))
    return "\n".join(lines)


def hints(proof: Proof) -> list[str]:
    """What to do next, a line each; the command prints them beside the verdict, on the error stream."""
    lines = []
    if any(finding.cause for finding in proof.findings):
        lines.append("what each name in brackets means, and what to change: docs/prove.md, Each cause")
    if any(finding.what == "forward" and not finding.cause for finding in proof.findings):
        lines.append("an output parts first: look at what goes in there; --out DIR keeps it beside the reference's")
    if proof.findings and proof.tolerance > PRECISE:
        lines.append("compared in the script's own precision: --double shows what is no rounding")
    return lines


def reference_text(proof: Proof) -> str:
    """What the others are held against."""
    few = f"{proof.steps} of " if proof.steps < proof.asked else ""
    steps = count_text(max(proof.asked, proof.steps), "step")
    return f"{proof.layouts[0].name}: {few}{steps}, {count_text(proof.parameters, 'parameter')}"


def proof_verdict(proof: Proof) -> str:
    """Of all layouts."""
    if proof.findings:
        return "different"
    if proof.failed:
        return "not compared: see what is said of each layout that has a ?"
    if proof.rounded:
        return f"equal, to what rounding to {' and '.join(proof.rounded)} moves of each parameter in the reference"
    return f"equal, to {proof.tolerance:.0e} of what is compared"


def _finding(finding: Finding) -> list[str]:
    lines = [*indented(finding_head(finding)), *indented(finding_why(finding), 6)]
    return [*lines, *indented(parameters_text(finding), 6)] if finding.parameters else lines


def finding_head(finding: Finding) -> str:
    """In which step, of what, by which factor, and at which module."""
    said = f"step {finding.step}, {finding.what}"
    numbers = []
    if finding.factor is not None:
        numbers.append(f"× {finding.factor:.4g}")
    if finding.rest is not None and finding.rest > 1e-6:
        numbers.append(f"rest {finding.rest:.2g}")
    if numbers:
        said += f" ({', '.join(numbers)})"
    return f"{said}, first at {finding.module}" if finding.module else said


def finding_why(finding: Finding) -> str:
    """The cause, where there is one, and its sentence."""
    return f"[{finding.cause}] {finding.why}" if finding.cause else finding.why


def parameters_text(finding: Finding) -> str:
    """How many, and the first of them."""
    return f"{count_text(len(finding.parameters), 'parameter')}: {first_of(finding.parameters, 4)}"


def indented(text: str, by: int = 3) -> list[str]:
    """A sentence in lines of a screen, that far from its edge."""
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, initial_indent=" " * by, subsequent_indent=" " * by)


def stops_screen(verdict: StopVerdict) -> str:
    """Each stop with what was lost, and the verdict."""
    steps = [str(number) for number in verdict.saved if number]
    saves = f"saved after step{'s' * (len(steps) != 1)} {', '.join(steps)}"
    lines = [f"undisturbed  {verdict.layout.name}: {verdict.steps} steps, {saves}"]
    for trial in verdict.trials:
        lines += _trial(trial)
    for note in verdict.notes:
        lines += textwrap.wrap(f"note: {note}", WIDTH)
    lines.append(stops_verdict(verdict))
    return "\n".join(lines)


def stops_verdict(verdict: StopVerdict) -> str:
    """Of all stops."""
    if verdict.findings:
        return "something is lost"
    if any(trial.error for trial in verdict.trials):
        return "not compared: a run could not be compared"
    return "nothing is lost" + (", to the last bit" if all(trial.exact for trial in verdict.trials) else "")


def _trial(trial: Trial) -> list[str]:
    if trial.error:
        return [f"?  {trial.name}", *indented(trial.error)]
    mark = "✗" if trial.findings else "✓"
    if trial.begins is None and trial.findings:
        behind = ""
    else:
        repeated = "1 step is" if trial.lost == 1 else f"{trial.lost} steps are"
        again = f"; {repeated} repeated" if trial.lost else ""
        equal = "" if trial.findings else ", equal to the last bit" if trial.exact else ", equal to rounding"
        unseen = "" if trial.states else "; the optimizer's states by what its step makes of them alone"
        behind = f": continues after step {trial.begins}{again}{equal}{unseen}"
    lines = textwrap.wrap(f"{mark}  {trial.name}{behind}", WIDTH, subsequent_indent="   ")
    for finding in trial.findings:
        lines += indented(finding_head(finding))
        lines += indented(finding_why(finding), 6)
        if finding.parameters:
            lines += indented(parameters_text(finding), 6)
    return lines


def stops_json(verdict: StopVerdict) -> dict[str, Any]:
    """As ``pardemo prove --stop --json`` prints it."""
    return {
        "equal": verdict.equal,
        "layout": verdict.layout.name,
        "steps": verdict.steps,
        "saved": verdict.saved,
        "trials": [
            {
                "stop": trial.stop.text, "kind": trial.stop.kind, "layout": trial.layout.name, "behind": trial.begins,
                "expected": trial.expected, "again": trial.lost, "exact": trial.exact, "in_save": trial.in_save,
                "overdue": trial.overdue,
                "states_compared": trial.states, "error": trial.error or None,
                "findings": [json_row(asdict(finding)) for finding in trial.findings],
            }
            for trial in verdict.trials
        ],
        "findings": [json_row(asdict(finding)) for finding in verdict.findings],
        "notes": verdict.notes,
    }  # fmt: skip
