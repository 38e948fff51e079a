"""Faults of ``pardemo run``, on a small collection: interrupts, dead kernels, a full disk, two runs."""

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from pardemo import extras, project
from pardemo.compat import replaced
from pardemo.deadline import Deadline
from pardemo.soak.scene import Lost, NotReached, Scene, scene
from pardemo.soak.scenes.parts import LONG_S, called, nothing_below, one_line, small_disk

with extras.needed_by(__name__):
    import nbformat

CLAIM = "from pardemo import Ledger\nLedger('{name}').check('s09.x', 'one is one', 1, 1)"
RANKS = "import os\nfrom pardemo import World\nwith World(world_size) as world:\n    pids = world.run(os.getpid)"
WAITS = "import os, time\nopen('{folder}/begun', 'w')\nwhile not os.path.exists('{folder}/end'): time.sleep(0.02)"
DIES = "import os\nif not os.path.exists('{folder}/mended'):\n    os.kill(os.getpid(), 9)"


def _collection(scene: Scene, **cells: list[str]) -> Path:
    """A project with these notebooks, which commands of this process run from now on. Returns its output folder."""
    (scene.folder / "notebooks").mkdir(exist_ok=True)
    for name, sources in cells.items():
        notebook = nbformat.v4.new_notebook()
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        first = nbformat.v4.new_code_cell("world_size = 2\npreset = 'laptop'")
        first.metadata["tags"] = ["parameters"]
        notebook.cells = [first, *(nbformat.v4.new_code_cell(source) for source in sources)]
        nbformat.write(notebook, scene.folder / "notebooks" / f"{name[1:]}.ipynb")
    project.root = lambda: scene.folder
    return scene.folder / "out"


def _usual(scene: Scene) -> Path:
    first, second = ([RANKS, CLAIM.format(name=name)] for name in ("71_first", "72_second"))
    return _collection(scene, _71_first=first, _72_second=second)


def _finish(scene: Scene, out: Path) -> None:
    """What was left is whole or not there, and ``--resume`` makes the rest."""
    for path in out.glob("*.ipynb") if out.exists() else ():
        if not path.name.startswith("."):
            try:
                nbformat.read(path, as_version=4)
            except Exception as error:
                raise Lost(f"{path.name} is half a notebook: {error}") from None
    if (out / "run.json").exists():
        json.loads((out / "run.json").read_text())
    status, told = called("run", "--out", out, "--resume")
    scene.expect(status == 0, f"run --resume ends with status {status}: {told[-600:]}")
    endings = {row["notebook"]: row["status"] for row in json.loads((out / "run.json").read_text())}
    scene.expect(set(endings.values()) == {"ok"} and len(endings) == 2, f"after run --resume: {endings}")
    scene.expect((out / "report.html").stat().st_size > 1000, "there is no report")
    scene.keeps(len((out / "claims.csv").read_text().splitlines()) == 3, "claims are missing after run --resume")
    left = [path.name for path in out.iterdir() if "partial" in path.name or path.name == project.LOCK]
    scene.expect(not left, f"left in the output folder: {left}")


def _resume(scene: Scene) -> None:
    _finish(scene, _usual(scene))
    nothing_below()


ENDS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


#: A command that is killed by SIGKILL removes nothing: the kernels' sockets, and the file that tells of them.
LEAVES = {"SIGKILL": ("pardemo-kernel-*",)}


@scene("runner/ends", ENDS, ENDS, within_s=3.0, after=_resume, weight=3, leaves=LEAVES)
def _ends(scene: Scene) -> str:
    """A run is interrupted, terminated or killed at any moment; afterwards ``run --resume`` makes the rest."""
    out = _usual(scene)
    scene.begin()
    status, told = called("run", "--out", out)
    scene.expect(status in (0, 130, 143), f"status {status}: {told[-600:]}")
    if status == 130:
        scene.expect("interrupted" in one_line(told), f"an interrupt is told as {told[-600:]}")
    if status == 0:
        raise NotReached("the run was over before its signal")
    return one_line(told)


@scene("runner/kernel dies")
def _kernel_dies(scene: Scene) -> str:
    """A notebook's kernel is killed: that notebook fails, the other one runs, and ``--resume`` makes the first."""
    cells = {"_71_first": [RANKS, CLAIM.format(name="71_first")], "_72_second": [CLAIM.format(name="72_second")]}
    dying = scene.chance.choice(sorted(cells))
    cells[dying].insert(scene.chance.randrange(2), DIES.format(folder=scene.folder))
    out = _collection(scene, **cells)
    status, told = called("run", "--out", out)
    scene.expect(status == 1, f"status {status}: {told[-600:]}")
    endings = {row["notebook"]: row for row in json.loads((out / "run.json").read_text())}
    scene.expect("DeadKernelError" in endings.pop(dying[1:])["error"], f"the error is {told[-300:]}")
    scene.expect([row["status"] for row in endings.values()] == ["ok"], f"the other notebook: {endings}")
    (scene.folder / "mended").touch()
    _finish(scene, out)
    nothing_below()
    return one_line(told)


@scene("runner/two runs")
def _two_runs(scene: Scene) -> str:
    """A second run into the folder of the first is refused, and the first one goes on."""
    cells = [WAITS.format(folder=scene.folder), CLAIM.format(name="71_first")]
    out = _collection(scene, _71_first=cells, _72_second=[CLAIM.format(name="72_second")])
    pid = os.fork()
    if pid == 0:  # a process of its own: locks belong to processes
        os._exit(called("run", "--out", out)[0])
    limit = Deadline(LONG_S, [pid])
    while not (scene.folder / "begun").exists():
        scene.expect(limit.left_s() > 0, "the first run did not begin")
        time.sleep(0.02)
    status, told = called("run", "72", "--out", out)
    (scene.folder / "end").touch()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    scene.expect(status == 2 and f"another run (process {pid}) writes to" in one_line(told), f"{status}: {told[-600:]}")
    scene.expect(code == 0, f"the first run ended with status {code}")
    _finish(scene, out)
    nothing_below()
    return one_line(told)


@scene("runner/full disk", ("a write", "a small disk"))
def _full_disk(scene: Scene) -> str:
    """The disk is full in the middle of a run: one line that says so; with room again, ``--resume`` makes the rest."""
    out = _usual(scene)
    if scene.way == "a write":
        from papermill.iorw import LocalHandler

        real, writes = LocalHandler.write, [scene.chance.randrange(4)]

        def write(self: Any, text: str, path: str) -> Any:
            writes[0] -= 1
            if writes[0] >= 0:
                return real(self, text, path)
            with open(path, "w") as stream:
                stream.write(text[: scene.chance.randrange(len(text))])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

        with replaced(LocalHandler, "write", write):
            status, told = called("run", "--out", out)
    else:
        with small_disk(out, 4096 * scene.chance.randrange(1, 12)):
            status, told = called("run", "--out", out)
            if status == 2:
                left = [path.name for path in out.glob(".*partial*")]
                scene.expect(not left, f"half written: {left}")
    fits = status == 0 and scene.way == "a small disk"
    scene.expect(fits or (status == 2 and "no space left" in one_line(told).lower()), f"{status}: {told[-600:]}")
    _finish(scene, out)
    nothing_below()
    if fits:
        raise NotReached("the run fits on the disk")
    return one_line(told)
