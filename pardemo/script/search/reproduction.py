"""Writes what reproduces a finding without this package, for torchrun and gloo alone, and runs it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from string import Template

from pardemo.peers import launchers
from pardemo.script.compare import runs
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.search.evidence import Evidence
from pardemo.termination import end_with_parent

#: Seconds after which a rank of a reproduction ends by itself, on a busy machine, too; its launcher gets some more.
TIMEOUT_S, LAUNCHER_S = 180, 30
#: Relative differences that a reproduction says of: above the rounding of fp32, and of fp64.
FP32, FP64 = 1e-3, 1e-6
SCRIPT, TEST = "repro.py", "test_repro.py"
#: What is compared, in words.
LABELS = {"gradient": "gradients", "before": "values before the first step", "after": "changes in the step"}
_LINE = re.compile(r"^rank \d+: .+: (the same|DIFFERENT)$", re.MULTILINE)
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w+(?:\.\w+)*(?:Error|Exception|Failed): .+)$", re.MULTILINE)
_GRADIENT = "p.grad if p.grad is not None else getattr(p, 'main_grad', {missing})"
_STEP = """def before_step(*_):
    steps[0] += 1
    if steps[0] == STEP:
        finish(noted[-1] if noted else held())
"""
_CHANGE = """def before_step(*_):
    noted.append(held())


def after_step(*_):
    if len(noted) == STEP:
        finish(None if noted[-1] is None else held() - noted[-1])
"""
_CLIPS = """
clip = torch.nn.utils.clip_grad_norm_  # gradients are compared before it
torch.nn.utils.clip_grad_norm_ = lambda *a, **k: (steps[0] + 1 == STEP and noted.append(held()), clip(*a, **k))[1]
"""
_ENGINE = """
from deepspeed import DeepSpeedEngine as Engine, utils  # noqa: E402, I001
last, engine_step = Engine.is_gradient_accumulation_boundary, Engine.step
Engine.step = lambda engine: (last(engine) and finish(held()), engine_step(engine))[1]
"""
_TEST = '''"""Fails while the bug that issue.md describes is there: pytest {name}."""

import subprocess
import sys
from pathlib import Path

REPRODUCTION = Path(__file__).with_name("{script}")


def printed(ranks, which):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={{ranks}}"]
    run = subprocess.run(
        [*line, str(REPRODUCTION), which], cwd={folder!r}, capture_output=True, text=True, timeout={timeout}
    )
    return [line for line in run.stdout.splitlines() if line.startswith("rank ")], run.stderr[-2000:]


def test_trains_alike():
    printed({ranks[0]}, "reference")
    lines, errors = printed({ranks[1]}, "layout")
    assert lines, errors
    assert not [line for line in lines if "DIFFERENT" in line]
'''


@dataclass(frozen=True)
class Reproduction:
    """The files that show a finding by themselves. ``shown``: whether they did; else ``reason`` says why not.

    ``folder``: where they are; None where there is nothing to write. ``output``: what the script printed.
    """

    folder: Path | None
    shown: bool
    output: str = ""
    reason: str = ""


def reproduce(
    evidence: Evidence | None, layout: RunLayout, reference: RunLayout, folder: Path, *, title: str, versions: str,
    missing: bool, double: bool, copied: bool,
) -> Reproduction:  # fmt: skip
    """Writes a script and a test into a folder and runs them: the reference first, then the layout.

    Args:
        evidence: the parameter that is compared. title: the script's first line. versions: of the libraries.
        missing: whether a parameter without a gradient counts as one of zeros.
        double: whether the finding is one of fp64: then it is tried in fp64, too, by torch's default type.
        copied: whether the training script is copied into the folder, with the modules beside it that it imports.
    """
    if evidence is None:
        return Reproduction(None, False, reason="no parameter's values or gradients show it")
    folder.mkdir(parents=True, exist_ok=True)
    launches = [runs.launch_of(wanted)[0] for wanted in (reference, layout)]
    if copied:
        for file in script_files(Path(launches[0].script)):
            shutil.copy(file, folder)
        launches = [replace(launch, script=str(folder.resolve() / Path(launch.script).name)) for launch in launches]
    ranks = reference.ranks, layout.ranks
    test = _TEST.format(name=TEST, script=SCRIPT, folder=os.getcwd(), timeout=TIMEOUT_S + LAUNCHER_S, ranks=ranks)
    (folder / TEST).write_text(test, "utf-8")
    made = Reproduction(folder, False)
    for in_double in [False, True] if double else [False]:
        text = reproduction_text(
            evidence, launches, ranks, folder, title=title, versions=versions, missing=missing, double=in_double
        )
        (folder / SCRIPT).write_text(text, "utf-8")
        output, failure = printed(folder / SCRIPT, ranks)
        if "DIFFERENT" in output:
            return Reproduction(folder, True, output)
        if not made.output:
            made = replace(made, output=output, reason=failure or "run by itself, the parameter is the same in both")
    return made


def printed(script: Path, ranks: tuple[int, int], environment: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Runs a reproduction's reference and its layout; returns the lines of its ranks, or the first error."""
    script.with_name("reference.pt").unlink(missing_ok=True)  # of an earlier run, perhaps with another release
    both = [_torchrun([str(script), which], count, environment or {})
            for count, which in zip(ranks, ("reference", "layout"), strict=True)]  # fmt: skip
    if lines := "\n".join(match[0] for match in _LINE.finditer(both[1][0])):
        return lines, ""
    raised = [match[1] for _, errors in both for match in _ERROR.finditer(errors) if "ChildFailed" not in match[1]]
    return "", f"run by itself, {f'it raises {raised[0]}' if raised else 'no rank has a tensor of it'}"


