"""Holds the result of comparing layouts, a proof, and writes its screen and its JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pardemo.script import blocks
from pardemo.script.blocks import Block, Line, Lines, Marked
from pardemo.script.compare.differences import Finding, UnexplainedGradients
from pardemo.script.compare.module_map import ModelMap
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.words import cause_text, count_text, finding_text, first_of

ALIKE = "trains as the reference does"
WIDTH = 100
#: The sign before a layout, and the class of its colour.
_EQUAL, _DIFFERENT, _FAILED = ("✓", "ok"), ("✗", "failed"), ("?", "not")


@dataclass
class LayoutResult:
    """The result of running a layout and comparing it with the reference."""

    layout: RunLayout
    #: why it could not be run or compared, in one line; empty where it could
    error: str = ""
    #: tracebacks of its ranks, where it could not be run
    details: str = ""
    #: steps that all ranks ran, of those that were asked for
    steps_run: int = 0
    #: steps that were compared, to the first that differs
    steps_compared: int = 0
    #: names of parameters that were not compared
    not_compared: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    #: its modules in the last step that was compared
    model: ModelMap | None = None
    #: what other layouts may explain, until all of them are compared
    left_open: UnexplainedGradients | None = None

    @property
    def name(self) -> str:
        """The layout's name, ``ranks=4 batch=8``."""
        return self.layout.name

    @property
    def sign(self) -> tuple[str, str]:
        """The sign before the layout, and the class of its colour on a page."""
        return _FAILED if self.error else _DIFFERENT if self.findings else _EQUAL

    def lead(self, steps: int) -> str:
        """Says why the layout could not be compared, or that it is right; empty where it has findings.

        ``steps``: the reference's.
        """
        few = f" in {self.steps_compared} of {count_text(steps, 'step')}" if 0 < self.steps_compared < steps else ""
        return self.error or ("" if self.findings else f"{ALIKE}{few}")

    def as_json(self, asked: int) -> dict[str, Any]:
        """Returns the layout's row for JSON; ``asked``: how many steps were to be compared."""
        return {
            "layout": self.name, "ranks": self.layout.ranks, "line": " ".join(self.layout.line),
            "error": self.error or None, "equal": not self.error and not self.findings,
            "steps_asked": asked, "steps_run": self.steps_run, "steps_compared": self.steps_compared,
            "not_compared": list(self.not_compared),
        }  # fmt: skip


@dataclass
class Proof:
    """The result of comparing layouts of a script with the first of them, the reference."""

    #: the reference first
    layouts: list[LayoutResult]
    notes: list[str] = field(default_factory=list)
    #: how many steps were to be compared
    asked: int = 0
    #: how many parameters the reference has
    parameters: int = 0
    #: relative difference that counts as rounding
    tolerance: float = 0.0
    #: short types in which the reference computes, by whose rounding tolerances were found
    rounded: list[str] = field(default_factory=list)
    #: whether recorded inputs were replayed in all layouts
    replayed: bool = False

    @property
    def steps(self) -> int:
        """The number of steps that the reference ran."""
        return self.layouts[0].steps_run

    @property
    def findings(self) -> list[Finding]:
        """The findings of all layouts, in their order."""
        return [finding for layout in self.layouts for finding in layout.findings]

    @property
    def failed(self) -> dict[str, str]:
        """The layouts that could not be run or compared, by name, with one line each."""
        return {layout.name: layout.error for layout in self.layouts if layout.error}

    @property
    def equal(self) -> bool:
        """Whether all layouts were run, and train as the reference does."""
        return not self.findings and not self.failed

    @property
    def reference_text(self) -> str:
        """The reference, its steps and its parameters in words."""
        few = f"{self.steps} of " if self.steps < self.asked else ""
        steps = count_text(max(self.asked, self.steps), "step")
        return f"{self.layouts[0].name}: {few}{steps}, {count_text(self.parameters, 'parameter')}"

    @property
    def verdict(self) -> str:
        """The verdict on all layouts."""
        on = ", on recorded inputs" if self.replayed else ""
        if self.findings:
            return f"different{on}"
        if self.failed:
            return "not compared: see what is said of each layout that has a ?"
        if self.rounded:
            types = " and ".join(self.rounded)
            return f"equal, to what rounding to {types} moves of each parameter in the reference{on}"
        return f"equal, to {self.tolerance:.0e} of what is compared{on}"

    def __str__(self) -> str:
        parts = []
        for layout in self.layouts[1:]:
            (sign, _), lead = layout.sign, layout.lead(self.steps)
            parts.append((f"{sign}  {layout.name}{f': {lead}' * bool(lead)}", layout.findings))
        return runs_screen(f"reference  {self.reference_text}", parts, self.notes, self.verdict)

    def as_json(self) -> dict[str, Any]:
        """Returns what ``pardemo prove --json`` prints."""
        return {
            "equal": self.equal,
            "layouts": [layout.as_json(self.asked) for layout in self.layouts],
            "findings": [
                finding.as_json() | {"line": finding.line, "tensors": finding.tensors_file} for finding in self.findings
            ],
            "steps": self.steps, "asked": self.asked, "parameters": self.parameters, "tolerance": self.tolerance,
            "notes": self.notes, "replayed": self.replayed,
        }  # fmt: skip


def runs_screen(head: str, parts: Sequence[tuple[str, list[Finding]]], notes: Sequence[str], verdict: str) -> str:
    """Lists each run with its findings, between the reference and the verdict."""
    lines = [head]
    for text, findings in parts:
        lines += blocks.wrapped(text, WIDTH, 0, 3)
        lines += [line for finding in findings for block in finding_blocks(finding) for line in block.screen(WIDTH)]
    return "\n".join([*lines, *Lines([f"note: {note}" for note in notes], indent=(0, 0)).screen(WIDTH), verdict])


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
