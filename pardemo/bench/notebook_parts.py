"""Where the seconds of one of the collection's notebooks go: its kernel, its imports, its ranks' start, its work.

A small notebook with a cell for each of them is run as the collection's are, by the runner's own way through papermill,
which notes how long each cell took; what is left of the whole is the kernel's. Once more in a kernel as Jupyter starts
it, to show what forking kernels from a process with the libraries loaded saves.
"""

import contextlib
import tempfile
import time
from pathlib import Path

from pardemo import extras, project

with extras.needed_by(__name__):
    import nbformat

    from pardemo.book.run import kernels, runner

ROUNDS = 2
LIMIT_S = 300  # of a cell
CELLS = {
    "imports": "import matplotlib.pyplot, pandas, torch\nfrom pardemo import World",
    "ranks": (
        "def size():\n    import torch.distributed as dist\n\n    return dist.get_world_size()\n\n\n"
        "world = World(2)\nassert world.run(size) == [2, 2]"
    ),
    "work": (
        "def work():\n    import torch\n    import torch.distributed as dist\n\n"
        "    tensor = torch.zeros(1 << 20)\n    for _ in range(50):\n        dist.all_reduce(tensor)\n\n\n"
        "_ = world.run(work)"
    ),
    "end": "world.close()",
}


def parts(rounds: int = ROUNDS) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each part in each round: in kernels as the runner forks them, and in kernels as Jupyter starts them.

    Raises:
        PapermillExecutionError: a cell failed.
    """
    warm: dict[str, list[float]] = {part: [] for part in ("kernel", *CELLS)}
    cold: dict[str, list[float]] = {part: [] for part in ("kernel", *CELLS)}
    with tempfile.TemporaryDirectory() as folder:
        _once(Path(folder), forked=True)  # the process that kernels are forked from has loaded its libraries then
        for _ in range(rounds):
            for seconds, forked in ((warm, True), (cold, False)):
                for part, took in _once(Path(folder), forked).items():
                    seconds[part].append(took)
    return warm, cold


def _once(folder: Path, forked: bool) -> dict[str, float]:
    """Seconds of the parts of one run."""
    source, target = folder / "parts.ipynb", folder / "executed.ipynb"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS.values()])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, source)
    short = project.folder_for_sockets(runner.SOCKET_NAME_BYTES)
    with (
        tempfile.TemporaryDirectory(prefix="pardemo-kernel-", dir=short) as sockets,
        project.environment({"PARDEMO_OUT": str(folder), "PARDEMO_HEADLESS": "1"}),
        kernels.warm() if forked else contextlib.nullcontext(),
    ):
        begin = time.perf_counter()
        runner._papermill(source, target, {}, LIMIT_S, lambda k, n: None, sockets)
        whole = time.perf_counter() - begin
    executed = nbformat.read(target, as_version=4)
    cells = {part: cell.metadata.papermill.duration for part, cell in zip(CELLS, executed.cells, strict=True)}
    return {"kernel": whole - sum(cells.values()), **cells}
