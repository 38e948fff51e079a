"""Reports the verdict on layouts or on stops on one screen and as JSON, that on layouts also as a page."""

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file

from pardemo.script import blocks
from pardemo.script.blocks import Block, Chart, Line, Lines, Marked, Section, paragraphs
from pardemo.script.compare.compare import COLUMNS, ModelMap
from pardemo.script.compare.layouts import Layout
from pardemo.script.compare.runs import MOST_BYTES, Finding, Kept
from pardemo.script.report import model_map
from pardemo.script.report.files import report_folder as made_folder
from pardemo.script.resume.stop_follower import Stop
from pardemo.script.words import cause_text, count_text, finding_text, first_of
from pardemo.tables import amount


class LayoutSteps(NamedTuple):
    """Of a layout: steps that it ran, of those that were asked for; steps compared; names of what was not compared."""

    run: int
    compared: int
    not_compared: tuple[str, ...] = ()


NONE_RAN = LayoutSteps(0, 0)


@dataclass
class Proof:
    """The outcome of a proof.

    ``failed``: layouts that could not be run or compared, with one line each; ``details``: their ranks' tracebacks.
    ``maps``: of each layout its modules in the last step compared. ``kept``: tensors of findings that nobody explains;
    ``files``: where they were written, in the folder of ``--out``. ``asked``: how many steps were to be compared.
    ``rounded``: short types in which the reference computes, by whose rounding tolerances were found. ``lines``: of
    each finding the line of the script that does what is wrong, as ``train.py:31``, seen from the working folder.
    ``ran``: of each layout that could be compared, its steps.
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
    lines: dict[Finding, str] = field(default_factory=dict)
    ran: dict[str, LayoutSteps] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether all layouts were run, and train as the reference does."""
        return not self.findings and not self.failed

    def ran_of(self, layout: Layout) -> LayoutSteps:
        """The steps of a layout: of the reference all that it has, none of one that could not be compared."""
        return LayoutSteps(self.steps, self.steps) if layout is self.layouts[0] else self.ran.get(layout.name, NONE_RAN)

    def __str__(self) -> str:
        return proof_screen(self)

    def as_json(self) -> dict[str, Any]:
        """Returns what ``pardemo prove --json`` prints."""
        different = {finding.layout for finding in self.findings}
        return {
            "equal": self.equal,
            "layouts": [
                {"layout": layout.name, "ranks": layout.ranks, "line": " ".join(layout.line),
                 "error": self.failed.get(layout.name), "equal": layout.name not in {*self.failed, *different},
                 "steps_asked": self.asked, "steps_run": ran.run, "steps_compared": ran.compared,
                 "not_compared": list(ran.not_compared)}
                for layout in self.layouts for ran in (self.ran_of(layout),)
            ],
            "findings": [
                json_row(finding) | {"line": self.lines.get(finding, ""), "tensors": self.files.get(finding)}
                for finding in self.findings
            ],
            "steps": self.steps, "asked": self.asked, "parameters": self.parameters, "tolerance": self.tolerance,
            "notes": self.notes,
        }  # fmt: skip


def json_row(finding: Finding) -> dict[str, Any]:
    """Returns a row without infinities, which JSON has not."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(finding).items()
    }


@dataclass
class Trial:
    """A stop of a run, and the run that goes on from it.

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
        """Number of steps that are repeated after the stop."""
        over = self.stop.done + (self.stop.moment == "step")
        return max(0, over - (self.expected if self.begins is None else self.begins))


@dataclass
class StopVerdict:
    """The outcome of all trials. ``masks``: whether dropout draws any in the undisturbed run."""

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


ALIKE = "trains as the reference does"
WIDTH = 100
#: A tolerance above that is not fp64's.
PRECISE = 1e-6
#: The sign before a layout, and the class of its colour.
_EQUAL, _DIFFERENT, _FAILED = ("✓", "ok"), ("✗", "failed"), ("?", "not")


def proof_screen(proof: Proof) -> str:
    """Lists all layouts, and what is wrong in each."""
    parts = []
    for layout in proof.layouts[1:]:
        (sign, _), lead = layout_sign(proof, layout), layout_lead(proof, layout)
        parts.append((f"{sign}  {layout.name}{f': {lead}' * bool(lead)}", findings_of(proof, layout)))
    return runs_screen(f"reference  {reference_text(proof)}", parts, proof.notes, proof_verdict(proof))


def runs_screen(head: str, parts: Sequence[tuple[str, list[Finding]]], notes: Sequence[str], verdict: str) -> str:
    """Lists each run with its findings, between the reference and the verdict."""
    lines = [head]
    for text, findings in parts:
        lines += blocks.wrapped(text, WIDTH, 0, 3)
        lines += [line for finding in findings for block in finding_blocks(finding) for line in block.screen(WIDTH)]
    return "\n".join([*lines, *Lines([f"note: {note}" for note in notes], indent=(0, 0)).screen(WIDTH), verdict])


