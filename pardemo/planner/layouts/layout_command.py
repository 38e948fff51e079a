"""``pardemo plan --against``, ``--search`` and ``--explain``: compares with published runs, searches, explains."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pardemo.planner.estimate import PredictedStep
    from pardemo.planner.layouts.job import Job
    from pardemo.planner.layouts.search import PlannedLayout
    from pardemo.planner.layouts.shape import Shape
    from pardemo.planner.layouts.tuning import Tuning
    from pardemo.planner.profile import GpuProfile

PROGRAM = "megatron-core"
SEQUENCE = 4096
RANK = 8  # of LoRA, where its modules alone are said


def add_layout_options(plan: argparse.ArgumentParser) -> None:
    """Adds the options about layouts to ``pardemo plan``."""
    layouts = plan.add_argument_group("layouts", "tensor, context, pipeline, data and expert parallel together")
    layouts.add_argument(
        "--search", action="store_true",
        help="the best layouts of --model on --gpus, of all that divide",
    )  # fmt: skip
    layouts.add_argument(
        "--explain", metavar="LAYOUT",
        help="one layout's time and memory, by parts: tp=8,pp=4,… or as a search prints it, TP8 PP4 DP2 zero1 1×32",
    )  # fmt: skip
    layouts.add_argument(
        "--against", nargs="+", metavar="RUNS.csv", help="instead: predictions beside runs that are known"
    )
    layouts.add_argument(
        "--program",
        metavar="NAME",
        help=f"whose constants: nanotron, torchtitan, … ({PROGRAM}); "
        "NAME@RELEASE: those of a release, as megatron-core@26.04 (the newest that is known)",
    )
    layouts.add_argument(
        "--precision", metavar="NAME", help="with --search, --explain: of the products, fp8, mxfp8 or nvfp4 (bf16)"
    )
    layouts.add_argument(
        "--measured", nargs="+", metavar="FILE",
        help="with --search, --explain: RUNS.csv on your machine, by which times are corrected, or traces of a job "
        "there, whose rates are planned with",
    )  # fmt: skip
    layouts.add_argument("--picture", metavar="FILE", help="with --against: predicted against known, as PNG or SVG")


def answer_to(question: str) -> Callable[[argparse.Namespace], int] | None:
    """Returns the function that answers a question about layouts; None for other questions."""
    return {"--search": _search, "--explain": _explain, "--against": _against}.get(question)


def _against(arguments: argparse.Namespace) -> int:
    from pardemo.planner import profile
    from pardemo.planner.layouts.published import against

    measured = None
    if arguments.gpu:
        if not profile.is_file(arguments.gpu):
            raise ValueError(
                f"--against takes --gpu as a profile.json only, not {arguments.gpu!r}: its files say the GPU"
            )
        measured = profile.load_profile(Path(arguments.gpu).expanduser())
    left_out: list[str] = []
    published_runs = [run for name in arguments.against for run in _runs(Path(name), measured, left_out)]
    if measured and not any(run.job.machine.gpu is measured.gpu for run in published_runs):
        names = sorted({run.job.machine.gpu.name for run in published_runs})
        raise ValueError(
            f"no run is on {measured.gpu.name!r}, the name in {arguments.gpu}; they are on {', '.join(names)}"
        )
    if measured and not measured.inside:
        most = max(run.job.machine.gpus for run in published_runs if run.job.machine.gpu is measured.gpu)
        profile.check_inside(measured, most)
    outcomes = against.compare(published_runs)
    if arguments.picture:
        from pardemo.planner.layouts.charts import predicted_and_known

        predicted_and_known(outcomes).savefig(arguments.picture, bbox_inches="tight")
    if arguments.json:
        rows, summary = [against.outcome_row(outcome) for outcome in outcomes], against.summary(outcomes)
        print(json.dumps({"runs": rows, "summary": summary, "cannot be read": left_out}, indent=1))
    else:
        print(against.as_text(outcomes), *(f"left out: {line}" for line in left_out), sep="\n")
    return 0


def _runs(path: Path, measured: "GpuProfile | None", left_out: list[str]) -> list:
    from pardemo.planner.layouts.published import loaders

    if not path.is_file():
        raise ValueError(f"no file {path}; a CSV with a run in each row (docs/plan.md lists its columns)")
    return loaders.load(path, measured, left_out)


def job_of(arguments: argparse.Namespace) -> "Job":
    """Returns the job that the options describe.

    Raises:
        ValueError: an option is missing or impossible.
    """
    from pardemo.planner import hardware, profile
    from pardemo.planner.layouts import configurations
    from pardemo.planner.layouts.job import Job
    from pardemo.planner.layouts.programs import find_program

    if not arguments.model:
        raise ValueError("--search and --explain need --model: a name, a folder or a config.json")
    if arguments.gpus is None:
        raise ValueError("--search and --explain need --gpus: how many in all")
    config = configurations.find_configuration(arguments.model)
    shape = replace(configurations.shape_of_config(config), name=Path(arguments.model).name)
    if traces := traces_of(arguments):
        gpu_profile = replace(profile.parse_profile(arguments.profile_of_traces(traces)), file="--measured")
        profile.check_inside(gpu_profile, arguments.gpus)
    else:
        gpu_profile = profile.find_profile(arguments.gpu, arguments.gpus)
    machine = gpu_profile.machine(arguments.gpus, arguments.hosts, arguments.link)
    most = shape.positions or arguments.sequence or SEQUENCE
    if arguments.sequence and arguments.sequence > most:
        raise ValueError(f"--sequence must be at most {most:,}: {shape.name} has learned no further positions")
    return Job(
        shape, machine, find_program(arguments.program or PROGRAM), arguments.sequence or min(SEQUENCE, most),
        precision=hardware.precision(arguments.precision or "bf16"),
        tuning=tuning_of(arguments.target, arguments.rank, config, shape),
    )  # fmt: skip


def traces_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the files of --measured that are no table of runs: traces of torch's profiler, or folders of them."""
    return [name for name in arguments.measured or () if name.endswith((".json", ".gz")) or Path(name).is_dir()]


