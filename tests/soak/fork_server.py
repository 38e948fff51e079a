"""Runs each case in a process that is forked from this one, which has the libraries loaded and one thread."""

import contextlib
import faulthandler
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pardemo import compat, extras
from pardemo.cluster import namespaces
from pardemo.deadline import Deadline
from pardemo.termination import end_with_parent
from pardemo.world import fork_server
from pardemo.world.errors import exit_text
from pardemo.world.fork_server_process import become_subreaper
from pardemo.world.imports import without_garbage_collection
from soak.case import BEGUN, Case, Kind, Lost, NotReached, Skipped, Wrong, kinds_of
from soak.leftovers import Leftovers, end_all, left_open, open_sockets, running
from soak.report import Result

CLONE_NEWNS = 0x20000
OUTPUT, OUTCOME = "output.txt", "outcome.json"  # what a case prints, and what became of it
OUTPUT_TOLD = 600  # characters of the output's end that are reported
#: Seconds that a case may take before it counts as a hang: a hundred times what most take, for loaded machines.
LIMIT_S = 180.0
#: Work that goes on for longer than this after its signal, to its end, has not noticed it.
NOTICED_WITHIN_S = 5.0
SEEN_EVERY_S = 1.0
LATE = "its signal came before the work or after it"
#: By group, what its cases would load one by one: a signal is to meet the work, not the loading of modules.
MODULES = {
    "runner": ("pardemo.cli", "ipykernel.kernelapp", "ipykernel.zmqshell", "matplotlib.pyplot", "pandas"),
    "measure": ("pardemo.cli",),
    "finetune": ("pardemo.finetune.train", "pardemo.peers.deepspeed.engine"),
}


def load(groups: Iterable[str]) -> tuple[dict[str, Kind], dict[str, str]]:
    """Loads groups of cases, with the libraries that they use: the kinds by name, and why a group cannot be run."""
    os.environ.update(
        {**fork_server.SINGLE_THREADED, "TOKENIZERS_PARALLELISM": "false"}
    )  # one thread, or forks were not safe
    kinds: dict[str, Kind] = {}
    missing: dict[str, str] = {}
    with without_garbage_collection(), contextlib.redirect_stdout(sys.stderr):
        for module in fork_server.PRELOADED:
            import_module(module)
        for group in groups:
            try:
                for module in MODULES.get(group, ()):
                    import_module(module)
                kinds |= kinds_of(import_module(f"soak.{group}"))
            except ModuleNotFoundError as error:
                if (line := extras.line_of(f"the group {group}", error)) is None:
                    raise
                missing[group] = line
    return kinds, missing


class ForkServer:
    """Forks a process for each case, and owns whatever it leaves: a context manager, at whose end nothing is left.

    It is the subreaper of all that cases start, so that a process which outlives its case becomes its child.
    """

    def __init__(self, kinds: Mapping[str, Kind], seed: int):
        self._kinds, self._seed, self._count = kinds, seed, 0

    def __enter__(self) -> "ForkServer":
        self._root = Path(tempfile.mkdtemp(prefix="pardemo-soak-"))
        (self._root / "shared").mkdir()
        become_subreaper()
        for finalizer in list(compat.finalizers):
            finalizer.atexit = False  # torch's libraries would be taken down in every case
        gc.collect()
        gc.freeze()
        self._helpers = frozenset(process.pid for process in running())  # of the libraries
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._helpers)
        shutil.rmtree(self._root, ignore_errors=True)

    def run(self, name: str, number: int, limit_s: float = LIMIT_S) -> Result:
        """Runs a case to its end and looks for what is left."""
        kind, begin = self._kinds[name], time.monotonic()
        self._count += 1
        folder = self._root / str(self._count)
        work, temporary = folder / "work", folder / "t"
        for each in (work, temporary):
            each.mkdir(parents=True)
        way = kind.way(number, self._seed)
        case = Case(name, number, self._seed, way, work, self._root / "shared")
        leftovers = Leftovers(temporary, kind.leaves.get(way, ()), self._helpers)
        sent, delay_s = kind.signals.get(way), kind.delay_s(number, self._seed)
        try:
            outcome = self._forked(kind.run, case, leftovers, limit_s, sent, delay_s)
            if kind.then is not None and "skipped" not in outcome:
                outcome = self._forked(kind.then, case, leftovers, limit_s) | outcome
            leftovers.look()
        finally:
            end_all(self._helpers)
            shutil.rmtree(folder, ignore_errors=True)
        return Result(name, number, way, left=leftovers.found, seconds=time.monotonic() - begin, **outcome)

    def _forked(
        self, run: Callable[[Case], object], case: Case, leftovers: Leftovers, limit_s: float,
        number: int | None = None, delay_s: float = 0.0,
    ) -> dict[str, Any]:  # fmt: skip
        """Forks one process of a case, sends it its signal, ends it at its limit: the fields of its :class:`Result`."""
        folder, server = case.folder.parent, os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(run, case, folder, server)
        limit, due, sent, hang, seen = Deadline(limit_s, [pid]), None, None, False, 0.0
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            now = time.monotonic()
            if not limit.left_s() and not hang:
                hang = True
                os.kill(pid, signal.SIGUSR2)  # it writes where it is
                time.sleep(0.5)
                os.kill(pid, signal.SIGKILL)
            if number is not None and due is None and (folder / BEGUN).exists():
                due = now + delay_s
            if due is not None and now >= due and sent is None:
                os.kill(pid, number)
                sent = Deadline(NOTICED_WITHIN_S, [pid])
            if sent is not None:
                sent.left_s()
            if now - seen > SEEN_EVERY_S:
                seen = now
                leftovers.processes()
            time.sleep(0.005)
        leftovers.end_processes()
        said: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # it was killed before its end
            said = json.loads((folder / OUTCOME).read_text())
            (folder / OUTCOME).unlink()
        leftovers.found["leaked_sockets"] += said.pop("sockets", [])
        outcome = {"hang": True} if hang else _judged(said, os.waitstatus_to_exitcode(ended[1]), number, sent)
        if {"hang", "wrong", "lost"} & outcome.keys():
            outcome["told"] = (folder / OUTPUT).read_text(errors="replace")[-OUTPUT_TOLD:]
        return outcome


