"""``pardemo plan --against``, ``--search`` and ``--explain``: layouts beside published runs, the best ones, and why."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pardemo.planner.layouts.job import Job
    from pardemo.planner.layouts.layout import Layout
    from pardemo.planner.layouts.memory import Memory
    from pardemo.planner.layouts.shape import Shape
    from pardemo.planner.layouts.step import PredictedStep
    from pardemo.planner.layouts.tuning import Tuning
    from pardemo.planner.profile import GpuProfile

PROGRAM = "megatron-core"
SEQUENCE = 4096
RANK = 8  # of LoRA, where its modules alone are said


def add(plan: argparse.ArgumentParser) -> None:
    """Adds the options to those of ``pardemo plan``."""
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
    layouts.add_argument("--program", metavar="NAME", help=f"whose constants: nanotron, torchtitan, … ({PROGRAM})")
    layouts.add_argument(
        "--precision", metavar="NAME", help="with --search, --explain: of the products, fp8, mxfp8 or nvfp4 (bf16)"
    )
    layouts.add_argument(
        "--measured",
        metavar="RUNS.csv",
        help="with --search, --explain: runs on your machine, by which times are corrected",
    )
    layouts.add_argument("--picture", metavar="FILE", help="with --against: predicted against known, as PNG or SVG")


def action(question: str) -> Callable[[argparse.Namespace], int] | None:
    """The function that answers a question about layouts; None for other questions of ``questions.TAKES``."""
    return {"--search": _search, "--explain": _explain, "--against": _against}.get(question)


def _against(arguments: argparse.Namespace) -> int:
    from pardemo.planner import profile
    from pardemo.planner.layouts.published import against

    own = None
    if arguments.gpu:
        if not profile.is_file(arguments.gpu):
            raise ValueError(
                f"--against takes --gpu as a profile.json only, not {arguments.gpu!r}: its files say the GPU"
            )
        own = profile.load(Path(arguments.gpu).expanduser())
    left_out: list[str] = []
    published_runs = [run for name in arguments.against for run in _runs(Path(name), own, left_out)]
    if own and not any(run.job.machine.gpu is own.gpu for run in published_runs):
        names = sorted({run.job.machine.gpu.name for run in published_runs})
        raise ValueError(f"no run is on {own.gpu.name!r}, the name in {arguments.gpu}; they are on {', '.join(names)}")
    outcomes = against.compare(published_runs)
    if arguments.picture:
        from pardemo.planner.layouts.charts import predicted_and_known

        predicted_and_known(outcomes).savefig(arguments.picture, bbox_inches="tight")
    if arguments.json:
        print(
            json.dumps(
                {
                    "runs": [against.row(outcome) for outcome in outcomes],
                    "summary": against.summary(outcomes),
                    "cannot be read": left_out,
                },
                indent=1,
            )
        )
    else:
        print(against.as_text(outcomes))
        for line in left_out:
            print(f"left out: {line}")
    return 0


def _runs(path: Path, own: "GpuProfile | None", left_out: list[str]) -> list:
    from pardemo.planner.layouts.published import published

    if not path.is_file():
        raise ValueError(f"no file {path}; a CSV with a run in each row (docs/plan.md lists its columns)")
    return published.load(path, own, left_out)


def job_of(arguments: argparse.Namespace) -> "Job":
    """The job that the options describe.

    Raises:
        ValueError: an option is missing or impossible.
    """
    from pardemo.planner import hardware, profile
    from pardemo.planner.layouts import configurations
    from pardemo.planner.layouts.configurations import of
    from pardemo.planner.layouts.job import Job
    from pardemo.planner.layouts.machines import machine
    from pardemo.planner.layouts.stacks import stack

    if not arguments.model:
        raise ValueError("--search and --explain need --model: a name, a folder or a config.json")
    if arguments.gpus is None:
        raise ValueError("--search and --explain need --gpus: how many in all")
    config = configurations.find(arguments.model)
    shape = replace(of(config), name=Path(arguments.model).name)
    gpu_profile = profile.find(arguments.gpu, arguments.gpus)
    board = gpu_profile.host_gpus or hardware.host_gpus(gpu_profile.gpu, arguments.gpus)
    each = arguments.gpus // arguments.hosts if arguments.hosts else min(arguments.gpus, board)
    if arguments.hosts and arguments.gpus % arguments.hosts:
        raise ValueError(f"{arguments.gpus} GPUs do not divide over {arguments.hosts} hosts")
    between = None
    if arguments.link or not gpu_profile.between:
        between = hardware.link(arguments.link) if arguments.link else hardware.usual_link(gpu_profile.gpu, each)[1]
    cluster = machine(gpu_profile, arguments.gpus, each, between)
    most = shape.positions or arguments.sequence or SEQUENCE
    if arguments.sequence and arguments.sequence > most:
        raise ValueError(f"--sequence must be at most {most:,}: {shape.name} has learned no further positions")
    return Job(
        shape, cluster, stack(arguments.program or PROGRAM), arguments.sequence or min(SEQUENCE, most),
        precision=hardware.precision(arguments.precision or "bf16"),
        tuning=tuning(arguments.target, arguments.rank, config, shape),
    )  # fmt: skip


def tuning(target: str | None, rank: int | None, config: Any, shape: "Shape") -> "Tuning":
    """What --target and --rank mean: all parameters where neither is said, else LoRA, without dropout.

    Raises:
        ValueError: the model has no such modules, or none are usual for its kind.
    """
    from pardemo.planner.layouts.tuning import Tuning, adapted, usual_target

    if not target and rank is None:
        return Tuning()
    modules = tuple(target.split(",")) if target else usual_target(config.model_type)
    if not modules:
        raise ValueError(f"{shape.name or 'the model'}: name LoRA's modules (--target q_proj,v_proj or all-linear)")
    chosen = Tuning(rank or RANK, modules, dropout=0.0)
    adapted(chosen, shape)  # refuses modules that the model does not have
    return chosen


def assumed(arguments: argparse.Namespace, job: "Job", batch: int) -> dict[str, Any]:
    """The machine and the batch that are planned with, and which of the options were left out (``defaults``)."""
    from pardemo.planner import hardware, profile
    from pardemo.planner.layouts import configurations
    from pardemo.planner.layouts.machines import LINK_SHARE

    machine = job.machine
    if arguments.link or profile.find(arguments.gpu, arguments.gpus).between is None:
        usual, usual_rate = hardware.usual_link(machine.gpu, min(machine.gpus, machine.host_gpus))
        rate = hardware.link(arguments.link) if arguments.link else usual_rate
        link = f"--link {arguments.link}" if arguments.link else f"{usual}, the default of --link"
        reached = rate * LINK_SHARE
    else:
        rate = reached = machine.between
        link = f"measured, {Path(arguments.gpu).name}"
    return {
        "training": "lora" if job.frozen else "full", "lora": _lora(job), "precision": job.precision,
        "not_planned": configurations.not_planned(arguments.model),
        "hosts": machine.hosts, "host_gpus": min(machine.gpus, machine.host_gpus),
        "gpu": machine.gpu.name, "gpus": machine.gpus, "link": link, "link_bytes_per_s": rate,
        "link_reached_bytes_per_s": reached, "samples_per_step": batch, "sequence": job.sequence,
        "defaults": [f"--{name.replace('_', '-')}" for name in ("hosts", "link", "per_step", "sequence")
                     if getattr(arguments, name) is None and not (name == "per_step" and arguments.explain)],
    }  # fmt: skip


def _lora(job: "Job") -> dict[str, Any] | None:
    """LoRA's rank, modules and parameters, for JSON."""
    from pardemo.planner.layouts.tuning import adapter_params

    tuning = job.tuning
    if not tuning.lora:
        return None
    return {"rank": tuning.rank, "target": list(tuning.target), "parameters": adapter_params(tuning, job.shape)}


