"""The verdict on one screen."""

import textwrap

from pardemo.prove.facts import Finding
from pardemo.prove.proof import Proof

_WIDTH = 100


def screen(proof: Proof) -> str:
    """All layouts, and what is wrong in each."""
    lines = []
    reference = proof.layouts[0]
    lines.append(f"reference  {reference.name}: {proof.steps} steps, {proof.parameters} parameters")
    for layout in proof.layouts[1:]:
        if layout.name in proof.failed:
            lines += [f"?  {layout.name}", *_indented(proof.failed[layout.name])]
            continue
        found = [finding for finding in proof.findings if finding.layout == layout.name]
        lines.append(f"{'✗' if found else '✓'}  {layout.name}" + ("" if found else ": trains as the reference does"))
        for finding in found:
            lines += _finding(finding)
    for note in proof.notes:
        lines += textwrap.wrap(f"note: {note}", _WIDTH)
    lines.append(_verdict(proof))
    return "\n".join(lines)


def _verdict(proof: Proof) -> str:
    if proof.findings:
        return "different"
    if proof.failed:
        return "not compared: a layout could not be run"
    return f"equal, to {proof.tolerance:.0e} of what is compared"


def _finding(finding: Finding) -> list[str]:
    head = f"step {finding.step}, {finding.what}"
    numbers = []
    if finding.factor is not None:
        numbers.append(f"× {finding.factor:.4g}")
    if finding.rest is not None and finding.rest > 1e-6:
        numbers.append(f"rest {finding.rest:.2g}")
    if numbers:
        head += f" ({', '.join(numbers)})"
    if finding.module:
        head += f", first at {finding.module}"
    lines = _indented(head)
    cause = f"[{finding.cause}] " if finding.cause else ""
    lines += _indented(cause + finding.why, 6)
    if finding.parameters:
        some = finding.parameters
        more = f" and {len(some) - 4} more" if len(some) > 4 else ""
        lines += _indented(f"{len(some)} parameter{'s' if len(some) > 1 else ''}: {', '.join(some[:4])}{more}", 6)
    return lines


def _indented(text: str, by: int = 3) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False, initial_indent=" " * by, subsequent_indent=" " * by)
