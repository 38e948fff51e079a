"""The verdict on one screen."""

import textwrap

from pardemo.prove.facts import Finding
from pardemo.prove.proof import Proof, counted

EQUAL = "trains as the reference does"
WIDTH = 100
#: A tolerance above that is not fp64's.
PRECISE = 1e-6


def screen(proof: Proof) -> str:
    """All layouts, and what is wrong in each."""
    lines = []
    lines.append(f"reference  {reference(proof)}")
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
    lines.append(verdict(proof))
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


def reference(proof: Proof) -> str:
    """What the others are held against."""
    few = f"{proof.steps} of " if proof.steps < proof.asked else ""
    steps = counted(max(proof.asked, proof.steps), "step")
    return f"{proof.layouts[0].name}: {few}{steps}, {counted(proof.parameters, 'parameter')}"


def verdict(proof: Proof) -> str:
    """Of all layouts."""
    if proof.findings:
        return "different"
    if proof.failed:
        return "not compared: see what is said of each layout that has a ?"
    if proof.rounded:
        return f"equal, to what rounding to {' and '.join(proof.rounded)} moves of each parameter in the reference"
    return f"equal, to {proof.tolerance:.0e} of what is compared"


def _finding(finding: Finding) -> list[str]:
    lines = [*indented(head(finding)), *indented(why(finding), 6)]
    return [*lines, *indented(parameters(finding), 6)] if finding.parameters else lines


def head(finding: Finding) -> str:
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


def why(finding: Finding) -> str:
    """The cause, where there is one, and its sentence."""
    return f"[{finding.cause}] {finding.why}" if finding.cause else finding.why


def parameters(finding: Finding) -> str:
    """How many, and the first of them."""
    some = finding.parameters
    more = f" and {len(some) - 4} more" if len(some) > 4 else ""
    return f"{len(some)} parameter{'s' if len(some) > 1 else ''}: {', '.join(some[:4])}{more}"


def indented(text: str, by: int = 3) -> list[str]:
    """A sentence in lines of a screen, that far from its edge."""
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, initial_indent=" " * by, subsequent_indent=" " * by)
