"""Runs the collection headless: papermill over the notebooks, claims and pictures gathered, a report at the end."""

import contextlib
import errno
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pardemo import claims, project
from pardemo.book.run import endings, fingerprint, kernels, report
from pardemo.book.run.cell_limit import CellLimit
from pardemo.book.run.endings import NotebookEnding
from pardemo.book.run.parameters import RunError, assign
from pardemo.draw import pictures

CELL_TIMEOUT_S = 600
SOCKET_NAME_BYTES = len("pardemo-kernel-12345678/kernel-12345")  # of a kernel's sockets, below the temporary folder
SAVED_EVERY_S = 20  # the copy while it grows; papermill writes it before and after each cell, a tenth of the run's time
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)  # a full disk, a full quota


def choose_notebooks(names: Sequence[str]) -> dict[str, Path]:
    """The named notebooks (``data_parallel``, ``01``, or both together), in their order; all when none is named.

    Raises:
        RunError: a name that fits no notebook.
    """
    collection = project.notebooks()
    if not collection:
        raise RunError(f"no notebooks in {project.root() / 'notebooks'}")
    chosen = set()
    for name in names:
        stem = Path(name).stem
        matches = [n for n in collection if stem in (n, n[:2], project.chapter_name(n))]
        if not matches:
            raise RunError(f"no notebook {name!r}; there are: {', '.join(collection)}")
        chosen.update(matches)
    return {n: p for n, p in collection.items() if not names or n in chosen}