def tuning_of(target: str | None, rank: int | None, config: Any, shape: "Shape") -> "Tuning":
    """Returns what --target and --rank mean: all parameters where neither is given, else LoRA without dropout.

    Raises:
        ValueError: the model has no such modules, or none are usual for its kind.
    """
    from pardemo.planner.layouts.configurations import usual_target
    from pardemo.planner.layouts.tuning import Tuning, adapted

    if not target and rank is None:
        return Tuning()
    modules = tuple(target.split(",")) if target else usual_target(config.model_type)
    if not modules:
        raise ValueError(f"{shape.name or 'the model'}: name LoRA's modules (--target q_proj,v_proj or all-linear)")
    chosen = Tuning(rank or RANK, modules, dropout=0.0)
    adapted(chosen, shape)  # refuses modules that the model does not have
    return chosen


def assumptions_of(arguments: argparse.Namespace, job: "Job", batch: int) -> dict[str, Any]:
    """Returns the machine and batch that are planned with, and the options that were left out (``defaults``)."""
    from pardemo.planner.layouts import configurations
    from pardemo.planner.layouts.tuning import adapter_params

    machine, tuning = job.machine, job.tuning
    link = machine.link.words if machine.link else ""
    lora = {"rank": tuning.rank, "target": list(tuning.target), "parameters": adapter_params(tuning, job.shape)}
    return {
        "training": "lora" if job.frozen else "full", "lora": lora if job.frozen else None,
        "program": job.program.name, "release": job.program.release, "fitted_release": job.program.fitted_release,
        "precision": job.precision, "not_planned": configurations.not_planned(arguments.model),
        "hosts": machine.hosts, "host_gpus": min(machine.gpus, machine.host_gpus),
        "gpu": machine.gpu.name, "gpus": machine.gpus, "link": link, "link_bytes_per_s": machine.link_bytes_per_s,
        "link_reached_bytes_per_s": machine.between * machine.link_share,
        "samples_per_step": batch, "sequence": job.sequence,
        "defaults": [f"--{name.replace('_', '-')}" for name in ("hosts", "link", "per_step", "sequence")
                     if getattr(arguments, name) is None and not (name == "per_step" and arguments.explain)],
    }  # fmt: skip


def _search(arguments: argparse.Namespace) -> int:
    from pardemo.planner.layouts import explanations, launch
    from pardemo.planner.layouts.search import search, sensitivity

    job, corrected = _corrected(arguments)
    able = launch.runnable_by_program(job, arguments.model)
    answer = search(job, arguments.per_step or arguments.gpus, able=able)
    changed = sensitivity(answer, able)
    warning = explanations.positions_warning(answer, arguments.model)
    given = changed, assumptions_of(arguments, job, answer.batch), warning
    text, values = explanations.search_text(answer, *given, arguments.all), explanations.search_json(answer, *given)
    return _tell(arguments, answer.best[0] if answer.best else None, values, text, corrected)


