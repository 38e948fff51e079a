"""Faults of ``pardemo measure``: scripts that die, hang or print garbage; an interrupt; a port in use; a full disk."""

import json
import os
import re
import signal
import socket
from functools import partial
from pathlib import Path

from pardemo.soak.scene import NotReached, Scene, scene
from pardemo.soak.scenes.parts import LONG_S, called, nothing_below, one_line, small_disk

BEGIN = """
import os, sys, time, torch, torch.distributed as dist
WHO, WHEN = {who}, {when}
dist.init_process_group("gloo"{init})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    mine = dist.get_rank() == WHO and step == WHEN
    if mine:
        {fault}
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
#: What the rank to blame does at a step, and what is told of it; an empty text: the script is measured in spite of it.
FAULTS = {
    "killed": ("os.kill(os.getpid(), 9)", r"rank {who} died: killed by SIGKILL"),
    "exit 3": ("os._exit(3)", r"rank {who} died: exit code 3"),
    "exit 0": ("os._exit(0)", r"rank {who} ended by os\._exit\(0\)|rank {who} died: exit code 0"),
    "sys.exit": ("sys.exit(0)", r"rank {who} does not come: its script has ended"),
    "raises": ("raise ValueError('on purpose')", r"rank {who} raised ValueError: on purpose"),
    "hangs": ("time.sleep(3600)", r"not over after .*rank {who} is at script\.py:10"),
    "stops": ("os.kill(os.getpid(), 19)", r"not over after .*rank {who} is stopped by a signal"),
    "garbage": (r"os.write(1, os.urandom(5000) + b'\x1b[2J{{\"ranks\": 7}}\n' * 50)", ""),
    "garbage on stderr": (r"os.write(2, os.urandom(5000) + b'\n\x00' * 500)", ""),
    "closed streams": ("os.close(1), os.close(2)", ""),
}


def _write(scene: Scene, fault: str, init: str = "") -> tuple[Path, int]:
    who, when = scene.chance.randrange(2), scene.chance.randrange(3)
    path = scene.folder / "script.py"
    path.write_text(BEGIN.format(who=who, when=when, fault=fault.replace("{{", "{").replace("}}", "}"), init=init))
    return path, who


@scene("measure/script", FAULTS, weight=3)
def _script(scene: Scene) -> str:
    """One rank of the script goes wrong: one line that names it, status 2; or, where it only prints, a measurement."""
    fault, says = FAULTS[scene.way]
    path, who = _write(scene, fault)
    limit = 10 if scene.way in ("hangs", "stops", "sys.exit") else LONG_S
    status, told = called("measure", "--ranks", 2, "--steps", 1, "--timeout", limit, "--json", "--", path.name)
    if says:
        last = next((line for line in told.splitlines() if line.startswith("pardemo measure: ")), "")
        named = re.search(says.format(who=who), last) is not None
        scene.expect(status == 2 and named, f"status {status}: {told[-600:]}")
    else:
        last = told[-200:]
        scene.expect(status == 0, f"status {status}: {last}")
    nothing_below()
    return last


@scene("measure/port in use")
def _port_in_use(scene: Scene) -> str:
    """The script asks for a port on which somebody else listens: an error, and no wait for the whole limit."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        init = f", init_method='tcp://127.0.0.1:{port}', rank=int(os.environ['RANK']), world_size=2"
        path, _ = _write(scene, "pass", init)
        status, told = called("measure", "--ranks", 2, "--steps", 1, "--timeout", LONG_S, "--", path.name)
    last = (told.strip().splitlines() or [""])[-1]
    scene.expect(status == 2 and "address already in use" in last.lower(), f"status {status}: {told[-600:]}")
    nothing_below()
    return last


@scene("measure/full disk")
def _full_disk(scene: Scene) -> str:
    """The disk of ``--out`` is too small: one line that says so, and no file is half written; then there is room."""
    path, _ = _write(scene, "pass")
    measure = partial(called, "measure", "--ranks", 2, "--steps", 1, "--timeout", LONG_S, "--out")
    status, told = measure("whole", "--", path.name)
    scene.expect(status == 0, f"status {status}: {told[-600:]}")
    need = sum(4096 * -(-made.stat().st_size // 4096) for made in Path("whole").iterdir())  # a disk has whole pages
    out = scene.folder / "small"
    with small_disk(out, 4096 * scene.chance.randrange(1, need // 4096)):
        status, told = measure(out, "--", path.name)
        scene.expect(status == 2 and "no space left" in one_line(told).lower(), f"status {status}: {told[-600:]}")
        _check_whole(scene, out)
    status, more = measure(out, "--", path.name)
    scene.expect(status == 0, f"with room again, status {status}: {more[-600:]}")
    scene.expect(_names(out) == _names(Path("whole")), f"with room again, there are {_names(out)}")
    nothing_below()
    return one_line(told)


def _check_whole(scene: Scene, out: Path) -> None:
    half = [name for name in _names(out) if name.startswith(".")]
    scene.expect(not half, f"left half written: {half}")
    for path in out.glob("*.json"):
        json.loads(path.read_text())
    if (out / "page.html").exists():
        scene.expect((out / "page.html").read_text().rstrip().endswith("</html>"), "half a page")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}


#: A command that is killed by SIGKILL removes nothing.
LEAVES = {"SIGKILL": ("pardemo-copy-*", "pardemo-measure-*")}


@scene("measure/interrupted", SIGNALS, SIGNALS, within_s=0.8, leaves=LEAVES)
def _interrupted(scene: Scene) -> str:
    """The command is interrupted or ended at any moment: nothing runs on, and no file is half written."""
    _write(scene, "pass")
    path = scene.folder / "script.py"
    path.write_text(path.read_text().replace("range(6)", "range(10**9)"))
    scene.begin()
    status, told = called("measure", "--ranks", 2, "--steps", 1, "--copy", "--out", "made", "--", path.name)
    scene.expect(status in (0, 130, 143), f"status {status}: {told[-600:]}")
    for made in Path("made").glob("*.json") if os.path.isdir("made") else ():
        json.loads(made.read_text())
    nothing_below()
    if status == 0:
        raise NotReached("the script was measured before its signal")
    return told[-200:]
