"""The process that scenes are forked from: it has the libraries loaded, and owns whatever a scene leaves behind.

``python -m pardemo.soak.stage SETTINGS`` is started by :class:`pardemo.soak.player.Player`. It says which kinds there
are, then reads ``{"kind": …, "number": …}``, a line each, plays that scene and answers with its ending. It is the
subreaper of all that scenes start, so that a process which outlives its scene becomes its child and is found. It ends,
and everything below it, when its input does.
"""

import contextlib
import dataclasses
import gc
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pardemo import compat, extras
from pardemo.deadline import Deadline
from pardemo.soak import scenes
from pardemo.soak.life import OUTPUT, live, load
from pardemo.soak.remains import GONE_WITHIN_S, Before, Left, descendants, held_by, line_of
from pardemo.soak.scene import LIMIT_S, Kind, Scene
from pardemo.soak.tally import Ending
from pardemo.world import nursery
from pardemo.world.errors import exit_text
from pardemo.world.loading import no_garbage
from pardemo.world.nursery_process import adopt_orphans

OUTPUT_TOLD = 600  # characters of its end that are told where a scene ended without a word
SEEN_EVERY_S = 1.0
#: Work that goes on for longer than this after its signal, to its end, has not noticed it.
NOTICED_WITHIN_S = 5.0


class Stage:
    """Plays scenes, one at a time, each in a process forked from this one, which has one thread.

    Args:
        root: a folder for the scenes' folders. seed: what they are drawn from. kinds: by name.
        is_over: says whether nobody waits for an answer any more; the scene that is played is then given up.
    """

    def __init__(self, root: Path, seed: int, kinds: dict[str, Kind], is_over: Callable[[], bool] = lambda: False):
        self.root, self.seed, self.kinds, self._is_over = root, seed, kinds, is_over
        self.shared = root / "shared"
        self.shared.mkdir(exist_ok=True)
        self._known = frozenset(process.pid for process in descendants())  # helpers of what is loaded
        self._played = 0

    def play(self, name: str, number: int, limit_s: float = LIMIT_S) -> Ending:
        """Plays a scene to its end and looks for what is left."""
        kind, begin = self.kinds[name], time.monotonic()
        self._played += 1
        folder = self.root / str(self._played)
        temporary, work = folder / "t", folder / "work"
        for each in (temporary, work):
            each.mkdir(parents=True)
        way = kind.way(number, self.seed)
        before = Before(temporary, kind.leaves.get(way, ()))
        scene = Scene(name, number, self.seed, way, work, self.shared)
        number_of_signal = kind.signals.get(way)
        delay_s = kind.delay_s(number, self.seed)
        try:
            ending = self._run(kind.play, scene, folder, before, limit_s, number_of_signal, delay_s)
            if kind.after is not None and not ending.skipped:
                then = self._run(kind.after, scene, folder, before, limit_s, None, 0.0)
                ending = _both(ending, then)
            ending = _with_left(ending, before.leaked(self._is_over))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return dataclasses.replace(ending, seconds=time.monotonic() - begin)

    def _run(
        self, play: Callable[[Scene], object], scene: Scene, folder: Path, before: Before, limit_s: float,
        number_of_signal: int | None, delay_s: float,
    ) -> Ending:  # fmt: skip
        """One process of a scene: its verdict, and the processes that it left."""
        (read, write), stage = os.pipe(), os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            live(play, scene, folder, write, stage)
        os.close(write)
        before.see([pid])
        try:
            said, code, hang, sent = self._watch(pid, read, before, limit_s, number_of_signal, delay_s)
        finally:
            os.close(read)
        ending = Ending(scene.kind, scene.number, scene.way, hang=hang)
        became: dict[str, Any] = {} if hang else _verdict(said, code, number_of_signal, sent)
        if hang or "wrong" in became or "lost" in became:
            became = {"told": _end_of(folder / OUTPUT)} | became
        ending = dataclasses.replace(ending, **became)
        return self._without_orphans(_with_left(ending, Left(sockets=tuple(said.get("sockets", ())))), before)

    def _watch(
        self, pid: int, read: int, before: Before, limit_s: float, number_of_signal: int | None, delay_s: float
    ) -> tuple[dict[str, Any], int, bool, Deadline | None]:
        """What the process said, its exit code, whether it had to be ended, and since when it has had its signal."""
        said: dict[str, Any] = {}
        sent: Deadline | None = None
        limit, due, seen = Deadline(limit_s, [pid]), None, 0.0
        ended = os.pidfd_open(pid)
        poller = select.poll()
        for fd in (read, ended):
            poller.register(fd, select.POLLIN)
        hang = False
        try:
            while not nursery.readable(ended):
                now, left_s = time.monotonic(), limit.left_s()
                if not left_s or self._is_over():
                    hang = True
                    _kill_after_its_stacks(pid)
                    break
                if due is not None and now >= due:
                    signal.pidfd_send_signal(ended, number_of_signal or 0)
                    sent, due = Deadline(NOTICED_WITHIN_S, [pid]), None
                if sent is not None:
                    sent.left_s()
                if now - seen > SEEN_EVERY_S:
                    seen = now
                    before.see([process.pid for process in descendants(self._known)])
                wait_s = min(0.2, left_s, due - now if due is not None else left_s)
                if (read, select.POLLIN) in poller.poll(max(0.0, wait_s) * 1000):
                    news = _read_lines(read)
                    said |= news
                    if "begun" in news and number_of_signal is not None:
                        due = time.monotonic() + delay_s
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            while nursery.readable(read) and (news := _read_lines(read)):
                said |= news
        finally:
            os.close(ended)
        return said, code, hang, sent

    def _without_orphans(self, ending: Ending, before: Before) -> Ending:
        """Ends what still runs below this process, once it had its time to end; it, and what it holds, is noted."""
        limit = Deadline(GONE_WITHIN_S, [os.getpid()])
        while left := self._left():
            before.see([process.pid for process in left])
            if not limit.left_s() or self._is_over():
                break
            time.sleep(0.02)
        ending = dataclasses.replace(ending, orphans=(*ending.orphans, *map(line_of, left)))
        ending = _with_left(ending, held_by(left))
        self.end_all()
        return ending

    def _left(self) -> list[Any]:
        _collect()
        return descendants(self._known)

    def end_all(self) -> None:
        """Ends everything that runs below this process."""
        while left := self._left():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.01)


