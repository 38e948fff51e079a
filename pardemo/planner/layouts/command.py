"""``pardemo plan --against``, ``--search`` and ``--explain``: layouts beside published runs, the best ones, and why."""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pardemo.planner.layouts.against import Choice, Outcome
    from pardemo.planner.layouts.search import Answer, Found
    from pardemo.planner.layouts.work import Job
    from pardemo.planner.profile import Profile

PROGRAM = "megatron-core"
GB = 1e9


def add(plan: argparse.ArgumentParser) -> None:
    """Adds the options to those of ``pardemo plan``."""
    layouts = plan.add_argument_group("layouts", "tensor, context, pipeline, data and expert parallel together")
    layouts.add_argument(
        "--search", action="store_true", help="the best layouts of --model on --gpus, of all that divide"
    )
    layouts.add_argument("--explain", metavar="LAYOUT", help="one layout's time and memory, part by part: tp=8,pp=4,…")
    layouts.add_argument(
        "--against", nargs="+", metavar="RUNS.csv", help="instead: predictions beside runs that are known"
    )
    layouts.add_argument("--program", metavar="NAME", help=f"whose constants: nanotron, torchtitan, … ({PROGRAM})")
    layouts.add_argument("--picture", metavar="FILE", help="with --against: predicted against known, as PNG or SVG")


