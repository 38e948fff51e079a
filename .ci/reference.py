"""``python .ci/reference.py``: the run to commit, which replaces the old one when it is whole.

It is built beside that one: executed notebooks, their pages, pictures and claims, the speed table, the planner's
validation, the report, and the figures that README and documents quote. The pages, half of its bytes, are not
committed: `pardemo report outputs/reference` makes them of the rest. The speed table is that of all runs so far, to
which `pardemo bench --add` adds this one. A build that stops on the way, killed or by a
notebook that fails, leaves the old reference as it was. A missed target of the speed table is a result: it goes in, and
the command says so at its end. ``--notebooks`` makes the notebooks anew, and keeps the speed table and the validation.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import world_sizes

from pardemo import project
from pardemo.book.run.report import command as report_command

#: What other commands write there, which a run does not make anew: the chapter baichuan2_plan's cuda_peak on a GPU,
#: world_sizes, and of `pardemo prove` tests/zoo/run.py, tests/releases/run.py, tests/zoo/right/run.py and
#: tests/found/run.py; of `pardemo soak` tests/soak/command.py.
KEPT = (
    "plan_cuda.json", world_sizes.TABLE.name, "zoo.json", "releases.json", "right_layouts.json", "searched.json",
    "soak.json",
)  # fmt: skip
RUNS, TABLE = "bench_runs.json", "bench.json"  # the speed table, which `pardemo bench --add` makes
VALIDATED = "plan_validate.json"
#: What every run makes itself: adapters for *Baichuan2: before and after*, the scripts whose text is in a notebook.
NOT_KEPT = ("finetune", "trace", "script_measured", "is_it_right", "host_fails")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 where a target is missed, or where nothing was replaced."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    outputs = project.root() / "outputs"
    parser.add_argument("--out", type=Path, default=outputs / "reference", metavar="DIR", help="(outputs/reference)")
    documents = [project.root() / "README.md", project.root() / "docs" / "records" / "measured.md"]
    written = "(README, docs/records/measured.md)"
    parser.add_argument("--readme", type=Path, nargs="+", default=documents, metavar="FILE", help=written)
    parser.add_argument("--notebooks", action="store_true", help="keep the speed table and the planner's validation")
    parser.add_argument("--resume", action="store_true", help="go on with what a build that stopped has left")
    arguments = parser.parse_args(argv)
    try:
        bench = build(
            arguments.out, *arguments.readme, notebooks=arguments.notebooks, resume=arguments.resume
        )  # fmt: skip
    except (RuntimeError, OSError, ValueError) as error:
        print(f"reference: {error}; {os.path.relpath(arguments.out)} is as it was", file=sys.stderr)
        return 1
    missed = [row for row in bench if row["met"] is False]
    for row in missed:
        print(f"missed target: {row['name']}: {row['ratio']:.2f} of {row['target']:g}", file=sys.stderr)
    print(f"reference: {os.path.relpath(arguments.out)}, {len(missed)} of {len(bench)} targets missed")
    return 1 if missed else 0


def build(target: Path, *documents: Path, notebooks: bool = False, resume: bool = False) -> list[dict[str, Any]]:
    """Makes the reference run, puts it in the place of ``target`` and returns the rows of its speed table.

    ``notebooks``: only these are made anew. ``resume``: of an earlier build that stopped, those that ran stay.

    Raises:
        RuntimeError: a step failed; what there is of the new run stays beside ``target``, to be looked at.
    """
    fresh = target.with_name(f"{target.name}.new")
    if fresh.exists() and not resume:
        shutil.rmtree(fresh)
    _do(fresh, "run", *(["--resume"] if resume else []), "--out", str(fresh))
    if notebooks:
        for name in (RUNS, TABLE, VALIDATED):
            shutil.copy2(target / name, fresh)
        bench = json.loads((fresh / TABLE).read_text(encoding="utf-8"))
    else:
        bench = _with_earlier_runs(target, fresh, _rows(fresh, "bench"))
        project.write_json(fresh / VALIDATED, _rows(fresh, "plan", "--validate"))
    _do(fresh, "report", str(fresh))
    for document in documents:
        report_command.update(document, fresh)
    for made_anew in NOT_KEPT:
        shutil.rmtree(fresh / made_anew, ignore_errors=True)
    _compact(fresh)
    for name in KEPT:
        if (target / name).exists():
            shutil.copy2(target / name, fresh)
    _replace(target, fresh)
    return bench


def _with_earlier_runs(target: Path, fresh: Path, run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The speed table of the runs that ``target`` keeps and of this one, as ``pardemo bench --add`` makes it."""
    if (target / RUNS).exists():
        shutil.copy2(target / RUNS, fresh)
    file = fresh / "bench_run.json"
    project.write_json(file, run)
    table = _rows(fresh, "bench", "--add", str(file), "--to", str(fresh))
    file.unlink()
    return table


def _compact(folder: Path) -> None:
    """Notebooks and JSON without their indentation: a twentieth of what is committed with every reference run.

    The speed table and its runs keep their lines: what another run changes is read as a difference.
    """
    for path in (*folder.rglob("*.ipynb"), *folder.rglob("*.json")):
        if path.name in (RUNS, TABLE):
            continue
        text = json.dumps(json.loads(path.read_text(encoding="utf-8")), ensure_ascii=False, separators=(",", ":"))
        path.write_text(f"{text}\n", encoding="utf-8")


def _replace(target: Path, fresh: Path) -> None:
    """Two renames: at every moment one of the two runs is there whole."""
    old = target.with_name(f"{target.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _rows(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows that a command prints. Its status says no more than they do: that a target is missed."""
    status, text = _pardemo(out, *arguments, "--json")
    try:
        return json.loads(text)
    except ValueError:
        raise RuntimeError(f"`pardemo {arguments[0]}` ended with status {status} and no table") from None


def _do(out: Path, *arguments: str) -> None:
    status, _ = _pardemo(out, *arguments)
    if status:
        raise RuntimeError(f"`pardemo {arguments[0]}` ended with status {status}; what there is of it is in {out.name}")


def _pardemo(out: Path, *arguments: str) -> tuple[int, str]:
    """A command of pardemo in a process of its own, as a reader would start it: its status and what it printed."""
    command = [sys.executable, "-m", "pardemo", *arguments]
    process = subprocess.run(command, env={**os.environ, "PARDEMO_OUT": str(out)}, stdout=subprocess.PIPE, text=True)
    return process.returncode, process.stdout


if __name__ == "__main__":
    sys.exit(main())
