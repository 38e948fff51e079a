"""``import pardemo`` in a fresh interpreter, against the tenth of a second that it may take, and torch's import."""

import json
import subprocess
import sys

from pardemo.bench import BenchRow, compare

LIMIT_S = 0.1
ROUNDS = 5
_PROBE = """
import json, sys, time
begin = time.perf_counter()
import {module}
print(json.dumps([time.perf_counter() - begin, "torch" in sys.modules]))
"""


def _time(module: str) -> tuple[float, bool]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.format(module=module)], capture_output=True, text=True, check=True, timeout=120
    )
    seconds, torch_loaded = json.loads(done.stdout)
    return seconds, torch_loaded


def rows() -> list[BenchRow]:
    ours, torch_s = [], []
    for _ in range(ROUNDS):
        seconds, torch_loaded = _time("pardemo")
        if torch_loaded:
            raise RuntimeError("import pardemo loads torch")
        ours.append(seconds)
        torch_s.append(_time("torch")[0])
    return [
        compare("import", ours, [LIMIT_S] * ROUNDS, "s", 1.0, "the limit of 0.1 s, without torch"),
        compare("import.torch", ours, torch_s, "s", None, "import torch"),
    ]
