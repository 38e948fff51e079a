"""Finds the collection's notebooks, and the folder that a run writes to."""

import contextlib
import csv
import fcntl
import functools
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pardemo.extras import REPOSITORY

PACKAGE = Path(__file__).resolve().parent
SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103  # the kernel's limit: sockaddr_un.sun_path
LOCK = ".lock"  # in a folder that a run writes to, while it does
#: How a file begins that a clone without git-lfs has in the place of a large one.
LFS_POINTER = b"version https://git-lfs"


def root() -> Path:
    """The folder that holds ``notebooks/``: beside the package, else the working folder or one above it.

    The working folder where there is none: the package is installed, and this is no clone of the repository.
    """
    for folder in (PACKAGE.parent, Path.cwd(), *Path.cwd().parents):
        if (folder / "notebooks").is_dir():
            return folder
    return Path.cwd()


def error_line(error: Exception) -> str:
    """Returns an error's text; of a file that cannot be opened its path and the reason, without the system's number."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename}"
    return f"{error.filename}: {error.strerror}"


def first_line(error: object) -> str:
    """Returns the first line with text of an error, or of a message: torch's go on with a stack of C++."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def one_line(error: object, most: int | None = None) -> str:
    """Returns all of an error's text in one line, without runs of spaces, of at most ``most`` characters."""
    return " ".join(str(error).split())[:most]


def not_in_the_package(error: Exception) -> str:
    """Returns an addition to errors about notebooks or data where only the package is installed; else nothing."""
    folders = (root() / "notebooks", root() / "data")
    if folders[0].is_dir() or not any(str(folder) in str(error) for folder in folders):
        return ""
    return f": they come with the repository, not with the package: git clone {REPOSITORY}"


def notebooks() -> dict[str, Path]:
    """The collection in its order: name without suffix -> path."""
    return {path.stem: path for path in sorted((root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))}


def chapter_name(notebook: str) -> str:
    """The chapter of a notebook: its name without the number before it."""
    return re.sub(r"^\d\d_", "", notebook)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measuring_ranks() -> int:
    """Returns the number of ranks that measure this machine: one for each core, at least 2 and at most 4."""
    return min(4, max(2, available_cores()))


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within the block the process has these variables; afterwards what they were before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_headless() -> bool:
    """Whether a run without a reader is going on, as ``pardemo run`` says."""
    return "PARDEMO_HEADLESS" in os.environ


def output_dir() -> Path:
    """The folder for claims, figures and profiles: ``$PARDEMO_OUT`` (set by ``pardemo run``), else ``outputs/latest``.

    In the kernel of a plain ``papermill IN.ipynb OUT.ipynb`` it is a folder beside that output, of its name: ``OUT``.
    """
    if named := os.environ.get("PARDEMO_OUT"):
        return Path(named)
    return papermills_folder() or root() / "outputs" / "latest"


@functools.cache
def papermills_folder() -> Path | None:
    """The folder for what a notebook writes, if papermill's command runs it; else None."""
    if "ipykernel" not in sys.modules:
        return None
    import psutil

    try:
        parent = psutil.Process(os.getppid())
        written = papermills_output(parent.cmdline())
        return Path(parent.cwd()) / written.with_suffix("") if written else None
    except psutil.Error:  # it has ended, or may not be looked at
        return None


def papermills_output(command: Sequence[str]) -> Path | None:
    """The notebook that a command line of papermill writes; None where it is no such command, or writes elsewhere.

    >>> papermills_output(["python", "-m", "papermill", "in.ipynb", "runs/out.ipynb", "-p", "n", "2"]).as_posix()
    'runs/out.ipynb'
    """
    words = [Path(word).name for word in command[:3]]
    if not ("papermill" in words[:2] or (words[1:] == ["-m", "papermill"])):
        return None
    named = [word for word in command if word.endswith(".ipynb") and "://" not in word]
    return Path(named[1]) if len(named) == 2 else None


def folder_for_sockets(name_bytes: int) -> str:
    """The folder of temporary files, or a shorter one where the path of a socket in it would be too long.

    Args:
        name_bytes: of the socket's path below the folder.

    Raises:
        ValueError: no folder is short enough.
    """
    longest = SOCKET_PATH_BYTES - 1 - name_bytes
    tmp = tempfile.gettempdir()  # TMPDIR; on clusters often with names of the user, the job and the host in it
    for folder in (tmp, "/tmp", "/var/tmp", "/dev/shm"):
        if len(os.fsencode(folder)) <= longest and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise ValueError(
        f"TMPDIR is too long for sockets, and /tmp cannot be written: {tmp} has {len(os.fsencode(tmp))} bytes; set it "
        f"to a folder whose path has {longest} at most"
    )


def writable_folder(path: str, option: str, role: str = "is a folder") -> Path:
    """Makes a folder where there is none, and checks that files can be written there.

    Args:
        option: that names the folder, for errors, as ``"--out"``; ``role``: what it does with one.

    Raises:
        ValueError: the path is a file's, or nothing can be written there.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:
        raise ValueError(f"{option} {role}, and {path} is a file") from None
    except OSError as error:
        raise ValueError(f"{option}: nothing can be written to {path}: {error.strerror}") from None
    return folder


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a file beside ``path`` and moves it there when whole: never half a file under that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # a full disk is told of a write, which has no name
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text in UTF-8, in one piece: the file is complete or not there."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object) -> None:
    """Writes a value as indented JSON, in one piece."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Writes a table as CSV, in one piece: it is complete or not there."""

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerows([columns, *rows])

    write_atomically(path, write)


@contextlib.contextmanager
def only_writer(folder: Path, otherwise: str) -> Iterator[None]:
    """In the block this process alone writes to a folder that exists; the lock ends with the block or the process.

    Args:
        otherwise: what the user may do instead, as ``"give another --out"``.

    Raises:
        ValueError: another run writes there; names its process.
    """
    path = folder / LOCK
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(open(path, "a+", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ValueError(
                    f"another run (process {file.read() or 'unknown'}) writes to {folder}: wait for it, or {otherwise}"
                ) from None
            except OSError:  # a file system without locks, as some clusters mount theirs
                pass
            with contextlib.suppress(FileNotFoundError):  # its owner has removed it between our two lines
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    break
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        stack.callback(path.unlink, missing_ok=True)  # while the lock is held: whoever opened it looks again
        yield


def refuse_pointer(path: str | Path, beginning: bytes, content: str) -> None:
    """ValueError where a file begins as a git-lfs pointer does; ``content`` should have been there."""
    if beginning.startswith(LFS_POINTER):
        raise ValueError(f"{path} is a git-lfs pointer, not the {content}: run `git lfs pull` in its folder")
