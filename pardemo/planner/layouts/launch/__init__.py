"""Writes the files that run a layout: each program's own configuration, and Slurm and Kubernetes jobs that start it.

>>> from pardemo.planner.layouts import launch      # doctest: +SKIP
>>> launch.write_files(Path("run"), job, layout, "llama3-70b")      # doctest: +SKIP
"""

from collections.abc import Callable
from pathlib import Path

from pardemo import project
from pardemo.planner.layouts.configurations import find_configuration
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch import facts, job_scripts, megatron, nanotron, torchtitan, zero
from pardemo.planner.layouts.launch.job_scripts import KUBERNETES, SLURM
from pardemo.planner.layouts.layout import Layout, check_layout

PROGRAMS = (megatron, torchtitan, nanotron, zero)
#: Which of them runs what was planned with a program's constants; Megatron-LM where it is none of these.
_RUNS = {"nanotron": nanotron, "torchtitan": torchtitan, "torchtitan-compiled": torchtitan, "llm-foundry": zero}


def write_files(folder: Path, job: Job, layout: Layout, model_name: str) -> list[str]:
    """Writes into ``folder`` what runs the layout and returns the files' names, the first being what the jobs start.

    Each file is written whole or not at all. A program that cannot run the layout gets none.

    Args:
        model_name: a name, a folder or a config.json, as :func:`pardemo.planner.models.find` takes it.

    Raises:
        ValueError: the layout is not the job's; no program runs it; a file of such a name is there already.
        OSError: the folder cannot be written.
    """
    files = texts(job, layout, model_name)
    taken = [name for name, text in files.items() if _differs(Path(folder) / name, text)]
    if taken:
        raise ValueError(f"--write: {folder} already has another {', '.join(taken)}; name a new folder, or remove them")
    for name, text in files.items():
        project.write_text(Path(folder) / name, text)
    return list(files)


def _differs(path: Path, text: str) -> bool:
    """Returns whether there is a file of that name with another content."""
    return path.exists() and not (path.is_file() and path.read_bytes() == text.encode("utf-8"))


def runnable_by_program(job: Job, model_name: str) -> Callable[[Layout], bool]:
    """Returns a function that says whether the program that the job is planned for can run a layout."""
    program = _RUNS.get(job.program.name, megatron)
    model = facts.model_of(find_configuration(model_name), job.shape, model_name)
    return lambda layout: program.why_not(job, layout, model) is None


def why_not_by_file(job: Job, layout: Layout, model: facts.ModelFacts) -> dict[str, str | None]:
    """Returns, by the file that starts each program, why it cannot run the layout; None if it can."""
    return {program.FILE: program.why_not(job, layout, model) for program in PROGRAMS}


def texts(job: Job, layout: Layout, model_name: str) -> dict[str, str]:
    """Returns the files by name, the one that the jobs start first.

    Raises:
        ValueError: the layout is not the job's, or no program runs it; the message says why, program by program.
    """
    machine, shape = job.machine, job.shape
    if shape.hybrid or (shape.experts and shape.experts.latent_dim):
        raise ValueError(f"--write: files are written for layers of attention and an MLP; {shape.name} has others")
    check_layout(layout, job.shape, machine.gpus, job.sequence, job.program.embedding_and_loss_as_layers)
    if machine.gpus > machine.host_gpus and machine.gpus % machine.host_gpus:
        raise ValueError(
            f"{machine.gpus} GPUs do not fill hosts of {machine.host_gpus}; launchers start as many on each"
        )
    path = Path(model_name)
    name = path.absolute().parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    model = facts.model_of(find_configuration(model_name), job.shape, name)
    why = why_not_by_file(job, layout, model)
    able = [program for program in PROGRAMS if why[program.FILE] is None]
    if not able:
        raise ValueError(f"--write: nothing runs {layout}: {'; '.join(map(str, why.values()))}")
    wanted = _RUNS.get(job.program.name, megatron)
    started = wanted if wanted in able else able[0]
    files: dict[str, str] = {}
    for program in sorted(able, key=lambda program: program is not started):
        files |= program.texts(job, layout, model)
    notes = [f"{name}: {layout}; starts {started.FILE}"]
    if others := [program.FILE for program in able if program is not started]:
        notes.append(f"the same for other programs, which this job does not start: {', '.join(others)}")
    if why[wanted.FILE]:
        notes.append(f"{wanted.FILE} is not there: {why[wanted.FILE]}")
    hosts, host_gpus = machine.hosts, min(machine.host_gpus, machine.gpus)
    commands = (started.command(job, job_scripts.torchrun(hosts, rank)) for rank in ("SLURM_NODEID", "RANK"))
    slurm, kubernetes, gpu, environment = *commands, machine.gpu.name, started.ENVIRONMENT
    files[SLURM] = job_scripts.slurm(hosts, host_gpus, name, slurm, notes, environment, whole_hosts=True)
    files[KUBERNETES] = job_scripts.kubernetes(hosts, host_gpus, gpu, name, kubernetes, notes, environment)
    return files
