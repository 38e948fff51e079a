"""Holds the result of comparing layouts, a proof, and writes its screen and its JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from pardemo.script import blocks
from pardemo.script.blocks import Block, Line, Lines, Marked
from pardemo.script.compare.differences import Finding, Kept
from pardemo.script.compare.module_map import ModelMap
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.words import cause_text, count_text, finding_text, first_of


class LayoutSteps(NamedTuple):
    """The steps that a layout ran and those that were compared, and the names of what was not compared."""

    run: int
    compared: int
    not_compared: tuple[str, ...] = ()


NONE_RAN = LayoutSteps(0, 0)
ALIKE = "trains as the reference does"
WIDTH = 100
#: The sign before a layout, and the class of its colour.
_EQUAL, _DIFFERENT, _FAILED = ("✓", "ok"), ("✗", "failed"), ("?", "not")


@dataclass
class Proof:
    """The result of comparing layouts of a script with the first of them.

    ``failed``: layouts that could not be run or compared, with one line each; ``details``: their ranks' tracebacks.
    ``maps``: of each layout its modules in the last step compared. ``kept``: tensors of findings that nobody explains;
    ``files``: where they were written, in the folder of ``--out``. ``asked``: how many steps were to be compared.
    ``rounded``: short types in which the reference computes, by whose rounding tolerances were found. ``lines``: of
    each finding the line of the script that does what is wrong, as ``train.py:31``, seen from the working folder.
    ``ran``: of each layout that could be compared, its steps. ``replayed``: whether all were fed recorded inputs.
    """

    layouts: list[RunLayout]
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
    replayed: bool = False

    @property
    def equal(self) -> bool:
        """Whether all layouts were run, and train as the reference does."""
        return not self.findings and not self.failed

    def ran_of(self, layout: RunLayout) -> LayoutSteps:
        """Returns the steps of a layout: of the reference all that it has, none of one that could not be compared."""
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
            "notes": self.notes, "replayed": self.replayed,
        }  # fmt: skip


def json_row(finding: Finding) -> dict[str, Any]:
    """Returns a row without infinities, which JSON has not."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(finding).items()
    }


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


def findings_of(proof: Proof, layout: RunLayout) -> list[Finding]:
    """Returns the findings of one layout."""
    return [finding for finding in proof.findings if finding.layout == layout.name]


def layout_sign(proof: Proof, layout: RunLayout) -> tuple[str, str]:
    """Returns the sign before a layout, and the class of its colour on a page."""
    return _FAILED if layout.name in proof.failed else _DIFFERENT if findings_of(proof, layout) else _EQUAL


def layout_lead(proof: Proof, layout: RunLayout) -> str:
    """Says of a layout without findings why it could not be compared, or that it is right."""
    compared = proof.ran_of(layout).compared
    few = f" in {compared} of {count_text(proof.steps, 'step')}" if 0 < compared < proof.steps else ""
    return proof.failed.get(layout.name, "" if findings_of(proof, layout) else f"{ALIKE}{few}")


def reference_text(proof: Proof) -> str:
    """Describes the reference."""
    few = f"{proof.steps} of " if proof.steps < proof.asked else ""
    steps = count_text(max(proof.asked, proof.steps), "step")
    return f"{proof.layouts[0].name}: {few}{steps}, {count_text(proof.parameters, 'parameter')}"


def proof_verdict(proof: Proof) -> str:
    """Returns the verdict on all layouts."""
    on = ", on recorded inputs" if proof.replayed else ""
    if proof.findings:
        return f"different{on}"
    if proof.failed:
        return "not compared: see what is said of each layout that has a ?"
    if proof.rounded:
        return f"equal, to what rounding to {' and '.join(proof.rounded)} moves of each parameter in the reference{on}"
    return f"equal, to {proof.tolerance:.0e} of what is compared{on}"


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
