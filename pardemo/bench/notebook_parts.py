"""Where the seconds of the collection's chapters go: their kernels, their imports, their ranks' start, their work.

Some short chapters are run as the collection is, by the runner's own way through papermill, which notes how long each
cell took. A cell before all others has imports and the starts of ranks followed in the kernel; what is left of the
whole beside the cells is the kernel's. Once more in kernels as Jupyter starts them, to show what forking kernels from a
process with the libraries loaded saves.
"""

import contextlib
import tempfile
import time
from pathlib import Path

from pardemo import extras, project

with extras.needed_by(__name__):
    import nbformat

    from pardemo.book import chapters
    from pardemo.book.run import kernels, runner

ROUNDS = 2
LIMIT_S = 300  # of a cell
CHAPTERS = ("megatron_mlp", "vocabulary", "sequence_parallel")  # short ones, with ranks in most sections
PARTS = ("kernel", "imports", "ranks", "work")
FOLLOW = """def _follow():  # all that the followed functions need is theirs: the kernel clears its names at its end
    import builtins, importlib, time
    from pardemo.world import generation
    seconds, within = {"imports": 0.0, "ranks": 0.0}, []
    def followed(function, part):
        def call(*arguments, **options):
            if within:  # an import within an import, or one that ranks' start makes
                return function(*arguments, **options)
            within.append(part)
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds[within.pop()] += time.perf_counter() - begin
        return call
    builtins.__import__ = followed(builtins.__import__, "imports")
    importlib.import_module = followed(importlib.import_module, "imports")
    generation.Ranks.__init__ = followed(generation.Ranks.__init__, "ranks")
    generation.Ranks.await_start = followed(generation.Ranks.await_start, "ranks")
    return seconds
_seconds = _follow()
"""
TELL = "print(_seconds['imports'], _seconds['ranks'])"


def parts(rounds: int = ROUNDS) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each part of all ``CHAPTERS`` together, in each round: in kernels as the runner forks them, and in
    kernels as Jupyter starts them.

    Raises:
        PapermillExecutionError: a cell failed.
    """
    warm: dict[str, list[float]] = {part: [] for part in PARTS}
    cold: dict[str, list[float]] = {part: [] for part in PARTS}
    for number in range(rounds + 1):  # in the first one the process that kernels are forked from loads its libraries
        for seconds, forked in ((warm, True), (cold, False)):
            if number or forked:
                of_chapters = [once(name, forked) for name in CHAPTERS]
                for part in PARTS if number else ():
                    seconds[part].append(sum(of[part] for of in of_chapters))
    return warm, cold


def once(chapter: str, forked: bool) -> dict[str, float]:
    """Seconds of the parts of one run of a chapter."""
    notebook = nbformat.read(project.root() / "notebooks" / f"{chapters.notebook_of(chapter)}.ipynb", as_version=4)
    notebook.cells = [nbformat.v4.new_code_cell(FOLLOW), *notebook.cells, nbformat.v4.new_code_cell(TELL)]
    short = project.folder_for_sockets(runner.SOCKET_NAME_BYTES)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(prefix="pardemo-kernel-", dir=short) as sockets,
        project.environment({"PARDEMO_OUT": folder, "PARDEMO_HEADLESS": "1"}),
        kernels.warm() if forked else contextlib.nullcontext(),
    ):
        source, target = Path(folder, "source.ipynb"), Path(folder, "executed.ipynb")
        nbformat.write(notebook, source)
        begin = time.perf_counter()
        runner._papermill(source, target, {}, LIMIT_S, lambda k, n: None, sockets)
        whole = time.perf_counter() - begin
        executed = nbformat.read(target, as_version=4)
    cells = sum(cell.metadata.papermill.duration or 0.0 for cell in executed.cells if cell.cell_type == "code")
    imports, ranks = map(float, executed.cells[-1].outputs[0].text.split())
    return {"kernel": whole - cells, "imports": imports, "ranks": ranks, "work": cells - imports - ranks}