def _judged(said: dict[str, str], code: int, number: int | None, sent: Deadline | None) -> dict[str, Any]:
    """What became of a process that ended in time: what it said, or how it ended; no fault where a signal missed it."""
    if said.keys() & {"skipped", "wrong"}:
        return said
    if "not_reached" in said and sent is not None and not sent.left_s():
        return {"wrong": f"the work went on for {sent.clock_s:.0f} s after its signal, to its end"}
    if "told" in said and number is not None and sent is None:
        return {"not_reached": "the case was over before its signal"}
    if said or (number is not None and code == -number):
        return said
    return {"wrong": f"the case's process ended: {exit_text(code)}"}


def _child(run: Callable[[Case], object], case: Case, folder: Path, server: int) -> NoReturn:
    """The forked process: runs the case, writes what became of it, and ends without a word to the libraries."""
    said: dict[str, Any] = {}
    try:
        end_with_parent(server)
        _settle_in(case, folder)
        before = open_sockets(os.getpid())
        try:
            said = _outcome(run, case)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:  # between the two lines
            said = {"not_reached": LATE}
        if "told" in said:  # what failed has objects in its traceback that hold sockets
            said["sockets"] = left_open(before)
    except BaseException as error:
        traceback.print_exc()
        said = {"wrong": f"{type(error).__name__}: {error}"}
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            (folder / OUTCOME).write_text(json.dumps(said))
        os._exit(0)


def _outcome(run: Callable[[Case], object], case: Case) -> dict[str, Any]:
    """What became of the case: one of ``told``, ``skipped``, ``not_reached``, ``lost``, ``wrong``."""
    from soak.common import nothing_runs

    try:
        told = run(case)
        nothing_runs()
    except Skipped as reason:
        return {"skipped": str(reason)}
    except NotReached as reason:
        return {"not_reached": str(reason)}
    except Lost as reason:
        return {"lost": str(reason)}
    except Wrong as reason:
        return {"wrong": str(reason)}
    except KeyboardInterrupt:  # none that the case awaited
        return {"not_reached": LATE}
    return {"told": "" if told is None else str(told)}


def _settle_in(case: Case, folder: Path) -> None:
    """Makes the process what a shell starts: its own session, streams, temporary folder, signals, random numbers."""
    os.setsid()
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = open(1, "w", 1, closefd=False), open(2, "w", 1, closefd=False)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(
        TMPDIR=str(folder / "t"),
        PARDEMO_KEY=str(case.shared / "key"),  # not the user's own
        TORCHINDUCTOR_CACHE_DIR=str(case.shared / "inductor"),  # a cache is no leak
    )
    os.environ.pop("PARDEMO_OUT", None)
    tempfile.tempdir = None
    os.chdir(case.folder)
    random.seed(f"{case.seed} {case.kind} {case.number} else")
    with contextlib.suppress(OSError):  # what it mounts is gone with its last process; small_disk() says if not allowed
        namespaces.unshare(CLONE_NEWNS)
    fork_server.fork_here()