def findings_of(proof: Proof, layout: Layout) -> list[Finding]:
    """Returns the findings of one layout."""
    return [finding for finding in proof.findings if finding.layout == layout.name]


def layout_sign(proof: Proof, layout: Layout) -> tuple[str, str]:
    """Returns the sign before a layout, and the class of its colour on a page."""
    return _FAILED if layout.name in proof.failed else _DIFFERENT if findings_of(proof, layout) else _EQUAL


def layout_lead(proof: Proof, layout: Layout) -> str:
    """Says of a layout without findings why it could not be compared, or that it is right."""
    compared = proof.ran_of(layout).compared
    few = f" in {compared} of {count_text(proof.steps, 'step')}" if 0 < compared < proof.steps else ""
    return proof.failed.get(layout.name, "" if findings_of(proof, layout) else f"{ALIKE}{few}")


def hints(proof: Proof) -> list[str]:
    """Says what to do next, a line each; the command prints them on the error stream."""
    lines = []
    if any(finding.cause for finding in proof.findings):
        lines.append("what each name in brackets means, and what to change: docs/prove.md, Each cause")
    if any(finding.what == "forward" and not finding.cause for finding in proof.findings):
        lines.append("an output parts first: look at what goes in there; --out DIR keeps it beside the reference's")
    if proof.findings and proof.tolerance > PRECISE:
        lines.append("compared in the script's own precision: --double shows what is no rounding")
    return lines


def reference_text(proof: Proof) -> str:
    """Describes the reference."""
    few = f"{proof.steps} of " if proof.steps < proof.asked else ""
    steps = count_text(max(proof.asked, proof.steps), "step")
    return f"{proof.layouts[0].name}: {few}{steps}, {count_text(proof.parameters, 'parameter')}"


def proof_verdict(proof: Proof) -> str:
    """Returns the verdict on all layouts."""
    if proof.findings:
        return "different"
    if proof.failed:
        return "not compared: see what is said of each layout that has a ?"
    if proof.rounded:
        return f"equal, to what rounding to {' and '.join(proof.rounded)} moves of each parameter in the reference"
    return f"equal, to {proof.tolerance:.0e} of what is compared"


def finding_blocks(finding: Finding, tensors: Line = "") -> list[Block]:
    """Describes a finding; ``tensors``: where they are, for a page."""
    below = [finding_why(finding)]
    if finding.parameters:  # how many, and the first of them
        below.append(f"{count_text(len(finding.parameters), 'parameter')}: {first_of(finding.parameters, 4)}")
    return [
        Lines([[Marked("strong", finding_head(finding))]], "p", (3, 3)), Lines(below, "p", (6, 6)),
        Lines([tensors] if tensors else [], "p", on_screen=False),
    ]  # fmt: skip


def finding_head(finding: Finding) -> str:
    """Says in which step, of what, by which factor, and at which module a finding is."""
    return finding_text(finding.step, finding.what, finding.factor, finding.rest, finding.module)


def finding_why(finding: Finding) -> str:
    """Returns the cause, where there is one, and its sentence."""
    return cause_text(finding.cause, finding.why)


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


def stops_json(verdict: StopVerdict) -> dict[str, Any]:
    """Returns what ``pardemo prove --stop --json`` prints."""
    return {
        "equal": verdict.equal,
        "layout": verdict.layout.name,
        "steps": verdict.steps,
        "saved": verdict.saved,
        "trials": [
            {
                "stop": trial.stop.text, "kind": trial.stop.kind, "layout": trial.layout.name, "behind": trial.begins,
                "expected": trial.expected, "again": trial.lost, "exact": trial.exact, "in_save": trial.in_save,
                "overdue": trial.overdue, "states_compared": trial.states, "error": trial.error or None,
                "findings": [json_row(finding) for finding in trial.findings],
            }
            for trial in verdict.trials
        ],
        "findings": [json_row(finding) for finding in verdict.findings],
        "notes": verdict.notes,
    }  # fmt: skip


def proof_page(proof: Proof, script: str) -> str:
    """Writes the page: the verdict on all layouts first, then each of them with its map.

    Args:
        script: its name.
    """
    lines: list[Line] = []
    sections: list[Section] = []
    for number, layout in enumerate(proof.layouts[1:], 1):
        sign, colour = layout_sign(proof, layout)
        findings = findings_of(proof, layout)
        said = finding_head(findings[0]) if findings else ALIKE
        said = "could not be compared" if layout.name in proof.failed else said
        link = Marked("a", layout.name, f' href="#layout-{number}"')
        lines.append([Marked("strong", sign, f' class="{colour}"'), " ", link, f": {said}"])
        sections.append(Section(f"layout-{number}", f"{sign} {layout.name}", "", _layout_blocks(proof, layout)))
    files: list[Line] = [[Marked("code", "prove.json"), " the same for programs, with all parameters of each finding"]]
    if proof.files:
        said = "the reference's and the layout's tensors of findings that nobody explains"
        files.append([Marked("code", "tensors"), f" {said}, up to {amount(MOST_BYTES)} of each"])
    return blocks.report_page(
        f"{script} in {len(proof.layouts)} layouts",
        f"{blocks.sentence(proof_verdict(proof))} The reference is {reference_text(proof)}.",
        [
            Section("verdict", "Verdict", "", [Lines(lines)]),
            *sections,
            Section("notes", "Notes", "", [Lines(proof.notes)]),
            Section("files", "Beside this page", "", [Lines(files)]),
        ],
        model_map.STYLE,
    )


