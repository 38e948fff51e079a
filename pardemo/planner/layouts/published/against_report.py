"""What ``pardemo plan --against`` prints: errors by their causes, what would have been chosen, and who fits."""

import statistics
from typing import Any

from pardemo.planner.layouts.published import against
from pardemo.planner.layouts.published.against import LEAST_MFU, Choice, ComparedRun

MOST_LINES = 40  # runs that are shown one by one
BELOW = f"below {LEAST_MFU:.0%} MFU"


def row(outcome: ComparedRun) -> dict[str, Any]:
    """A run beside its prediction, for JSON."""
    run = outcome.run
    return {
        "source": run.source, "model": run.job.shape.name, "gpu": run.job.machine.gpu.name, "gpus": run.layout.gpus,
        "layout": str(run.layout), "sequence": run.job.sequence, "outcome": run.outcome, "wrong": run.wrong,
        "seconds": run.seconds, "predicted_seconds": outcome.step.seconds, "error": outcome.error,
        "peak_bytes": run.peak_bytes, "predicted_peak_bytes": outcome.memory.peak_bytes,
        "memory_error": outcome.memory_error, "predicted_to_fit": outcome.fits, "cannot_be_cut": outcome.refused,
        "parts": outcome.step.parts,
    }  # fmt: skip


def summary(outcomes: list[ComparedRun]) -> dict[str, Any]:
    """Errors of time by what may cause them, of memory, the choices, and who fits."""
    timed = against.usable(outcomes, LEAST_MFU)
    hardly = [outcome for outcome in against.usable(outcomes) if outcome.known_mfu < LEAST_MFU]
    chosen = against.choices(outcomes)
    regrets = sorted(choice.regret for choice in chosen)
    memories = [
        outcome.memory_error for outcome in outcomes if outcome.memory_error is not None and not outcome.run.wrong
    ]
    report: dict[str, Any] = {
        "left out": {
            "contradict themselves": sum(bool(outcome.run.wrong) for outcome in outcomes),
            BELOW: len(hardly),
        },
        "time": against.errors([outcome.error for outcome in timed]),
        f"time {BELOW}": against.errors([outcome.error for outcome in hardly]),
        "time by": {cause: against.by(timed, cause) for cause in against.BY},
        "memory": against.errors(memories),
        "cannot be cut so": _refused(outcomes),
        "outcomes": [
            {"outcome": outcome, "predicted to fit": fits, "runs": count}
            for (outcome, fits), count in sorted(against.confusion(outcomes).items())
        ],
    }
    orders = [choice.correlation for choice in chosen if choice.correlation is not None]
    if regrets:
        report["choice"] = {
            "jobs": len(regrets), "mean regret": statistics.fmean(regrets), "median regret": statistics.median(regrets),
            "worst regret": regrets[-1], "rank correlation": statistics.fmean(orders) if orders else None,
            "worst": [_choice(c) for c in sorted(chosen, key=lambda choice: -choice.regret)[:5] if c.regret > 0],
        }  # fmt: skip
    return report


def _refused(outcomes: list[ComparedRun]) -> dict[str, int]:
    """Runs by outcome whose layout is impossible, whatever it takes of memory."""
    ended = [outcome.run.outcome for outcome in outcomes if outcome.refused]
    return {outcome: ended.count(outcome) for outcome in sorted(set(ended))}


def _choice(choice: Choice) -> dict[str, Any]:
    chosen, best = choice.chosen.run.layout, choice.best.run.layout
    return {"job": choice.job, "regret": choice.regret, "chosen": str(chosen), "best": str(best)}


def as_text(outcomes: list[ComparedRun]) -> str:
    """The summary for a terminal."""
    from pardemo.tables import text_table

    report = summary(outcomes)
    rows = [("", "runs", "mean error", "median", "middle", "within 15 %")]
    rows.append(("step time", *_errors(report["time"])))
    for cause, values in report["time by"].items():
        if len(values) > 1:
            rows += [(f"  {cause} {value}", *_errors(errors)) for value, errors in values.items()]
    if report["left out"][BELOW]:
        rows.append((f"left out: {BELOW}", *_errors(report[f"time {BELOW}"])))
    rows.append(("memory", *_errors(report["memory"])))
    lines = [text_table(rows), ""]
    if count := report["left out"]["contradict themselves"]:
        lines.append(f"left out: {count} runs that contradict themselves")
    if choice := report.get("choice"):
        lines.append(
            f"the choice, of {choice['jobs']} jobs that were run in several layouts: {choice['mean regret']:.1%} "
            f"longer than the best one (median {choice['median regret']:.1%}, worst {choice['worst regret']:.0%})"
        )
        if choice["rank correlation"] is not None:
            lines[-1] += f"; rank correlation {choice['rank correlation']:.2f}"
        lines += [
            f"  {case['job']}: {case['chosen']} for {case['best']}, {case['regret']:+.0%}" for case in choice["worst"]
        ]
    lines += [
        f"{group['runs']} runs that ended {group['outcome']}: "
        f"predicted {'' if group['predicted to fit'] else 'not '}to fit"
        for group in report["outcomes"]
    ]
    lines += [
        f"{count} of those that ended {outcome} cannot be cut so: more stages than layers, or stages left with nothing"
        for outcome, count in report["cannot be cut so"].items()
    ]
    return "\n".join([*_lines(outcomes), *lines])


def _lines(outcomes: list[ComparedRun]) -> list[str]:
    """A line for each run, where these are few enough to be read."""
    from pardemo.tables import text_table

    if len(outcomes) > MOST_LINES:
        return []
    rows = [("run", "layout", "s a step", "predicted", "error", "GB", "predicted", "")]
    for outcome in outcomes:
        run, job = outcome.run, outcome.run.job
        name = f"{job.shape.name or 'model'}, {run.layout.gpus} × {job.machine.gpu.name}, {job.precision}"
        seconds = ("", f"{outcome.step.seconds:.3g}", "")
        if run.seconds is not None and outcome.error is not None:
            seconds = f"{run.seconds:.3g}", f"{outcome.step.seconds:.3g}", f"{outcome.error:+.0%}"
        held = f"{run.peak_bytes / 1e9:.0f}" if run.peak_bytes else ""
        told = outcome.refused or run.wrong or ("" if outcome.fits else "does not fit")
        rows.append((name, str(run.layout), *seconds, held, f"{outcome.memory.peak_bytes / 1e9:.0f}", told))
    return [text_table(rows), ""]


def _errors(values: dict[str, Any]) -> tuple[str, ...]:
    if not values["runs"]:
        return ("0", "", "", "", "")
    share = values["within 15 %"]
    return str(values["runs"]), *(f"{100 * values[n]:.1f} %" for n in ("mean", "median")), (
        f"{100 * values['bias']:+.1f} %"), f"{share:.0%}"  # fmt: skip