def run_notebooks(
    names: Sequence[str] = (),
    parameters: dict[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    cell_timeout_s: int = CELL_TIMEOUT_S,
    say: Callable[..., None] | None = None,
) -> list[NotebookEnding]:
    """Executes notebooks in order and writes executed copies, figures, claims and the report to ``out``.

    A notebook that fails does not stop the others. With ``resume``, a notebook that finished in ``out`` with
    the same sources and parameters, and the same results of the notebooks that it reads, is not run again.

    Raises:
        RunError: an unknown notebook or parameter, an output folder that cannot be written, or a full disk.
        ValueError: another run writes to the output folder; no folder for sockets (TMPDIR too long).
    """
    say = say or progress_printer()
    selected = choose_notebooks(names)
    assigned = assign(selected, parameters or {})
    project.folder_for_sockets(SOCKET_NAME_BYTES)
    folder = _writable(Path(out) if out else project.output_dir())
    with project.only_writer(folder, "give another folder with --out"):
        return _run(selected, assigned, folder, resume, cell_timeout_s, say)


def _run(
    selected: dict[str, Path],
    assigned: dict[str, dict[str, Any]],
    folder: Path,
    resume: bool,
    cell_timeout_s: int,
    say: Callable[..., None],
) -> list[NotebookEnding]:
    ended = endings.read_endings(folder)
    warm = False
    with contextlib.ExitStack() as stack:
        for name, path in selected.items():
            sources = fingerprint.of_sources(path, assigned[name])
            before = ended.get(name)
            finished = before and before.status == "ok" and (folder / f"{name}.ipynb").exists()
            if resume and finished and before.fingerprint == fingerprint.with_inputs(sources, path, folder):
                say(name, f"finished earlier with the same sources and parameters ({before.seconds:.0f} s)", end=True)
                continue
            if not warm:
                warm = stack.enter_context(kernels.warm(selected))
            ended.pop(name, None)  # should this run be killed, the notebook counts as not run
            with _refused_where_no_space_is_left(name, folder):
                endings.write_endings(folder, ended)
                ended[name] = _execute(name, path, assigned[name], folder, cell_timeout_s, say)
                ended[name].sources = sources
                ended[name].fingerprint = fingerprint.with_inputs(sources, path, folder)  # may have made what it reads
                endings.write_endings(folder, ended)
    in_order = [ended[name] for name in project.notebooks() if name in ended]
    rows = []
    for name in (outcome.notebook for outcome in in_order):
        try:
            rows += claims.read_ledger(folder / "claims" / f"{name}.json")
        except FileNotFoundError:  # it failed before its first claim
            continue
        except ValueError as error:  # of an earlier run, damaged since: no reason to lose this one
            say(name, str(error), end=True)
    project.write_csv(folder / "claims.csv", claims.COLUMNS, [[row[name] for name in claims.COLUMNS] for row in rows])
    report.write_pages(folder, in_order, rows)
    return [ended[name] for name in selected]


def _execute(
    name: str, path: Path, parameters: dict[str, Any], folder: Path, cell_timeout_s: int, say: Callable[..., None]
) -> NotebookEnding:
    from papermill.exceptions import PapermillExecutionError

    begin = time.monotonic()
    partial = folder / f".{name}.partial.ipynb"
    _clear(name, folder)
    outcome = NotebookEnding(name, "ok", parameters=parameters)
    inherited = {"PARDEMO_OUT": str(folder), "PARDEMO_HEADLESS": "1", pictures.NOTEBOOK: name}  # by the kernel
    try:
        short = project.folder_for_sockets(SOCKET_NAME_BYTES)
        with (
            tempfile.TemporaryDirectory(prefix="pardemo-kernel-", dir=short) as sockets,
            project.environment(inherited),
        ):
            on_cell = lambda k, n: say(name, f"cell {k} of {n}, {time.monotonic() - begin:.0f} s")  # noqa: E731
            _papermill(path, partial, parameters, cell_timeout_s, on_cell, sockets)
    except PapermillExecutionError as error:
        outcome.status = "failed"
        outcome.error = f"cell {error.cell_index + 1}: {error.ename}: {error.evalue}"
    except Exception as error:  # a kernel that died, a cell that took too long: this notebook's failure
        if getattr(error, "errno", None) in NO_SPACE:  # the copy is cut off, and the next one would be, too
            partial.unlink(missing_ok=True)
            raise
        outcome.status, outcome.error = "failed", project.first_line(f"{type(error).__name__}: {error}")
    finally:
        if partial.exists():
            _keep(partial, folder / f"{name}.ipynb")
    outcome.seconds = time.monotonic() - begin
    ending = "ok" if outcome.status == "ok" else f"FAILED in {project.first_line(outcome.error)}"
    say(name, f"{outcome.seconds:.1f} s  {ending}", end=True)
    return outcome


@contextlib.contextmanager
def _refused_where_no_space_is_left(name: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        full_path = error.filename or folder
        raise RunError(f"{full_path}: no space left; {name} is not finished: make room, then run --resume") from None


def _keep(partial: Path, target: Path) -> None:
    """The executed copy under its final name, without papermill's note of where it lay on this machine."""
    import nbformat

    notebook = nbformat.read(partial, as_version=4)
    notebook.metadata.get("papermill", {}).update(input_path=target.name, output_path=target.name)
    nbformat.write(notebook, partial)
    os.replace(partial, target)


def _clear(name: str, folder: Path) -> None:
    """Removes what an earlier run of this notebook left: its claims and pictures must not pass for the new one's."""
    for old in (folder / "claims" / f"{name}.json", folder / f"{name}.ipynb", *pictures.of_notebook(folder, name)):
        old.unlink(missing_ok=True)


def _papermill(
    path: Path,
    target: Path,
    parameters: dict[str, Any],
    cell_timeout_s: int,
    on_cell: Callable[[int, int], None],
    sockets: str,
) -> None:
    """papermill with an engine that reports each cell as it starts; the kernel listens in the folder ``sockets``.

    However it ends, also by an interrupt, no kernel is left that could still write to that folder.
    """
    import logging

    import papermill
    from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
    from traitlets.config import Config

    logging.getLogger("papermill").setLevel(logging.ERROR)

    class ReportingEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, **kwargs):
            start, complete = nb_man.cell_start, nb_man.cell_complete

            def cell_start(cell, cell_index, **more):
                on_cell(cell_index + 1, len(nb_man.nb.cells))
                limit.begins(cell_index + 1)
                return start(cell, cell_index, **more)

            def cell_complete(cell, cell_index, **more):
                limit.ends()
                return complete(cell, cell_index, **more)

            def save(**more):
                if (nb_man.now() - nb_man.last_save_time).total_seconds() >= SAVED_EVERY_S:
                    NotebookExecutionManager.save(nb_man, **more)

            nb_man.cell_start, nb_man.cell_complete, nb_man.save = cell_start, cell_complete, save
            try:
                return super().execute_managed_notebook(nb_man, kernel_name, **kwargs)
            finally:
                del nb_man.save  # the last one, papermill's own, is never left out

    config = Config()
    if sys.platform == "linux":
        config.ConnectionFileMixin.transport = "ipc"  # the kernel then opens no port
        config.ConnectionFileMixin.ip = os.path.join(sockets, "kernel")
        config.ConnectionFileMixin.connection_file = os.path.join(sockets, "kernel.json")  # goes with the folder
    papermill_engines.register("pardemo", ReportingEngine)
    with kernels.none_left() as begun, CellLimit(cell_timeout_s, begun) as limit:
        papermill.execute_notebook(
            str(path), str(target), parameters=parameters, engine_name="pardemo", kernel_name="python3",
            cwd=str(path.parent), progress_bar=False, start_timeout=120, config=config,
            iopub_timeout=cell_timeout_s,  # a cell's output is a part of it: not 4 s, whatever else the machine does
        )  # fmt: skip


def progress_printer() -> Callable[..., None]:
    """A line per notebook: rewritten in place on a terminal, printed once at its end elsewhere."""
    live = sys.stderr.isatty()

    def say(name: str, text: str, end: bool = False) -> None:
        if live:
            print(f"\r\x1b[K{name:24} {text}", end="\n" if end else "", file=sys.stderr, flush=True)
        elif end:
            print(f"{name:24} {text}", file=sys.stderr, flush=True)

    return say


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunError(f"cannot write to the output folder {folder}: {error.strerror}") from None
    return folder.resolve()
