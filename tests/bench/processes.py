"""What takes a process of its own: imports, starts of ranks, a run of pytest, a plan.

Imports little itself: :func:`torch.multiprocessing.spawn` has this module imported in each process that it starts.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from bench.table import PEAK_MIB, BenchRow, compare, process

RANKS = 4
TARGET = 50.0  # times as fast as torch's launchers


def importing(rounds: int = 5) -> list[BenchRow]:
    """``import pardemo`` in a fresh interpreter, against the tenth of a second that it may take, and torch's import."""
    probe = "import json, sys, time; begin = time.perf_counter(); import {}; took_s = time.perf_counter() - begin\n"
    ours, of_torch = [], []
    for _ in range(rounds):
        for name, seconds in (("pardemo", ours), ("torch", of_torch)):
            took_s, loaded = process(f"{probe.format(name)}print(json.dumps([took_s, 'torch' in sys.modules]))")
            if loaded and name == "pardemo":
                raise RuntimeError("import pardemo loads torch")
            seconds.append(took_s)
    return [
        compare("import", ours, [0.1] * rounds, "s", 1.0, "the limit of 0.1 s, without torch"),
        compare("import.torch", ours, of_torch, "s", None, "import torch"),
    ]


def sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    if total != RANKS * (RANKS - 1) / 2:
        raise RuntimeError(f"the ranks' sum is {total.item()}")
    return total.item()


def _spawned(rank: int, store: str) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    sum_of_ranks()
    dist.destroy_process_group()


def _spawn() -> None:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_spawned, args=(os.path.join(folder, "store"),), nprocs=RANKS)


def _torchrun() -> None:
    torchrun(RANKS, "-m", "pardemo.world", f"{__name__}:sum_of_ranks")


def torchrun(ranks: int, *arguments: str) -> None:
    """A program on so many ranks, which has the modules of this process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*command, *arguments], check=True, capture_output=True, timeout=300, env=environment)


def launch(rounds: int = 3) -> list[BenchRow]:
    """Four ranks that agree on a sum: a warm World, a new World, ``torch.multiprocessing.spawn``, torchrun."""
    from pardemo import World

    def new_world() -> None:
        with World(RANKS, preload=[__name__]) as fresh:
            fresh.run(sum_of_ranks)

    with World(RANKS, preload=[__name__]) as world:  # what ranks are forked from is warm from here on
        world.run(sum_of_ranks)
        ways = {
            "spawn": _spawn, "torchrun": _torchrun, "new_world": new_world, "warm_run": lambda: world.run(sum_of_ranks),
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                begin = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - begin)
    peers = {
        "spawn": ("", TARGET, "mp.spawn, 4 ranks, torch alone"),
        "torchrun": (".torchrun", None, "torchrun, 4 ranks"),
    }
    return [
        compare(f"launch.{ours}{suffix}", seconds[ours], seconds[peer], "s", target, note)
        for ours in ("new_world", "warm_run")
        for peer, (suffix, target, note) in peers.items()
    ]


TESTS, MORE = 20, 10  # tests; times as many, of which what a further test takes is seen
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


def pytest_plugin() -> list[BenchRow]:
    """Twenty tests on two ranks: with the plug-in, with ``torch.multiprocessing.spawn``, with torch's own test class.

    Each figure is a whole run of pytest in a process of its own, from the start of Python to its end: with the plug-in
    most of it is one start, of pytest, of torch in it, and of torch with its compiler in the process that ranks are
    forked from. What a further test takes stands in a row of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        if find_spec("expecttest") is None:  # torch's class imports it, for comparing texts; no test here does
            Path(folder, "expecttest.py").write_text("from unittest import TestCase\n")
        _pytest_s(folder, "plug_in", PLUG_IN)  # what all of them load has been read from the disk then
        ours = _pytest_s(folder, "plug_in", PLUG_IN)
        longer = PLUG_IN.replace(f"range({TESTS})", f"range({MORE * TESTS})")
        each = (_pytest_s(folder, "longer", longer, MORE * TESTS) - ours) / ((MORE - 1) * TESTS)
        spawn, torchs = (_pytest_s(folder, *kind) for kind in (("spawn", SPAWN), ("torchs_class", TORCHS_CLASS)))
    further = "a further test on 2 ranks, which are warm by then: torch.multiprocessing.spawn, whose ranks never are"
    what = f"{TESTS} tests on 2 ranks, a whole run of pytest"
    return [
        compare("pytest.spawn", [ours], [spawn], "s", 20.0, f"{what}: torch.multiprocessing.spawn"),
        compare("pytest.each", [each], [spawn / TESTS], "s", 20.0, further),
        compare("pytest.torch_class", [ours], [torchs], "s", 20.0, f"{what}: torch's MultiProcessTestCase"),
    ]


DRY_RUN = f"""{PEAK_MIB}
import json
import torch
torch.set_num_threads(2)
from pardemo.book.chapters.baichuan2_plan import cuda_peak
from pardemo.planner.dry_run.runner import dry_run
print(json.dumps([dry_run(cuda_peak.job()).seconds, peak_mib()]))
"""
TENSORS = """
import json, sys
from statistics import fmean
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from dry_rows import planned_and_run, small_jobs
from pardemo.planner.layouts.memory import predict_memory
errors = []
for job, layout, run in (planned_and_run(*case) for case in small_jobs()):
    errors.append(100 * abs(predict_memory(job, layout).tensors / run.peak_bytes - 1))
print(json.dumps([fmean(errors), max(errors)]))
"""


def plan() -> list[BenchRow]:
    """The dry run of Baichuan2-13B with LoRA at batch 8 × 1024, a table without one, and how far the two are apart.

    There is nothing to race against: the peer is the limit that is asked for, on two cores.
    """
    rounds = 3
    seconds, mib = zip(*(process(DRY_RUN) for _ in range(rounds)), strict=True)
    mean, worst = process(TENSORS, str(Path(__file__).parents[1]))
    table = ["--model", "llama3-8b", "--full", "--gpus", "8", "--json"]
    tables = [_plan_s(table) for _ in range(rounds)]
    return [
        compare("plan.dry_run", seconds, [5.0] * rounds, "s", 1.0, "the limit for 13B, LoRA, 8 × 1024"),
        compare("plan.memory", mib, [2048.0] * rounds, "MiB", 1.0, "the limit, of the whole process"),
        compare("plan.tensors", [mean], [2.0], "%", 1.0, "the limit; tensors of 60 jobs beside dry runs, mean"),
        compare("plan.tensors.worst", [worst], [10.0], "%", 1.0, "the limit; the worst of them"),
        compare("plan.table", tables, [1.0] * rounds, "s", 1.0, "the limit; llama3-8b in full, 8 GPUs, all rows"),
    ]


def _plan_s(arguments: list[str]) -> float:
    """Seconds of the command, as a user has them."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pardemo", "plan", *arguments], capture_output=True, check=True)
    assert json.loads(done.stdout)["rows"]
    return time.perf_counter() - begin