def _search(arguments: argparse.Namespace) -> int:
    from pardemo.planner.layouts import answers, launch
    from pardemo.planner.layouts.search import search, sensitivity

    job, told = _corrected(arguments, _writable(arguments, job_of(arguments)))
    able = launch.able(job, arguments.model)
    answer = search(job, arguments.per_step or arguments.gpus, able=able)
    changed = sensitivity(answer, able)
    assumptions = assumed(arguments, job, answer.batch)
    warning = answers.positions(answer, arguments.model)
    file = snapshot_file(arguments)
    written = _write(arguments, job, answer.best[0].layout) if answer.best else []
    if file and answer.best:
        _write_snapshot(file, answer.best[0].memory)
    if arguments.json:
        more = {"written": written, "snapshot": arguments.snapshot if answer.best else None, "measured": told or None}
        money = {"money_per_billion_tokens": money_per_billion(arguments, answer.best[0].step) if answer.best else None}
        print(json.dumps(answers.search_json(answer, changed, assumptions, warning) | more | money, indent=1))
    else:
        print(answers.search_text(answer, changed, assumptions, warning, whole_front=arguments.all))
        _print_more(arguments, told, answer.best[0].step if answer.best else None)
        _print_written(arguments, written)
        if answer.best:
            print_snapshot(arguments)
    return 0 if answer.best else 1