def asked(arguments: argparse.Namespace) -> Callable[[argparse.Namespace], int] | None:
    """The command among these that was asked for.

    Raises:
        ValueError: two of them were.
    """
    found = {"--search": _search, "--explain": _explain, "--against": _against}
    given = [name for name in found if getattr(arguments, name[2:]) not in (None, False)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are two questions; ask one of them")
    for name, only in (("picture", "--against"),):
        if getattr(arguments, name) and only not in given:
            raise ValueError(f"--{name} goes with {only}")
    return found[given[0]] if given else None


def _against(arguments: argparse.Namespace) -> int:
    from pardemo.planner import profile
    from pardemo.planner.layouts import against

    own = profile.load(Path(arguments.gpu).expanduser()) if profile.is_file(arguments.gpu) else None
    known = [run for name in arguments.against for run in _runs(Path(name), own)]
    if own and not any(run.job.machine.gpu is own.gpu for run in known):
        names = sorted({run.job.machine.gpu.name for run in known})
        raise ValueError(f"no run is on {own.gpu.name!r}, the name in {arguments.gpu}; they are on {', '.join(names)}")
    outcomes = against.compare(known)
    if arguments.picture:
        from pardemo.collection.figures.layouts import predicted_and_known

        predicted_and_known(outcomes).savefig(arguments.picture, bbox_inches="tight")
    if arguments.json:
        print(json.dumps({"runs": [_row(one) for one in outcomes], "summary": summary(outcomes)}, indent=1))
    else:
        print(as_text(outcomes))
    return 0


def _runs(path: Path, own: "Profile | None") -> list:
    from pardemo.planner.layouts import published

    if not path.is_file():
        raise ValueError(f"no file {path}; a CSV with a run in each row (docs/planner.md lists its columns)")
    return published.load(path, own)


def _row(one: "Outcome") -> dict[str, Any]:
    run = one.run
    return {
        "source": run.source, "model": run.job.shape.name, "gpu": run.job.machine.gpu.name, "gpus": run.layout.gpus,
        "layout": str(run.layout), "sequence": run.job.sequence, "outcome": run.outcome, "wrong": run.wrong,
        "seconds": run.seconds, "predicted_seconds": one.step.seconds, "error": one.error,
        "peak_bytes": run.peak_bytes, "predicted_peak_bytes": one.memory.peak_bytes, "memory_error": one.memory_error,
        "predicted_to_fit": one.fits, "cannot_be_cut": one.refused, "parts": one.step.parts,
    }  # fmt: skip


def summary(outcomes: list["Outcome"]) -> dict[str, Any]:
    """Errors of time by what may cause them, of memory, the choices, and who fits."""
    from pardemo.planner.layouts import against

    timed = against.usable(outcomes, LEAST_MFU)
    chosen = against.choices(outcomes)
    regrets = sorted(one.regret for one in chosen)
    memories = [one.memory_error for one in outcomes if one.memory_error is not None and not one.run.wrong]
    found: dict[str, Any] = {
        "left out": {
            "contradict themselves": sum(bool(one.run.wrong) for one in outcomes),
            f"below {LEAST_MFU:.0%} MFU": len(against.usable(outcomes)) - len(timed),
        },
        "time": against.errors([one.error for one in timed]),
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


def _refused(outcomes: list["Outcome"]) -> dict[str, int]:
    """Runs by outcome whose layout is impossible, whatever it takes of memory."""
    ended = [one.run.outcome for one in outcomes if one.refused]
    return {outcome: ended.count(outcome) for outcome in sorted(set(ended))}


def _choice(one: "Choice") -> dict[str, Any]:
    chosen, best = one.chosen.run.layout, one.best.run.layout
    return {"job": one.job, "regret": one.regret, "chosen": str(chosen), "best": str(best)}


LEAST_MFU = 0.05  # below it a run hardly computed: what it waited for is not in the model


def as_text(outcomes: list["Outcome"]) -> str:
    """The summary for a terminal."""
    from pardemo.tables import text_table

    found = summary(outcomes)
    rows = [("", "runs", "mean error", "median", "middle", "within 15 %")]
    rows.append(("step time", *_errors(found["time"])))
    for what, values in found["time by"].items():
        if len(values) > 1:
            rows += [(f"  {what} {value}", *_errors(one)) for value, one in values.items()]
    rows.append(("memory", *_errors(found["memory"])))
    told = [text_table(rows), ""]
    told += [f"left out: {count} runs that {why}" if "contra" in why else f"left out: {count} runs {why}"
             for why, count in found["left out"].items() if count]  # fmt: skip
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


def job_of(arguments: argparse.Namespace) -> "Job":
    """The job that the options describe.

    Raises:
        ValueError: an option is missing or impossible.
    """
    from pardemo.planner import hardware, models, profile
    from pardemo.planner.layouts.machines import machine
    from pardemo.planner.layouts.shape import of
    from pardemo.planner.layouts.stacks import stack
    from pardemo.planner.layouts.work import Job

    if not arguments.model:
        raise ValueError("--search and --explain need --model: a name, a folder or a config.json")
    if arguments.gpus is None:
        raise ValueError("--search and --explain need --gpus: how many in all")
    for name, least in (("gpus", 1), ("hosts", 1), ("sequence", 1), ("per_step", 1)):
        if (value := getattr(arguments, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    shape = replace(of(models.find(arguments.model)), name=Path(arguments.model).name)
    found = profile.find(arguments.gpu, arguments.gpus)
    each = min(arguments.gpus, found.host_gpus or 8) if arguments.hosts == 1 else arguments.gpus // arguments.hosts
    if each < 1 or (arguments.hosts > 1 and arguments.gpus % arguments.hosts):
        raise ValueError(f"{arguments.gpus} GPUs do not divide over {arguments.hosts} hosts")
    between = None if found.between and not arguments.link else hardware.link(arguments.link or profile.USUAL_LINK)
    where = machine(found, arguments.gpus, each, between)
    return Job(shape, where, stack(arguments.program or PROGRAM), arguments.sequence or 4096)


def _search(arguments: argparse.Namespace) -> int:
    from pardemo.planner.layouts.search import search, sensitivity

    job = job_of(arguments)
    answer = search(job, arguments.per_step or arguments.gpus)
    changed = sensitivity(answer)
    written: list[str] = []
    if arguments.write and answer.best:
        from pardemo.planner.layouts import launch

        written = launch.write(Path(arguments.write), job, answer.best[0].layout, arguments.model)
    if arguments.json:
        told = {
            "tried": answer.tried, "fitting": answer.fitting, "best": [_found(one) for one in answer.best],
            "front": [_found(one) for one in answer.front], "least": _found(answer.least),
            "if": {name: {"best": _found(best), "same": _found(same)} for name, (best, same) in changed.items()},
            "written": written,
        }  # fmt: skip
        print(json.dumps(told, indent=1))
    else:
        print(answer_text(answer, changed))
        if written:
            print(f"written to {arguments.write}: {', '.join(written)}")
    return 0 if answer.best else 1


def _found(one: "Found") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "layout": asdict(one.layout), "seconds": one.seconds, "mfu": one.step.mfu,
        "tokens_per_s": one.step.tokens_per_s, "peak_bytes": one.memory.peak_bytes, "headroom": one.headroom,
        "parts": one.step.parts, "lines": one.memory.lines,
    }  # fmt: skip


def answer_text(answer: "Answer", changed: dict[str, tuple["Found", "Found"]]) -> str:
    """A search for a terminal: the best layouts, why the first one, and what it depends on."""
    from pardemo.tables import text_table

    job, machine = answer.job, answer.job.machine
    told = [
        f"{job.shape.name or 'model'}, {job.shape.params / 1e9:.1f}B parameters, {answer.batch} samples of "
        f"{job.sequence:,} tokens a step on {machine.gpus} × {machine.gpu.name}, as {job.stack.name} runs it "
        f"({job.stack.about})",
        f"{answer.tried:,} layouts divide it, {answer.fitting:,} of them fit",
    ]
    if not answer.best:
        least = answer.least
        told.append(
            f"nothing fits; the least is {least.layout}, {least.memory.peak_bytes / GB:.0f} GB of "
            f"{least.room / GB:.0f}: take more GPUs, a shorter sequence or fewer samples a step"
        )
        return "\n".join(told)
    rows = [("", "layout", "s a step", "tokens/s/GPU", "MFU", "GB", "free", "most of the rest goes to")]
    for place, one in enumerate(answer.best):
        rows.append((
            "→" if place == 0 else "", str(one.layout), f"{one.seconds:.2f}", f"{one.step.tokens_per_s:,.0f}",
            f"{one.step.mfu:.1%}", f"{one.memory.peak_bytes / GB:.0f}", f"{one.headroom:.0%}", _cost(one),
        ))  # fmt: skip
    told += ["", text_table(rows), ""]
    for name, (best, same) in changed.items():
        held = f"{same.seconds:.2f} s" if same.fits else "no longer fits"
        other = "still the best" if best.layout == same.layout else f"then {best.layout}, {best.seconds:.2f} s"
        told.append(f"if {name}: {held}; {other}")
    return "\n".join(told)


def _cost(one: "Found") -> str:
    """The two largest parts beside products and attention."""
    useful = {"matrix products", "attention"}
    rest = sorted((n for n in one.step.parts if n not in useful), key=one.step.parts.get, reverse=True)[:2]
    return ", ".join(f"{name} {one.step.parts[name] / one.seconds:.0%}" for name in rest)


def _explain(arguments: argparse.Namespace) -> int:
    from pardemo.planner.layouts import explain

    job = job_of(arguments)
    layout = explain.parse(arguments.explain, job, arguments.per_step)
    if arguments.json:
        print(json.dumps(explain.as_json(job, layout), indent=1))
    else:
        print(explain.as_text(job, layout))
    return 0
