"""A launcher that is to be killed: a program of its own that runs a script on ranks, as a JSON file says."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from pardemo.deadline import Deadline
from pardemo.prove import runner
from pardemo.prove.layouts import Layout
from pardemo.prove.runner import Options
from pardemo.prove.stopping.recorder import Following, StoppingRecorder
from pardemo.prove.stopping.stops import NEVER, Stop

#: What stands for the folder of a run in the script's line, until each run has one of its own.
FOLDER = "\x02folder\x02"


def in_folder(layout: Layout, saves: Path) -> Layout:
    """A layout whose line has its folder."""
    return replace(layout, line=tuple(word.replace(FOLDER, str(saves)) for word in layout.line))


def follower(saves: str, stop: Stop | None, marker: str) -> Any:
    """What makes the recorder on a rank."""
    return partial(StoppingRecorder, following=Following(saves, stop, marker))


def killed(layout: Layout, options: Options, place: Path, stop: Stop, saves: Path) -> str:
    """Runs the script in a program of its own, and kills that when its time has come; what went wrong, or nothing."""
    saves.mkdir(parents=True, exist_ok=True)
    marker, request = place / "stop", place / "request.json"
    filled, where = in_folder(layout, saves), os.path.abspath(options.folder or os.getcwd())
    request.write_text(json.dumps({
        "ranks": layout.ranks, "values": dict(layout.values), "line": list(filled.line), "saves": str(saves),
        "marker": str(marker), "stop": asdict(stop), "place": str(place / "stopped"), "steps": options.steps,
        "double": options.double, "timeout_s": options.timeout_s, "where": where,
    }), "utf-8")  # fmt: skip
    words = [sys.executable, "-m", "pardemo.prove.stopping.launched", str(request)]
    paths = os.pathsep.join(entry for entry in sys.path if entry)  # it is to find what this process finds
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as launcher:  # fmt: skip
        ranks: list[psutil.Process] = []
        try:
            limit = Deadline(options.timeout_s, [launcher.pid])
            while not marker.exists() and launcher.poll() is None and limit.left_s():
                time.sleep(0.01)
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks = psutil.Process(launcher.pid).children(recursive=True)
        finally:
            launcher.kill()  # SIGKILL: the stop itself; or the end of one that never came
    limit, left = Deadline(10.0, [one.pid for one in ranks]), ranks
    while left and limit.left_s():
        left = psutil.wait_procs(left, timeout=0.1)[1]
    for one in left:
        one.kill()
    psutil.wait_procs(left, timeout=5)
    if not marker.exists():
        said = _read(place / "said")
        return f"before the stop, {said}" if said else NEVER
    return f"{len(left)} processes outlived their launcher by 10 s" if left else ""


def main(request: str) -> None:
    """Runs until it is killed, or until who has started it is gone, which closes its standard input."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    asked = json.loads(Path(request).read_text("utf-8"))
    said = asked["stop"]
    stop = Stop(**{**said, "ranks": tuple(said["ranks"]), "saves_s": tuple(said["saves_s"])})
    options = Options(asked["steps"], asked["double"], asked["where"], asked["timeout_s"])
    options = replace(options, follow=follower(asked["saves"], stop, asked["marker"]))
    layout = Layout(asked["ranks"], asked["values"], tuple(asked["line"]))
    run = runner.ran(layout, options, Path(asked["place"]))
    if run.error:  # it ended before it was killed, and nobody else has heard why
        Path(request).with_name("said").write_text(run.error, "utf-8")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""


def _end_with_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
