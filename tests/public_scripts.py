"""``python tests/public_scripts.py FOLDER``: training scripts of others, unchanged, under ``pardemo measure``.

FOLDER has clones of the repositories of :data:`SCRIPTS` (a clone that is not there is left out). None of their code is
in this repository. With ``--write`` the table of docs/measure.md is made anew. It takes minutes and other people's
code, so ``make test`` leaves it out.
"""

import argparse
import pickle
import random
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy

from pardemo import measure
from pardemo.tables import amount

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "measure.md"
PLACE = re.compile(r"(<!-- public scripts -->\n).*?(<!-- /public scripts -->)", re.DOTALL)


@dataclass(frozen=True)
class Script:
    """A repository's folder, a script in it, its arguments, the number of ranks, and what had to be set for it."""

    clone: str
    path: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    set_for_it: str = "nothing"


SMALL = tuple(
    f"--{name}" for name in (
        "dataset=pardemo", "n_layer=2", "n_head=2", "n_embd=128", "block_size=64", "batch_size=4",
        "gradient_accumulation_steps=4", "compile=False", "eval_iters=1", "eval_interval=100", "max_iters=20",
    )
)  # fmt: skip
SCRIPTS = (
    Script("nanoGPT", "train.py", SMALL, 2, "sizes by its own options, `compile=False`, 100,000 random characters"),
    Script("examples", "distributed/FSDP2/example.py"),
    Script("examples", "distributed/tensor_parallelism/tensor_parallel_example.py", ranks=4),
    Script("examples", "distributed/tensor_parallelism/sequence_parallel_example.py", ranks=4),
    Script("examples", "distributed/tensor_parallelism/fsdp_tp_example.py", ranks=4),
    Script("examples", "distributed/ddp-tutorial-series/multigpu_torchrun.py", ("1", "1"), 2, "one epoch"),
)
NAMES = {"nanoGPT": "karpathy/nanoGPT", "examples": "pytorch/examples"}


def main() -> int:
    """Returns 1 where a script could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="make the table of docs/measure.md anew")
    asked = parser.parse_args()
    lines, failed = (
        [
            "| script | what runs | a rank sends | the kernel | peak | findings | set for it |",
            "|---|---|--:|--:|--:|---|---|",
        ],
        0,
    )
    for script in SCRIPTS:
        clone = asked.folder / script.clone
        if not clone.is_dir():
            continue
        if script.clone == "nanoGPT":
            _characters(clone / "data" / "pardemo")
        where = (clone / script.path).parent
        name = f"{NAMES[script.clone]}@{_commit(clone)}: {script.path}, {script.ranks} ranks"
        try:
            found = measure.script(Path(script.path).name, script.arguments, ranks=script.ranks, folder=where)
        except measure.ScriptError as error:
            failed = 1
            lines.append(f"| {name} | *not measured* | | | | {error} | {script.set_for_it} |")
            continue
        kinds = ", ".join(dict.fromkeys(one.kind for one in found.parallelism)) or "nothing recognised"
        told = "; ".join(one.what.partition(":")[0] for one in found.findings) or "none"
        figures = (found.sent_bytes[0], found.wire_bytes[0], found.memory["peak_bytes"])
        lines.append(f"| {name} | {kinds} | {' | '.join(map(amount, figures))} | {told} | {script.set_for_it} |")
    table = "\n".join(lines) + "\n"
    print(table)
    if asked.write:
        PAGE.write_text(PLACE.sub(lambda m: m[1] + table + m[2], PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return failed


def _commit(clone: Path) -> str:
    done = subprocess.run(
        ["git", "-C", clone, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _characters(folder: Path) -> None:
    """A data set in nanoGPT's form: random characters of an alphabet of 320."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for name in ("train", "val"):
        numpy.array([draw.randrange(320) for _ in range(100_000)], dtype=numpy.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 320}))


if __name__ == "__main__":
    raise SystemExit(main())
