"""Compares predictions with published runs: errors of time and memory, and the layout that would have been chosen."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pardemo import project
from pardemo.planner.estimate import choose
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.memory import Memory, predict_memory
from pardemo.planner.layouts.programs import Program, fitted_releases
from pardemo.planner.layouts.published.loaders import load, nvidia_program
from pardemo.planner.layouts.published.runs import PublishedRun
from pardemo.planner.layouts.search import expected
from pardemo.planner.layouts.step import PredictedStep, predict_step, refusal_of_layout

LEAST_MFU = 0.05  # below it a run hardly computed: what it waited for is not in the model


@dataclass(frozen=True)
class ComparedRun:
    """A published run and what is predicted of it."""

    run: PublishedRun
    step: PredictedStep
    memory: Memory

    @property
    def seconds(self) -> float:
        """The published seconds of a step.

        Raises:
            ValueError: the run has none, since it did not end well.
        """
        if self.run.seconds is None:
            raise ValueError(f"{self.run.source}: {self.run.layout} was published without a time")
        return self.run.seconds

    @property
    def error(self) -> float | None:
        """Predicted over published seconds, less 1; None where the run has no time."""
        return None if self.run.seconds is None else self.step.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over published peak bytes, less 1; None where the peak is not published."""
        return None if self.run.peak_bytes is None else self.memory.peak_bytes / self.run.peak_bytes - 1

    @property
    def refused(self) -> str:
        """The reason why the layout cannot be run at all, whatever it takes; "" where it can."""
        return refusal_of_layout(self.run.job, self.run.layout)

    @property
    def fits(self) -> bool:
        """Whether it is predicted to run: it can be cut so, and no GPU holds more than it has."""
        return self.memory.peak_bytes <= self.run.job.machine.most_bytes and not self.refused

    @property
    def has_room(self) -> bool:
        """Whether a plan may choose it: it runs, and a GPU keeps what a plan leaves free."""
        return self.fits and self.memory.peak_bytes <= self.run.job.machine.usable_bytes

    @property
    def known_mfu(self) -> float | None:
        """MFU by the published time; None where the run has no time."""
        if self.run.seconds is None:
            return None
        return self.step.model_flops / self.run.seconds / self.step.gpus / self.step.peak_flops


def compare(runs: Iterable[PublishedRun]) -> list[ComparedRun]:
    """Predicts each run."""
    return [ComparedRun(run, predict_step(run.job, run.layout), predict_memory(run.job, run.layout)) for run in runs]


def usable(outcomes: Iterable[ComparedRun], least_mfu: float = 0.0) -> list[ComparedRun]:
    """Returns the runs whose time can be true, without those below ``least_mfu``, which hardly computed."""
    return [
        outcome
        for outcome in outcomes
        if outcome.error is not None and not outcome.run.wrong and (outcome.known_mfu or 0.0) >= least_mfu
    ]


def errors(values: Iterable[float | None]) -> dict[str, Any]:
    """Returns the number of errors, mean and median of their sizes, their median (bias), the share within 15 %."""
    known = [value for value in values if value is not None]
    if not known:
        return {"runs": 0}
    sizes = [abs(value) for value in known]
    return {
        "runs": len(known), "mean": statistics.fmean(sizes), "median": statistics.median(sizes),
        "bias": statistics.median(known), "within 15 %": sum(size <= 0.15 for size in sizes) / len(sizes),
    }  # fmt: skip


#: What errors are grouped by: a name, and a run's value of it.
BY: dict[str, Callable[[PublishedRun], Any]] = {
    "source": lambda run: run.publisher,
    "TP": lambda run: run.layout.tp,
    "PP": lambda run: run.layout.pp,
    "hosts": lambda run: run.job.machine.hosts,
    "micro-batch": lambda run: run.layout.micro_batch,
}


def summary_by(outcomes: Sequence[ComparedRun], key: str) -> dict[Any, dict[str, Any]]:
    """Groups :func:`errors` of time by one of :data:`BY`."""
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[BY[key](outcome.run)].append(outcome.error)
    return {value: errors(groups[value]) for value in sorted(groups)}


@dataclass(frozen=True)
class Choice:
    """The run that would have been chosen among those of one job, and the best one; ``correlation`` of their orders."""

    job: str
    runs: int
    chosen: ComparedRun
    best: ComparedRun
    correlation: float | None

    @property
    def regret(self) -> float:
        """The chosen layout's published time over the best one's, less 1."""
        return self.chosen.seconds / self.best.seconds - 1


