"""What ``pardemo plan --against`` prints: errors by their causes, what would have been chosen, and who fits."""

import statistics
from typing import Any

from pardemo.planner.layouts import against
from pardemo.planner.layouts.against import Choice, ComparedRun

LEAST_MFU = 0.05  # below it a run hardly computed: what it waited for is not in the model
BELOW = f"below {LEAST_MFU:.0%} MFU"


def row(one: ComparedRun) -> dict[str, Any]:
    """A run beside its prediction, for JSON."""
    run = one.run
    return {
        "source": run.source, "model": run.job.shape.name, "gpu": run.job.machine.gpu.name, "gpus": run.layout.gpus,
        "layout": str(run.layout), "sequence": run.job.sequence, "outcome": run.outcome, "wrong": run.wrong,
        "seconds": run.seconds, "predicted_seconds": one.step.seconds, "error": one.error,
        "peak_bytes": run.peak_bytes, "predicted_peak_bytes": one.memory.peak_bytes, "memory_error": one.memory_error,
        "predicted_to_fit": one.fits, "cannot_be_cut": one.refused, "parts": one.step.parts,
    }  # fmt: skip


def summary(outcomes: list[ComparedRun]) -> dict[str, Any]:
    """Errors of time by what may cause them, of memory, the choices, and who fits."""
    timed = against.usable(outcomes, LEAST_MFU)
    hardly = [one for one in against.usable(outcomes) if one.known_mfu < LEAST_MFU]
    chosen = against.choices(outcomes)
    regrets = sorted(one.regret for one in chosen)
    memories = [one.memory_error for one in outcomes if one.memory_error is not None and not one.run.wrong]
    found: dict[str, Any] = {
        "left out": {
            "contradict themselves": sum(bool(one.run.wrong) for one in outcomes),
            BELOW: len(hardly),
        },
        "time": against.errors([one.error for one in timed]),
        f"time {BELOW}": against.errors([one.error for one in hardly]),
        "time by": {what: against.by(timed, what) for what in against.BY},
        "memory": against.errors(memories),
        "cannot be cut so": _refused(outcomes),
        "outcomes": [
            {"outcome": outcome, "predicted to fit": fits, "runs": count}
            for (outcome, fits), count in sorted(against.confusion(outcomes).items())
        ],
    }
    orders = [one.correlation for one in chosen if one.correlation is not None]
    if regrets:
        found["choice"] = {
            "jobs": len(regrets), "mean regret": statistics.fmean(regrets), "median regret": statistics.median(regrets),
            "worst regret": regrets[-1], "rank correlation": statistics.fmean(orders) if orders else None,
            "worst": [_choice(one) for one in sorted(chosen, key=lambda one: -one.regret)[:5] if one.regret > 0],
        }  # fmt: skip
    return found


def _refused(outcomes: list[ComparedRun]) -> dict[str, int]:
    """Runs by outcome whose layout is impossible, whatever it takes of memory."""
    ended = [one.run.outcome for one in outcomes if one.refused]
    return {outcome: ended.count(outcome) for outcome in sorted(set(ended))}


def _choice(one: Choice) -> dict[str, Any]:
    chosen, best = one.chosen.run.layout, one.best.run.layout
    return {"job": one.job, "regret": one.regret, "chosen": str(chosen), "best": str(best)}


def as_text(outcomes: list[ComparedRun]) -> str:
    """The summary for a terminal."""
    from pardemo.tables import text_table

    found = summary(outcomes)
    rows = [("", "runs", "mean error", "median", "middle", "within 15 %")]
    rows.append(("step time", *_errors(found["time"])))
    for what, values in found["time by"].items():
        if len(values) > 1:
            rows += [(f"  {what} {value}", *_errors(one)) for value, one in values.items()]
    if found["left out"][BELOW]:
        rows.append((f"left out: {BELOW}", *_errors(found[f"time {BELOW}"])))
    rows.append(("memory", *_errors(found["memory"])))
    told = [text_table(rows), ""]
    if count := found["left out"]["contradict themselves"]:
        told.append(f"left out: {count} runs that contradict themselves")
    if choice := found.get("choice"):
        told.append(
            f"the choice, of {choice['jobs']} jobs that were run in several layouts: {choice['mean regret']:.1%} "
            f"longer than the best one (median {choice['median regret']:.1%}, worst {choice['worst regret']:.0%})"
        )
        if choice["rank correlation"] is not None:
            told[-1] += f"; rank correlation {choice['rank correlation']:.2f}"
        told += [f"  {one['job']}: {one['chosen']} for {one['best']}, {one['regret']:+.0%}" for one in choice["worst"]]
    told += [
        f"{one['runs']} runs that ended {one['outcome']}: predicted {'' if one['predicted to fit'] else 'not '}to fit"
        for one in found["outcomes"]
    ]
    told += [
        f"{count} of those that ended {outcome} cannot be cut so: more stages than layers, or stages left with nothing"
        for outcome, count in found["cannot be cut so"].items()
    ]
    return "\n".join(told)


def _errors(values: dict[str, Any]) -> tuple[str, ...]:
    if not values["runs"]:
        return ("0", "", "", "", "")
    share = values["within 15 %"]
    return str(values["runs"]), *(f"{100 * values[n]:.1f} %" for n in ("mean", "median")), (
        f"{100 * values['bias']:+.1f} %"), f"{share:.0%}"  # fmt: skip
