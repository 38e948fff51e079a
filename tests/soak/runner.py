"""Faults of ``pardemo run``, on a small collection: interrupts, a full disk."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

from pardemo import extras, project
from pardemo.compat import replaced
from soak.case import Case, Lost, NotReached, fault
from soak.common import called, one_line, small_disk

with extras.needed_by("the group runner"):
    import nbformat

CLAIM = "from pardemo.claims import Claim, Ledger\nLedger('{name}').check(Claim('s09.x', 'one is one'), 1, 1)"
RANKS = "import os\nfrom pardemo import World\nwith World(world_size) as world:\n    pids = world.run(os.getpid)"


def _collection(case: Case) -> Path:
    """A project with two notebooks, which commands of this process run from now on. Returns its output folder."""
    (case.folder / "notebooks").mkdir(exist_ok=True)
    for name in ("71_first", "72_second"):
        notebook = nbformat.v4.new_notebook()
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        cells = ("world_size = 2\npreset = 'laptop'", RANKS, CLAIM.format(name=name))
        notebook.cells = [nbformat.v4.new_code_cell(source) for source in cells]
        notebook.cells[0].metadata["tags"] = ["parameters"]
        nbformat.write(notebook, case.folder / "notebooks" / f"{name}.ipynb")
    project.root = lambda: case.folder
    return case.folder / "out"


def _finish(case: Case, out: Path) -> None:
    """What was left is whole or not there, and ``--resume`` makes the rest."""
    for path in out.glob("[!.]*.ipynb"):
        try:
            nbformat.read(path, as_version=4)
        except Exception as error:
            raise Lost(f"{path.name} is half a notebook: {error}") from None
    if (out / "run.json").exists():
        json.loads((out / "run.json").read_text())
    status, told = called("run", "--out", out, "--resume")
    case.expect(status == 0, f"run --resume ends with status {status}: {told[-600:]}")
    statuses = [row["status"] for row in json.loads((out / "run.json").read_text())]
    case.expect(statuses == ["ok", "ok"], f"after run --resume: {statuses}")
    case.expect((out / "report.html").stat().st_size > 1000, "there is no report")
    case.keeps(len((out / "claims.csv").read_text().splitlines()) == 3, "claims are missing after run --resume")
    left = [path.name for path in out.iterdir() if "partial" in path.name or path.name == project.LOCK]
    case.expect(not left, f"left in the output folder: {left}")


ENDS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
#: A command that is killed by SIGKILL removes nothing: the kernels' sockets, and the file that tells of them.
LEAVES = {"SIGKILL": ("pardemo-kernel-*",)}


def _finish_in_another_process(case: Case) -> None:
    _finish(case, _collection(case))


@fault("runner/ends", ENDS, signals=ENDS, within_s=3.0, weight=3, leaves=LEAVES, then=_finish_in_another_process)
def _ends(case: Case) -> str:
    """A run is interrupted, terminated or killed at any moment; afterwards ``run --resume`` makes the rest."""
    out = _collection(case)
    case.begin()
    status, told = called("run", "--out", out)
    case.expect(status in (0, 130, 143), f"status {status}: {told[-600:]}")
    if status == 130:
        case.expect("interrupted" in one_line(told), f"an interrupt is told as {told[-600:]}")
    if status == 0:
        raise NotReached("the run was over before its signal")
    return one_line(told)


@fault("runner/full disk", ("a write", "a small disk"))
def _full_disk(case: Case) -> str:
    """The disk is full in the middle of a run: one line that says so; with room again, ``--resume`` makes the rest."""
    out = _collection(case)
    if case.way == "a write":
        from papermill.iorw import LocalHandler

        real, writes = LocalHandler.write, [case.rng.randrange(4)]

        def write(self: Any, text: str, path: str) -> Any:
            writes[0] -= 1
            if writes[0] >= 0:
                return real(self, text, path)
            with open(path, "w") as stream:
                stream.write(text[: case.rng.randrange(len(text))])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

        with replaced(LocalHandler, "write", write):
            status, told = called("run", "--out", out)
    else:
        with small_disk(out, 4096 * case.rng.randrange(1, 12)):
            status, told = called("run", "--out", out)
            left = [path.name for path in out.glob(".*partial*")]
            case.expect(status != 2 or not left, f"half written: {left}")
    fits = status == 0 and case.way == "a small disk"
    case.expect(fits or (status == 2 and "no space left" in one_line(told).lower()), f"{status}: {told[-600:]}")
    _finish(case, out)
    if fits:
        raise NotReached("the run fits on the disk")
    return one_line(told)
