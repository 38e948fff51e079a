"""``python tests/public_scripts.py FOLDER``: training scripts of others, unchanged, under ``pardemo measure``.

FOLDER gets clones of the repositories, each at the commit of :data:`REPOSITORIES`, packages that a script needs and
that are not installed, and made-up data (``public_data.py``). None of the scripts' code is in this repository. With
``--write`` the table of docs/records/published-scripts.md and the screen of docs/measure.md are made anew. It takes
minutes and other people's code, so ``make test`` leaves it out.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import public_data

from pardemo import project
from pardemo.tables import amount

PAGES = (project.root() / "docs" / "records" / "published-scripts.md", project.root() / "docs" / "measure.md")
PLACE = re.compile(r"(<!-- (public scripts|screen) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
#: The script whose screen is shown, and the screen's lines that are left out.
SHOWN, NOTES = "nanoGPT", re.compile(r"^WHAT RAN IN ANOTHER WAY\n(?:  .*\n)*\n", re.M)
HEAD = (
    "| script | ranks | what runs | a rank sends | the kernel | peak | findings | set for it |",
    "|---|--:|---|--:|--:|--:|---|---|",
)
#: Each clone's repository and commit.
REPOSITORIES = {
    "nanoGPT": ("karpathy/nanoGPT", "3adf61e"),
    "examples": ("pytorch/examples", "77f55b9"),
    "picotron": ("huggingface/picotron", "59714b1"),
    "accelerate": ("huggingface/accelerate", "16cb6eb8"),
    "DeepSpeedExamples": ("deepspeedai/DeepSpeedExamples", "45b4b715"),
    "torchtitan": ("pytorch/torchtitan", "842d354f9"),
}
HUB = ("datasets==4.4.2", "fsspec==2025.10.0", "huggingface_hub==0.36.2", "tokenizers==0.22.2")
#: What a clone needs that is not installed, or is installed too new for it.
PACKAGES = {
    "picotron": (
        "transformers==4.57.6", *HUB, "wandb==0.19.11", "docker_pycreds", "gitdb", "gitpython",
        "protobuf==6.33.6", "sentry_sdk",
        "setproctitle", "smmap",
    ),
    "torchtitan": (
        *HUB, "docstring_parser", "grain==0.2.18", "portpicker", "etils", "array_record", "cloudpickle", "absl-py",
        "importlib_resources", "more-itertools", "zipp", "shtab", "spmd_types==0.2.3", "torchdata==0.11.0", "typeguard",
        "tyro", "triton",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Script:
    """A clone, a script in it or a module of it, its arguments, the number of ranks, and what had to be set for it.

    ``data`` writes what the script loads, given the folder that it runs in and the clone; ``within``: it runs in the
    script's own folder, not in one for its data.
    """

    clone: str
    path: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    set_for_it: str = "nothing"
    data: Callable[[Path, Path], None] | None = None
    within: bool = True
    module: bool = False


def of_options(**values: object) -> tuple[str, ...]:
    """``--name value`` for each."""
    return tuple(part for name, value in values.items() for part in (f"--{name}", str(value)))


GPT = (
    "dataset=pardemo", "n_layer=2", "n_head=2", "n_embd=128", "block_size=64", "batch_size=4", "eval_iters=1",
    "gradient_accumulation_steps=4", "compile=False", "eval_interval=100", "max_iters=20",
)  # fmt: skip

SCRIPTS = (
    Script("nanoGPT", "train.py", tuple(f"--{option}" for option in GPT), 2,
           "sizes by its own options, `compile=False`, random characters", public_data.nanogpt),
    Script("examples", "distributed/FSDP2/example.py"),
    Script("examples", "distributed/tensor_parallelism/tensor_parallel_example.py", ranks=4),
    Script("examples", "distributed/tensor_parallelism/sequence_parallel_example.py", ranks=4),
    Script("examples", "distributed/tensor_parallelism/fsdp_tp_example.py", ranks=4),
    Script("examples", "distributed/ddp-tutorial-series/multigpu_torchrun.py", ("1", "1"), 2, "one epoch"),
    Script("picotron", "train.py", ("--config", "config.json"), 8,
           "its configuration: TP 2 × PP 2 × DP 2, `FLASH_ATTEN=0`; a small Llama's folder, weights and text; an empty "
           "flash_attn; transformers 4", public_data.picotron, within=False),
    Script("accelerate", "examples/nlp_example.py", (), 2,
           "a small BERT, sentences and a metric in folders of the hub's names", public_data.accelerate, within=False),
    Script("accelerate", "examples/by_feature/gradient_accumulation.py",
           of_options(gradient_accumulation_steps=4, mixed_precision="bf16"), 2, "the same; four micro-batches, bf16",
           public_data.accelerate, within=False),
    Script("DeepSpeedExamples", "training/bf16_master_weight/train.py",
           of_options(deepspeed_config="configs/baseline.json", hidden_dim=128, num_layers=2, num_heads=4,
                      vocab_size=512, seq_length=64), 2, "sizes by its own options"),
    Script("DeepSpeedExamples", "training/tensor_parallel/basic_example/autotp_example.py",
           of_options(model_name="tiny-llama", tp_size=2, dp_size=2, seq_length=64), 4,
           "sizes by its own options; a small Llama's folder", public_data.deepspeed, within=False),
    Script("torchtitan", "torchtitan.train",
           ("--module", "llama3", "--config", "llama3_debugmodel", "--training.local_batch_size", "2",
            "--training.seq_len", "128"), 2, "its debug model, a shorter sequence; a text in its test's folder",
           public_data.torchtitan, within=False, module=True),
)  # fmt: skip


def main() -> int:
    """Returns 1 where a script could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write it into the pages")
    parser.add_argument("--only", default="", help="scripts whose name has this")
    asked = parser.parse_args()
    if asked.write and asked.only:
        parser.error("--write needs all of them")
    folder, rows, screen, failed = asked.folder.resolve(), list(HEAD), "", 0
    for script in SCRIPTS:
        name = f"{script.clone}: {script.path}"
        if asked.only not in name:
            continue
        repository, commit = REPOSITORIES[script.clone]
        _cloned(folder, script.clone)
        done, found = _measured(folder, script)
        name = f"{repository}@{commit[:7]}: {script.path}"
        if found is None:
            told = [line for line in done.stderr.splitlines() if line.startswith("pardemo measure:")]
            failed, why = 1, told[-1] if told else "it did not start"
            rows.append(f"| {name} | {script.ranks} | *not measured* | | | | {why} | {script.set_for_it} |")
        else:
            rows.append(f"| {name} | {script.ranks} | {_columns(found)} | {script.set_for_it} |")
            if script.clone == SHOWN:
                screen = f"```text\n{NOTES.sub('', done.stdout).strip()}\n```\n"
        print(rows[-1], flush=True)
    if asked.write:
        made = {"public scripts": "\n".join(rows) + "\n", "screen": screen}
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            page.write_text(PLACE.sub(lambda m: m[1] + made[m[2]] + m[3], text), encoding="utf-8")
    return failed