def _layout_blocks(proof: Proof, layout: Layout) -> list[Block]:
    findings, model = findings_of(proof, layout), proof.maps.get(layout.name)
    below: list[Block] = [paragraphs([Marked("code", " ".join(layout.line))])]
    if lead := layout_lead(proof, layout):
        below.append(paragraphs(blocks.sentence(lead)))
    for finding in findings if not lead else ():
        below += finding_blocks(finding, _kept(proof, finding) if finding in proof.files else "")
    if layout.name in proof.failed or model is None:
        return below
    title = Chart("", title=f"The model in step {model.step}")
    drawn = model_map.map_blocks(model, [finding.module for finding in findings if finding.module])
    return [*below, title, paragraphs(_compared(model, findings)), *drawn]


def _kept(proof: Proof, finding: Finding) -> Line:
    """Says where a finding's tensors are, and which of them."""
    kept, name = proof.kept[finding], proof.files[finding]
    said = f", {amount(sum(tensor.nbytes for tensor in kept.tensors.values()))}"
    if kept.sketches:
        said += f"; of {', '.join(kept.sketches)} these are sketches"
    if kept.left_out:
        said += f"; without {', '.join(kept.left_out)}, for which there was no room"
    return ["tensors: ", Marked("a", name, f' href="{name}"'), said]


def _compared(model: ModelMap, findings: list[Finding]) -> str:
    """Says what was compared of the step that the map shows, and what was not."""
    numbers = "; ".join(f"{label}: {model.counts[key][0]} of {model.counts[key][1]}" for key, label in COLUMNS.items())
    said = f"Compared are {numbers}."
    kinds = {finding.what for finding in findings}
    if {"data", "parameters"} & kinds:
        return f"{said} Where samples or first parameters are wrong, nothing that is made of them is looked at."
    if "forward" in kinds:
        return f"{said} Where outputs are wrong, gradients are not looked at, nor what is made of them."
    return f"{said} Steps behind the first one that differs are not compared." if findings else said


PAGE, VERDICT, TENSORS = "prove.html", "prove.json", "tensors"
#: How a file of tensors is called, and a folder in which all is written first.
_TENSORS, _WRITTEN = re.compile(r"finding\d+\.safetensors"), ".prove-"


def proof_folder(path: str) -> Path:
    """Makes the folder for a proof, if there is none; an earlier proof in it makes room for the new one.

    Raises:
        ValueError: it has other things, cannot be one, or cannot be written to; said before anything runs.
    """
    made = made_folder(path)
    strange = sorted(entry.name for entry in made.iterdir() if not _ours(entry))
    if strange:
        raise ValueError(f"--out: {path} has other things in it, as {strange[0]}: say a folder of its own")
    return made


def _ours(path: Path) -> bool:
    """Whether a proof has written this."""
    if path.name == TENSORS and path.is_dir() and not path.is_symlink():
        return all(_TENSORS.fullmatch(entry.name) for entry in path.iterdir())
    return path.name in (PAGE, VERDICT) or path.name.startswith(_WRITTEN)


def write_proof(folder: Path, proof: Proof, script: str) -> None:
    """Writes all into a folder inside this one, and moves it out when it is whole, the page last.

    The page and the verdict of an earlier proof go first: where a page is, all that it names is of the same proof.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {finding: number for number, finding in enumerate(proof.findings, 1)}
    proof.files = {finding: f"{TENSORS}/finding{numbers[finding]}.safetensors" for finding in proof.kept}
    for left in folder.glob(f"{_WRITTEN}*"):  # by a proof that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_WRITTEN) as temporary:
        new = Path(temporary)
        for finding, kept in proof.kept.items():
            _save(new / proof.files[finding], kept)
        (new / VERDICT).write_text(json.dumps(proof.as_json(), indent=1), "utf-8")
        (new / PAGE).write_text(proof_page(proof, script), "utf-8")
        (folder / PAGE).unlink(missing_ok=True)
        (folder / VERDICT).unlink(missing_ok=True)
        shutil.rmtree(folder / TENSORS, ignore_errors=True)
        for name in (TENSORS, VERDICT, PAGE):
            if (new / name).exists():
                os.replace(new / name, folder / name)


def _save(path: Path, kept: Kept) -> None:
    path.parent.mkdir(exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in kept.tensors.items()}  # none shares memory
    save_file(tensors, path, {"left out": json.dumps(kept.left_out), "sketches": json.dumps(kept.sketches)})