def _explain(arguments: argparse.Namespace) -> int:
    from pardemo.planner.layouts import explanations, layout_text
    from pardemo.planner.layouts.search import PlannedLayout

    job, corrected = _corrected(arguments)
    planned = PlannedLayout(job, layout_text.parse_layout(arguments.explain, job, arguments.per_step))
    assumptions = assumptions_of(arguments, job, planned.layout.batch)
    text = f"{explanations.describe_job(job, assumptions)}\n{explanations.explained_text(planned)}"
    return _tell(arguments, planned, explanations.explained_json(planned) | {"assumed": assumptions}, text, corrected)


def _tell(
    arguments: argparse.Namespace, best: "PlannedLayout | None", values: dict[str, Any], text: str, corrected: str
) -> int:
    """Writes the files that are asked for, and prints an answer; ``best``: the layout that it names, if one fits."""
    file, written = snapshot_file(arguments), _write(arguments, best) if best else []
    if file and best:
        from pardemo.meters import snapshot

        snapshot.write_snapshot(file, snapshot.of_sums(best.memory.lines, f"the fullest stage, {best.memory.stage}"))
    money = money_per_billion(arguments, best.step) if best else None
    if arguments.json:
        more = {"written": written, "snapshot": arguments.snapshot if best else None, "measured": corrected or None}
        print(json.dumps(values | more | {"money_per_billion_tokens": money}, indent=1))
        return 0 if best else 1
    print(text)
    if corrected:
        print(corrected)
    if money is not None:
        print(f"at {arguments.price:g} a GPU and hour: {money:,.0f} for a billion tokens")
    if written:
        from pardemo.planner.layouts.launch.job_scripts import KUBERNETES, SLURM

        jobs = f"{SLURM} and {KUBERNETES} start {written[0]}"
        print(f"written to {arguments.write}: {', '.join(written)}; {jobs}")
    if best:
        print_snapshot(arguments)
    return 0 if best else 1


def _corrected(arguments: argparse.Namespace) -> tuple["Job", str]:
    """Returns the job, at the pace of the runs that --measured names, and lines that say so; "" without any.

    Raises:
        ValueError: as :func:`job_of`; what is to be written cannot be, which is said before anything is searched.
    """
    from pardemo.planner.layouts.published.against import correct_seconds

    job = job_of(arguments)
    if arguments.write and job.frozen:
        raise ValueError(
            "--write: layouts with LoRA are planned, not written; pardemo plan --write without --search writes files "
            "for Transformers' Trainer"
        )
    snapshot_file(arguments)
    left_out: list[str] = []
    traces = traces_of(arguments)
    lines = [f"rates of the machine: {job.machine.gpu.source}"] if traces else []
    if tables := [name for name in arguments.measured or () if name not in traces]:
        job, line = correct_seconds(job, [run for name in tables for run in _runs(Path(name), None, left_out)])
        lines.append(line)
    return job, "\n".join([*lines, *(f"left out: {line_left_out}" for line_left_out in left_out)])


def money_per_billion(arguments: argparse.Namespace, predicted: "PredictedStep") -> float | None:
    """Returns what a billion tokens cost at --price, in its currency."""
    return None if arguments.price is None else arguments.price * 1e9 / predicted.tokens_per_s / 3600


def snapshot_file(arguments: argparse.Namespace) -> Path | None:
    """Returns the file that --snapshot names, if it was asked for.

    Raises:
        ValueError: it is a folder; said before anything is planned.
    """
    if not arguments.snapshot:
        return None
    if Path(arguments.snapshot).is_dir():
        raise ValueError(f"--snapshot is a file, as plan.pickle, and {arguments.snapshot} is a folder")
    return Path(arguments.snapshot)


def print_snapshot(arguments: argparse.Namespace) -> None:
    """Prints where the planned memory is, if it was written."""
    if arguments.snapshot:
        print(f"the planned memory is in {arguments.snapshot}, for https://docs.pytorch.org/memory_viz")


def _write(arguments: argparse.Namespace, planned: "PlannedLayout") -> list[str]:
    """With --write, writes the files that run the layout; returns their names, first the one that the jobs start."""
    if not arguments.write:
        return []
    from pardemo.planner.layouts import explanations, launch

    if not planned.has_room:
        raise ValueError(f"--write: {planned.layout}: {explanations.describe_fit(planned)}")
    return launch.write_files(Path(arguments.write), planned.job, planned.layout, arguments.model)