def _torchrun(words: Sequence[str], ranks: int, environment: Mapping[str, str]) -> tuple[str, str]:
    """Runs a script under torchrun with a time limit; returns what it printed, and its errors. No process is left."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    paths = os.pathsep.join(entry for entry in sys.path if entry)  # it is to find what this process finds
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            line, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )  # fmt: skip
        try:
            process.wait(TIMEOUT_S + LAUNCHER_S)
        except subprocess.TimeoutExpired:
            err.write(f"TimeoutError: it was not over after {TIMEOUT_S + LAUNCHER_S} s")
        finally:
            launchers.end(process)
        for file in (out, err):
            file.seek(0)
        return out.read(), err.read()


def reproduction_text(
    evidence: Evidence, launches: Sequence[Launch], ranks: Sequence[int], folder: Path, *, title: str, versions: str,
    missing: bool, double: bool,
) -> str:  # fmt: skip
    """Writes the script: of the reference and of the layout one launch each, and their numbers of ranks."""
    launch = launches[0]
    deepspeed = any(other.sets == "deepspeed" for other in launches) or "deepspeed" in versions
    value = _GRADIENT.format(missing="torch.zeros_like(p)" if missing else None)
    if deepspeed:
        value = "utils.safe_get_full_grad(p)"
    hooks = _CHANGE if evidence.tensor == "after" else _STEP
    if evidence.tensor == "gradient":
        hooks += _ENGINE if deepspeed else ""
        hooks += _CLIPS if evidence.clips and not deepspeed else ""
    commands = [f"torchrun --standalone --nproc-per-node {count} {SCRIPT} {which}"
                for count, which in zip(ranks, ("reference", "layout"), strict=True)]  # fmt: skip
    lines = [[other.script if other.module else os.path.relpath(other.script, folder), *other.arguments]
             for other in launches]  # fmt: skip
    template = Template((resources.files(__package__) / "reproduction.txt").read_text("utf-8"))
    return template.substitute(
        title=title, commands="\n".join(commands), versions=versions, tensor=LABELS[evidence.tensor],
        reference=repr(lines[0]), layout=repr(lines[1]), name=repr(evidence.parameter), step=evidence.step,
        tolerance=FP64 if double else FP32, parts=_parts_text(evidence), hooks=hooks.rstrip(), timeout=TIMEOUT_S,
        value=f"None if p is None else {value}" if evidence.tensor == "gradient" else "p",
        run=_run_text(launch, evidence, double),
    )  # fmt: skip


def _run_text(launch: Launch, evidence: Evidence, double: bool) -> str:
    """Writes the lines that start the script as torchrun would, with gloo."""
    lines = ["start, (script, *arguments) = dist.init_process_group, RUNS[which]"]
    lines += ['dist.init_process_group = lambda *_, **__: start("gloo")']
    lines += ["register_optimizer_step_pre_hook(before_step)"]
    lines += ["register_optimizer_step_post_hook(after_step)"] * (evidence.tensor == "after")
    lines += ["torch.set_default_dtype(torch.float64)"] * double
    variables = {"TORCHDYNAMO_DISABLE": "1", **launch.environment}  # nothing is compiled, as under prove
    lines += [f"os.environ.update({variables!r})"]
    lines += [f"arguments.insert(0, {launch.local_rank!r} + os.environ['LOCAL_RANK'])"] if launch.local_rank else []
    if launch.module:
        lines += ["sys.argv[1:] = arguments", "runpy.run_module(script, run_name='__main__', alter_sys=True)"]
    else:
        lines += [
            "sys.argv, sys.path[0] = [(script := os.path.join(HERE, script)), *arguments], os.path.dirname(script)"
        ]
        lines += ['runpy.run_path(script, run_name="__main__")']
    return "\n".join(lines)


def _parts_text(evidence: Evidence) -> str:
    """Writes the parts of ranks that have another name for the parameter, or a part of it."""
    return "{" + ", ".join(
        f"{rank}: ({part.name!r}, {''.join(f'{_places_text(places)}, ' for places in part.places)})"
        for rank, part in evidence.parts.items()
        if part.name != evidence.parameter or any(places is not None for places in part.places)
    ) + "}"  # fmt: skip


def _places_text(places: Sequence[int] | None) -> str:
    """Writes places as a range where they are one, as ranges in a list where they are few, else as they are."""
    if places is None:
        return "None"
    begins = [at for at, place in enumerate(places) if not at or place != places[at - 1] + 1]
    ends = [*begins[1:], len(places)]
    ranges = [f"*range({places[at]}, {places[end - 1] + 1})" for at, end in zip(begins, ends, strict=True)]
    return f"[{', '.join(ranges if 2 * len(ranges) < len(places) else map(str, places))}]"


def script_files(script: Path) -> list[Path]:
    """Returns a script and the modules beside it that it imports, and these import, by their text."""
    files = [script]
    for file in files:
        try:
            tree = ast.parse(file.read_text("utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        nodes = list(ast.walk(tree))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        beside = [script.with_name(f"{name}.py") for name in sorted(names)]
        files += [path for path in beside if path.is_file() and path not in files]
    return files