def _explain(arguments: argparse.Namespace) -> int:
    from pardemo.planner.layouts import answers
    from pardemo.planner.layouts.memory import memory
    from pardemo.planner.layouts.step import step

    job, told = _corrected(arguments, _writable(arguments, job_of(arguments)))
    layout = answers.parse(arguments.explain, job, arguments.per_step)
    assumptions = assumed(arguments, job, layout.batch)
    file = snapshot_file(arguments)
    written = _write(arguments, job, layout)
    if file:
        _write_snapshot(file, memory(job, layout))
    if arguments.json:
        more = {"assumed": assumptions, "written": written, "snapshot": arguments.snapshot, "measured": told or None}
        money = {"money_per_billion_tokens": money_per_billion(arguments, step(job, layout))}
        print(json.dumps(answers.explained_json(job, layout) | more | money, indent=1))
    else:
        print(answers.planned(job, assumptions), answers.explained_text(job, layout), sep="\n")
        _print_more(arguments, told, step(job, layout))
        _print_written(arguments, written)
        print_snapshot(arguments)
    return 0


def _writable(arguments: argparse.Namespace, job: "Job") -> "Job":
    """The job, unless --write is asked for and there are no files for it; said before anything is searched."""
    if arguments.write and job.frozen:
        raise ValueError(
            "--write: layouts with LoRA are planned, not written; pardemo plan --write without --search writes files "
            "for Transformers' Trainer"
        )
    return job


def _corrected(arguments: argparse.Namespace, job: "Job") -> tuple["Job", str]:
    """The job at the pace of the runs that --measured names, and a line that says so; as it is without them."""
    if not arguments.measured:
        return job, ""
    from pardemo.planner.layouts.search import correct_pace

    left_out: list[str] = []
    corrected, told = correct_pace(job, _runs(Path(arguments.measured), None, left_out))
    return corrected, "\n".join([told, *(f"left out: {line}" for line in left_out)])


def money_per_billion(arguments: argparse.Namespace, predicted: "PredictedStep") -> float | None:
    """What a billion tokens cost at --price, in its currency."""
    return None if arguments.price is None else arguments.price * 1e9 / predicted.tokens_per_s / 3600


def _print_more(arguments: argparse.Namespace, told: str, predicted: "PredictedStep | None") -> None:
    if told:
        print(told)
    if predicted is not None and (money := money_per_billion(arguments, predicted)) is not None:
        print(f"at {arguments.price:g} a GPU and hour: {money:,.0f} for a billion tokens")


def snapshot_file(arguments: argparse.Namespace) -> Path | None:
    """Where --snapshot writes, if it was asked for.

    Raises:
        ValueError: it is a folder; said before anything is planned.
    """
    if not arguments.snapshot:
        return None
    if Path(arguments.snapshot).is_dir():
        raise ValueError(f"--snapshot is a file, as plan.pickle, and {arguments.snapshot} is a folder")
    return Path(arguments.snapshot)


def print_snapshot(arguments: argparse.Namespace) -> None:
    """Says where the planned memory is, if it was written."""
    if arguments.snapshot:
        print(f"the planned memory is in {arguments.snapshot}, for https://docs.pytorch.org/memory_viz")


def _write_snapshot(file: Path, planned: "Memory") -> None:
    """A layout's memory, of which only the sums by kind are known."""
    from pardemo.meters import snapshot

    snapshot.write(file, snapshot.of_sums(planned.lines, f"the fullest stage, {planned.stage}"))


def _write(arguments: argparse.Namespace, job: "Job", layout: "Layout") -> list[str]:
    """With --write, writes the files that run the layout; returns their names, first the one that the jobs start."""
    if not arguments.write:
        return []
    from pardemo.planner.layouts import answers, launch
    from pardemo.planner.layouts.memory import memory
    from pardemo.planner.layouts.published.against import room

    if (footprint := memory(job, layout)).peak_bytes > room(job):
        raise ValueError(f"--write: {layout}: {answers.fitting(job, footprint)}")
    return launch.write(Path(arguments.write), job, layout, arguments.model)


def _print_written(arguments: argparse.Namespace, written: list[str]) -> None:
    if written:
        from pardemo.planner.layouts.launch import cluster

        jobs = f"{cluster.SLURM} and {cluster.KUBERNETES} start {written[0]}"
        print(f"written to {arguments.write}: {', '.join(written)}; {jobs}")
