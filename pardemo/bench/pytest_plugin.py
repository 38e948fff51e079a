"""Twenty tests on two ranks: with the plug-in, with ``torch.multiprocessing.spawn``, with torch's own test class.

Each figure is a whole run of pytest in a process of its own, from the start of Python to its end: with the plug-in most
of it is one start, of pytest, of torch in it, and of torch with its compiler in the process that ranks are forked from.
What a further test takes stands in a row of its own.
"""

import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from pardemo.bench import BenchRow, compare

TESTS = 20
ROUNDS = 1  # twenty tests are a round of repetitions
TARGET = 20.0
MORE = 10  # times as many tests, of which what a further test takes is seen

BODY = """
    total = torch.full((1024,), float(rank + k))
    dist.all_reduce(total)
    assert total.tolist() == [1.0 + 2 * k] * 1024
"""
PLUG_IN = f"""
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
@pytest.mark.parametrize("k", range({TESTS}))
def test_sum(rank, k):{BODY}
"""
SPAWN = f"""
import pytest, torch, torch.distributed as dist, torch.multiprocessing as mp

def body(rank, store, k):
    dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=2){BODY}
    dist.destroy_process_group()

@pytest.mark.parametrize("k", range({TESTS}))
def test_sum(tmp_path, k):
    mp.spawn(body, args=(tmp_path / "store", k), nprocs=2)
"""
TORCHS_CLASS = f"""
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class TestSum(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

def body(rank, store, k):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2){BODY}
    dist.destroy_process_group()

for k in range({TESTS}):
    setattr(TestSum, f"test_sum_{{k}}", lambda self, k=k: body(self.rank, self.file_name, k))
"""
#: What torch's class takes from a package for comparing texts, which no test here does: where it is not installed.
EXPECTTEST = """
from unittest import TestCase
"""


def _pytest_s(folder: str, name: str, source: str, tests: int = TESTS) -> float:
    path = Path(folder) / f"test_{name}.py"
    path.write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", folder]
    begin = time.perf_counter()
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=900, check=False, cwd=folder)
    seconds = time.perf_counter() - begin
    if done.returncode or f"{tests} passed" not in done.stdout:
        raise RuntimeError(f"the tests with {name} did not pass: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds


def rows() -> list[BenchRow]:
    ours, more, spawn, torchs = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        if find_spec("expecttest") is None:
            Path(folder, "expecttest.py").write_text(EXPECTTEST)
        _pytest_s(folder, "plug_in", PLUG_IN)  # what all of them load has been read from the disk then
        for _ in range(ROUNDS):
            ours.append(_pytest_s(folder, "plug_in", PLUG_IN))
            longer = PLUG_IN.replace(f"range({TESTS})", f"range({MORE * TESTS})")
            more.append(_pytest_s(folder, "longer", longer, MORE * TESTS))
            spawn.append(_pytest_s(folder, "spawn", SPAWN))
            torchs.append(_pytest_s(folder, "torchs_class", TORCHS_CLASS))
    each = [(longer - once) / ((MORE - 1) * TESTS) for longer, once in zip(more, ours, strict=True)]
    further = "a further test on 2 ranks, which are warm by then: torch.multiprocessing.spawn, whose ranks never are"
    what = f"{TESTS} tests on 2 ranks, a whole run of pytest"
    return [
        compare("pytest.spawn", ours, spawn, "s", TARGET, f"{what}: torch.multiprocessing.spawn"),
        compare("pytest.each", each, [seconds / TESTS for seconds in spawn], "s", TARGET, further),
        compare("pytest.torch_class", ours, torchs, "s", TARGET, f"{what}: torch's MultiProcessTestCase"),
    ]