def jobs(outcomes: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Groups runs with one model, machine, number of GPUs and samples of a step; only those of several layouts."""
    groups = defaultdict(list)
    for outcome in usable(outcomes):
        run = outcome.run
        groups[
            run.source, run.job.shape.name, run.job.shape.layers, run.job.machine.gpu.name, run.layout.gpus,
            run.layout.batch, run.job.sequence,
        ].append(outcome)  # fmt: skip
    return [group for group in groups.values() if len(group) > 1]


def choices(outcomes: Sequence[ComparedRun]) -> list[Choice]:
    """Makes a choice for each of :func:`jobs`."""
    return [_choice(group) for group in jobs(outcomes)]


def _choice(group: Sequence[ComparedRun]) -> Choice:
    """Chooses among the runs with room in a GPU's memory, of all where none has; the least memory decides a tie."""
    layout, job = group[0].run.layout, group[0].run.job
    name = f"{job.shape.name}, {layout.gpus} × {job.machine.gpu.name}, {layout.batch} samples"
    candidates = [outcome for outcome in group if outcome.has_room] or group
    chosen = choose(candidates, _expected, lambda outcome: outcome.memory.peak_bytes)
    return Choice(name, len(group), chosen, min(group, key=lambda outcome: outcome.seconds), rank_correlation(group))


def _expected(outcome: ComparedRun) -> float:
    return expected(outcome.run.job, outcome.run.layout, outcome.step.seconds)


def rank_correlation(outcomes: Sequence[ComparedRun]) -> float | None:
    """Spearman's, of predicted and published seconds: 1 where both have the same order. Equal seconds share a rank.

    None where all predicted or all published seconds are the same: then there is no order to compare with.
    """
    from scipy.stats import spearmanr

    predicted, published = [outcome.step.seconds for outcome in outcomes], [outcome.run.seconds for outcome in outcomes]
    if len(set(predicted)) == 1 or len(set(published)) == 1:
        return None
    return float(spearmanr(predicted, published).statistic)


def confusion(outcomes: Iterable[ComparedRun]) -> dict[tuple[str, bool], int]:
    """Counts runs by outcome and whether they are predicted to fit. Other reasons than memory may have failed them."""
    return dict(Counter((outcome.run.outcome, outcome.fits) for outcome in outcomes))


def correct_seconds(job: Job, runs: Sequence[PublishedRun]) -> tuple[Job, str]:
    """Returns the job at the median pace of ``runs``, their seconds over the predicted ones, and a line that says so.

    Raises:
        ValueError: none of them has a time on the job's GPU and with its program.
    """
    wanted = _where(job)
    timed = [run for run in runs if run.seconds and not run.wrong and _where(run.job) == wanted]
    if not timed:
        others = sorted({_where(run.job) for run in runs if run.seconds})
        raise ValueError(
            f"--measured has no run with a time on {wanted}; it has {', '.join(others) or 'none that has a time'}"
        )
    ratios = sorted(run.seconds / predict_step(_as(run.job, job), run.layout).seconds for run in timed if run.seconds)
    correction = statistics.median(ratios)
    line = f"{len(ratios)} measured run{'s' * (len(ratios) > 1)} took {correction:.2f} times as long as predicted"
    if len(ratios) > 1:
        rest = 100 * max(abs(ratio / correction - 1) for ratio in ratios)
        line += f" ({ratios[0]:.2f} to {ratios[-1]:.2f}), so all times are multiplied by it; they themselves are then "
        line += f"up to {rest:.0f} % off"
    else:
        line += ", so all times are multiplied by it; one run does not tell how far the rest is off"
    return replace(job, correction=correction, measured=True), line


def _as(measured: Job, planned: Job) -> Job:
    """Returns a measured run's job with the constants of the release that is planned with."""
    if measured.program.release == planned.program.release:
        return measured
    return replace(measured, program=planned.program)


def _where(job: Job) -> str:
    return f"{job.machine.gpu.name} with {job.program.name}"


MOST_LINES = 40  # runs that are shown one by one
BELOW = f"below {LEAST_MFU:.0%} MFU"


def outcome_row(outcome: ComparedRun) -> dict[str, Any]:
    """Returns a run with its prediction, for JSON."""
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
    """Sums up errors of time by what may cause them, errors of memory, the choices, and who fits."""
    timed = usable(outcomes, LEAST_MFU)
    hardly = [outcome.error for outcome in usable(outcomes) if (outcome.known_mfu or 0) < LEAST_MFU]
    refused = Counter(outcome.run.outcome for outcome in outcomes if outcome.refused)
    report: dict[str, Any] = {
        "left out": {"contradict themselves": sum(bool(outcome.run.wrong) for outcome in outcomes), BELOW: len(hardly)},
        "time": errors(outcome.error for outcome in timed), f"time {BELOW}": errors(hardly),
        "time by": {cause: summary_by(timed, cause) for cause in BY},
        "memory": errors(outcome.memory_error for outcome in outcomes if not outcome.run.wrong),
        "cannot be cut so": dict(sorted(refused.items())),
        "outcomes": [
            {"outcome": outcome, "predicted to fit": fits, "runs": count}
            for (outcome, fits), count in sorted(confusion(outcomes).items())
        ],
    }  # fmt: skip
    chosen = sorted(choices(outcomes), key=lambda choice: -choice.regret)
    orders = [choice.correlation for choice in chosen if choice.correlation is not None]
    if regrets := [choice.regret for choice in chosen]:
        report["choice"] = {
            "jobs": len(regrets), "mean regret": statistics.fmean(regrets),
            "median regret": statistics.median(regrets), "worst regret": regrets[0],
            "rank correlation": statistics.fmean(orders) if orders else None,
            "worst": [
                {"job": choice.job, "regret": choice.regret, "chosen": str(choice.chosen.run.layout),
                 "best": str(choice.best.run.layout)}
                for choice in chosen[:5] if choice.regret > 0
            ],
        }  # fmt: skip
    return report


def as_text(outcomes: list[ComparedRun]) -> str:
    """Writes the summary for a terminal."""
    from pardemo.tables import text_table

    report = summary(outcomes)
    left_out, choice = report["left out"], report.get("choice")
    errors_of = {"step time": report["time"]}
    for cause, values in report["time by"].items():
        errors_of |= {f"  {cause} {value}": errors for value, errors in values.items() if len(values) > 1}
    if left_out[BELOW]:
        errors_of[f"left out: {BELOW}"] = report[f"time {BELOW}"]
    rows: list[tuple[str, ...]] = [("", "runs", "mean error", "median", "middle", "within 15 %")]
    rows += [(name, *_errors(errors)) for name, errors in (errors_of | {"memory": report["memory"]}).items()]
    lines = [*_lines(outcomes), text_table(rows), ""]
    if count := left_out["contradict themselves"]:
        lines.append(f"left out: {count} runs that contradict themselves")
    if choice:
        lines.append(
            f"the choice, of {choice['jobs']} jobs that were run in several layouts: {choice['mean regret']:.1%} "
            f"longer than the best one (median {choice['median regret']:.1%}, worst {choice['worst regret']:.0%})"
        )
        if choice["rank correlation"] is not None:
            lines[-1] += f"; rank correlation {choice['rank correlation']:.2f}"
        lines += [
            f"  {case['job']}: {case['chosen']} for {case['best']}, {case['regret']:+.0%}" for case in choice["worst"]
        ]
    for group in report["outcomes"]:
        verdict = "to fit" if group["predicted to fit"] else "not to fit"
        lines.append(f"{group['runs']} runs that ended {group['outcome']}: predicted {verdict}")
    for outcome, count in report["cannot be cut so"].items():
        lines.append(
            f"{count} of those that ended {outcome} cannot be cut so: more stages than layers, or stages left with "
            "nothing"
        )
    return "\n".join(lines)


def _lines(outcomes: list[ComparedRun]) -> list[str]:
    """Writes a line for each run, where these are few enough to be read."""
    from pardemo.tables import text_table

    if len(outcomes) > MOST_LINES:
        return []
    rows = [("run", "layout", "s a step", "predicted", "error", "GB", "predicted", "")]
    for outcome in outcomes:
        run, job = outcome.run, outcome.run.job
        known = (f"{run.seconds:.3g}", f"{outcome.error:+.0%}") if outcome.error is not None else ("", "")
        rows.append((
            f"{job.shape.name or 'model'}, {run.layout.gpus} × {job.machine.gpu.name}, {job.precision}",
            str(run.layout), known[0], f"{outcome.step.seconds:.3g}", known[1],
            f"{run.peak_bytes / 1e9:.0f}" if run.peak_bytes else "", f"{outcome.memory.peak_bytes / 1e9:.0f}",
            outcome.refused or run.wrong or ("" if outcome.fits else "does not fit"),
        ))  # fmt: skip
    return [text_table(rows), ""]


def _errors(values: dict[str, Any]) -> tuple[str, ...]:
    if not values["runs"]:
        return ("0", "", "", "", "")
    share = values["within 15 %"]
    return str(values["runs"]), *(f"{100 * values[n]:.1f} %" for n in ("mean", "median")), (
        f"{100 * values['bias']:+.1f} %"), f"{share:.0%}"  # fmt: skip


FEW = 50  # runs of which none can be kept back
FOLDER = project.root() / "data" / "published_runs"
Halves = tuple[Sequence[ComparedRun], Sequence[ComparedRun]]


def halves(file: str, quantity: str = "time") -> Halves:
    """Splits a table's runs: those that constants were fitted to, every second one, and those that were kept back.

    ``quantity``: ``time``, of runs that computed; or ``memory``, of runs whose memory is published.
    """
    outcomes = compare(load(FOLDER / file, left_out=[]))
    if quantity == "time":
        runs = usable(outcomes, LEAST_MFU)
    else:
        runs = [outcome for outcome in outcomes if outcome.memory_error is not None and not outcome.run.wrong]
    return (runs[::2], runs[1::2]) if len(runs) >= FEW else (runs, [])


def later_runs() -> Iterator[tuple[Program, ComparedRun]]:
    """Yields NVIDIA's runs of later releases, predicted with the constants of each fitted release before theirs."""
    for file in ("megatron_bridge.csv", "newer/megatron_bridge_26.csv"):
        for run in load(FOLDER / file, left_out=[]):
            later = run.job.program
            for earlier in fitted_releases(later.name):
                if not run.wrong and earlier.fitted_release < later.fitted_release:
                    program = replace(nvidia_program(earlier.fitted_release), release=later.release)
                    yield earlier, compare([replace(run, job=replace(run.job, program=program))])[0]
