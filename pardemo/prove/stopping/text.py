"""What came out of the stops, on one screen and as JSON."""

import textwrap
from dataclasses import asdict
from typing import Any

from pardemo.prove import text
from pardemo.prove.proof import plain
from pardemo.prove.stopping.trials import Trial, Verdict


def screen(made: Verdict) -> str:
    """Each stop with what was lost, and the verdict."""
    steps = [str(number) for number in made.saved if number]
    saves = f"saved after step{'s' * (len(steps) != 1)} {', '.join(steps)}"
    lines = [f"undisturbed  {made.layout.name}: {made.steps} steps, {saves}"]
    for trial in made.trials:
        lines += _trial(trial)
    for note in made.notes:
        lines += textwrap.wrap(f"note: {note}", text.WIDTH)
    lines.append(verdict(made))
    return "\n".join(lines)


def verdict(made: Verdict) -> str:
    """Of all stops."""
    if made.findings:
        return "something is lost"
    if any(trial.error for trial in made.trials):
        return "not compared: a run could not be compared"
    return "nothing is lost" + (", to the last bit" if all(trial.exact for trial in made.trials) else "")


def _trial(trial: Trial) -> list[str]:
    if trial.error:
        return [f"?  {trial.name}", *text.indented(trial.error)]
    mark = "✗" if trial.findings else "✓"
    if trial.begins is None and trial.findings:
        behind = ""
    else:
        repeated = "1 step is" if trial.lost == 1 else f"{trial.lost} steps are"
        again = f"; {repeated} repeated" if trial.lost else ""
        equal = "" if trial.findings else ", equal to the last bit" if trial.exact else ", equal to rounding"
        unseen = "" if trial.states else "; the optimizer's states by what its step makes of them alone"
        behind = f": continues after step {trial.begins}{again}{equal}{unseen}"
    lines = textwrap.wrap(f"{mark}  {trial.name}{behind}", text.WIDTH, subsequent_indent="   ")
    for finding in trial.findings:
        lines += text.indented(text.head(finding))
        lines += text.indented(text.why(finding), 6)
        if finding.parameters:
            lines += text.indented(text.parameters(finding), 6)
    return lines


def as_json(made: Verdict) -> dict[str, Any]:
    """As ``pardemo prove --stop --json`` prints it."""
    return {
        "equal": made.equal,
        "layout": made.layout.name,
        "steps": made.steps,
        "saved": made.saved,
        "trials": [
            {
                "stop": trial.stop.text, "kind": trial.stop.kind, "layout": trial.layout.name, "behind": trial.begins,
                "expected": trial.expected, "again": trial.lost, "exact": trial.exact, "in_save": trial.in_save,
                "overdue": trial.overdue,
                "states_compared": trial.states, "error": trial.error or None,
                "findings": [plain(asdict(finding)) for finding in trial.findings],
            }
            for trial in made.trials
        ],
        "findings": [plain(asdict(finding)) for finding in made.findings],
        "notes": made.notes,
    }  # fmt: skip
