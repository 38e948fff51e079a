"""Faults of ``pardemo measure``: scripts that die, hang or print garbage; an interrupt; a full disk."""

import json
import re
import signal
from functools import partial
from pathlib import Path

from soak.case import Case, NotReached, fault
from soak.common import LONG_S, called, one_line, small_disk

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
WHO, WHEN = {who}, {when}
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    mine = dist.get_rank() == WHO and step == WHEN
    if mine:
        {does}
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
    "garbage": (r"""os.write(1, os.urandom(5000) + b'\x1b[2J{"ranks": 7}\n' * 50)""", ""),
    "garbage on stderr": (r"os.write(2, os.urandom(5000) + b'\n\x00' * 500)", ""),
    "closed streams": ("os.close(1), os.close(2)", ""),
}


def _write(case: Case, does: str = "pass", steps: int = 6) -> int:
    """Writes the script, script.py; the rank that does something else than the other one."""
    who, when = case.rng.randrange(2), case.rng.randrange(3)
    Path("script.py").write_text(SCRIPT.format(who=who, when=when, does=does, steps=steps))
    return who


def _measured(*options: object, limit: float = LONG_S) -> tuple[int, str]:
    return called("measure", "--ranks", 2, "--steps", 1, "--timeout", limit, *options, "--", "script.py")


@fault("measure/script", FAULTS, weight=3)
def _script(case: Case) -> str:
    """One rank of the script goes wrong: one line that names it, status 2; or, where it only prints, a measurement."""
    does, says = FAULTS[case.way]
    who = _write(case, does)
    status, told = _measured("--json", limit=10 if case.way in ("hangs", "stops", "sys.exit") else LONG_S)
    if not says:
        case.expect(status == 0, f"status {status}: {told[-600:]}")
        return told[-200:]
    last = next((line for line in told.splitlines() if line.startswith("pardemo measure: ")), "")
    case.expect(status == 2 and re.search(says.format(who=who), last), f"status {status}: {told[-600:]}")
    return last


@fault("measure/full disk")
def _full_disk(case: Case) -> str:
    """The disk of ``--out`` is too small: one line that says so, and no file is half written; then there is room."""
    _write(case)
    status, told = _measured("--out", "whole")
    case.expect(status == 0, f"status {status}: {told[-600:]}")
    need = sum(4096 * -(-made.stat().st_size // 4096) for made in Path("whole").iterdir())  # a disk has whole pages
    out = case.folder / "small"
    measure = partial(_measured, "--out", out)
    with small_disk(out, 4096 * case.rng.randrange(1, need // 4096)):
        status, told = measure()
        case.expect(status == 2 and "no space left" in one_line(told).lower(), f"status {status}: {told[-600:]}")
        half = [name for name in _names(out) if name.startswith(".")]
        case.expect(not half, f"left half written: {half}")
        _check_json(out)
        if (out / "page.html").exists():
            case.expect((out / "page.html").read_text().rstrip().endswith("</html>"), "half a page")
    status, more = measure()
    case.expect(status == 0, f"with room again, status {status}: {more[-600:]}")
    case.expect(_names(out) == _names(Path("whole")), f"with room again, there are {_names(out)}")
    return one_line(told)


def _check_json(folder: Path) -> None:
    for path in folder.glob("*.json"):
        json.loads(path.read_text())


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
#: A command that is killed by SIGKILL removes nothing.
LEAVES = {"SIGKILL": ("pardemo-copy-*", "pardemo-measure-*")}


@fault("measure/interrupted", SIGNALS, signals=SIGNALS, within_s=0.8, leaves=LEAVES)
def _interrupted(case: Case) -> str:
    """The command is interrupted or ended at any moment: nothing runs on, and no file is half written."""
    _write(case, steps=10**9)
    case.begin()
    status, told = _measured("--copy", "--out", "made")
    case.expect(status in (0, 130, 143), f"status {status}: {told[-600:]}")
    _check_json(Path("made"))
    if status == 0:
        raise NotReached("the script was measured before its signal")
    return told[-200:]