def _collect() -> None:
    """Takes note of the end of all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _verdict(said: dict[str, Any], code: int, number_of_signal: int | None, sent: Deadline | None) -> dict[str, Any]:
    """What became of a scene that was over in time, as a field of its ending: what its process said, or how it ended.

    A scene that was to get a signal, and was over before or beside it, has seen no fault.
    """
    for verdict in ("skipped", "wrong", "lost"):
        if verdict in said:
            return {verdict: said[verdict]}
    if "not_reached" in said and sent is not None and not sent.left_s():
        return {"wrong": f"the work went on for {sent.clock_s:.0f} s after its signal, to its end"}
    if "not_reached" in said:
        return {"not_reached": said["not_reached"]}
    if "told" in said and number_of_signal is not None and sent is None:
        return {"not_reached": "the scene was over before its signal"}
    if "told" in said:
        return {"told": said["told"]}
    if number_of_signal is not None and code == -number_of_signal:
        return {}
    return {"wrong": f"the scene's process ended: {exit_text(code)}"}


def _with_left(ending: Ending, left: Left) -> Ending:
    """The ending with what was left besides."""
    return dataclasses.replace(
        ending,
        sockets=(*ending.sockets, *left.sockets),
        namespaces=(*ending.namespaces, *left.namespaces),
        folders=(*ending.folders, *left.folders),
    )


def _both(one: Ending, then: Ending) -> Ending:
    """A scene of two processes: what is wrong with either is wrong with the scene."""
    both = dataclasses.replace(
        one,
        told=one.told or then.told,
        wrong="; afterwards: ".join(filter(None, (one.wrong, then.wrong))),
        lost=one.lost or then.lost,
        hang=one.hang or then.hang,
        orphans=(*one.orphans, *then.orphans),
        skipped=then.skipped,
    )
    return _with_left(both, Left(then.sockets, then.namespaces))


def _kill_after_its_stacks(pid: int) -> None:
    """Ends a process that hangs, after it has written where it is."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)


def _read_lines(read: int) -> dict[str, Any]:
    news: dict[str, Any] = {}
    for line in os.read(read, 65536).splitlines():  # a message is one write, below a pipe's atomic size
        with contextlib.suppress(ValueError):
            news |= json.loads(line)
    return news


def _end_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[-OUTPUT_TOLD:]
    return ""


def main() -> int:
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints as it is loaded is no answer
    adopt_orphans()
    kinds: dict[str, Kind] = {}
    missing: dict[str, str] = {}
    for group in settings["groups"]:
        try:
            with no_garbage():
                load(group)
                kinds |= scenes.kinds(group)
        except ModuleNotFoundError as error:
            missing[group] = extras.line_of(f"the group {group}", error) or str(error)
    for finalizer in list(compat.finalizers):
        finalizer.atexit = False  # torch's libraries would be taken down in every scene
    gc.collect()
    gc.freeze()
    stage = Stage(Path(settings["root"]), settings["seed"], kinds, is_over=_input_has_ended)
    try:
        weights = {name: kind.weight for name, kind in kinds.items()}
        print(json.dumps({"kinds": weights, "missing": missing}), file=answers, flush=True)
        for line in iter(sys.stdin.readline, ""):
            asked = json.loads(line)
            ending = stage.play(asked["kind"], asked["number"])
            print(json.dumps(dataclasses.asdict(ending)), file=answers, flush=True)
    except BrokenPipeError:
        pass
    finally:
        stage.end_all()
        shutil.rmtree(stage.root, ignore_errors=True)
    return 0


def _input_has_ended() -> bool:
    poller = select.poll()
    poller.register(0, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


if __name__ == "__main__":
    sys.exit(main())