def _columns(found: dict[str, Any]) -> str:
    kinds = ", ".join(dict.fromkeys(one["kind"] for one in found["parallelism"])) or "nothing recognised"
    told = "; ".join(dict.fromkeys(one["what"].partition(":")[0] for one in found["findings"])) or "none"
    figures = found["sent_bytes"][0], found["wire_bytes"][0], found["memory"]["peak_bytes"]
    return f"{kinds} | {' | '.join(map(amount, figures))} | {told}"


def _measured(folder: Path, script: Script) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    """One run of the command: what it printed, and what it wrote as JSON; None where it could not measure."""
    clone = folder / script.clone
    where = (clone / script.path).parent if script.within else folder / "work" / script.clone
    where.mkdir(parents=True, exist_ok=True)
    if script.data is not None:
        script.data(where, clone)
    path = script.path if script.module else os.path.relpath(clone / script.path, where)
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "pardemo", "measure", "--ranks", str(script.ranks), "--out", out]
        command += ["-m", path] if script.module else ["--", path]
        done = subprocess.run(
            [*command, *script.arguments], cwd=where, env=_environment(folder, script), text=True, capture_output=True
        )
        if done.returncode:
            sys.stderr.write(done.stderr)
            return done, None
        return done, json.loads(Path(out, "summary.json").read_text(encoding="utf-8"))


def _environment(folder: Path, script: Script) -> dict[str, str]:
    """The hub is not asked; packages of :data:`PACKAGES` lie as a user's own do, so that they count as libraries."""
    base = folder / "packages" / script.clone
    home = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(base)}))
    if script.clone in PACKAGES and not home.is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(home)]
        subprocess.run([*install, *PACKAGES[script.clone]], check=True)
    paths = [home, folder / "work" / script.clone / "stand-ins", *([folder / script.clone] if script.module else [])]
    of_script = {"PYTHONPATH": os.pathsep.join(map(str, [*paths, project.root()])), "PYTHONUSERBASE": str(base)}
    return os.environ | of_script | {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}


def _cloned(folder: Path, clone: str) -> None:
    """A clone at its commit, where it is not there yet."""
    repository, commit = REPOSITORIES[clone]
    if not (folder / clone).is_dir():
        url = f"https://github.com/{repository}"
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", url, str(folder / clone)], check=True)
        subprocess.run(["git", "-C", folder / clone, "checkout", "--quiet", commit], check=True)
    head = ["git", "-C", folder / clone, "rev-parse", "HEAD"]
    if not subprocess.run(head, capture_output=True, text=True, check=True).stdout.startswith(commit):
        raise SystemExit(f"{folder / clone} is not at {commit}, of which the page tells")


if __name__ == "__main__":
    raise SystemExit(main())
