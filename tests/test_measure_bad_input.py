"""What goes wrong with a script, or with the command around it: one clear line, nothing left running, nothing lost."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from conftest import few, says

from pardemo import cli, measure
from pardemo.script.runtime import runner
from pardemo.script.step import measurement

#: A model that trains, alone or under DDP; each script of this file begins with it.
BEGIN = """
import os, sys, time, torch, torch.distributed as dist
def train(steps=9):
    model = torch.nn.Linear(64, 64)
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
"""


def write(folder, source, name="bad.py"):
    (folder / name).write_text(BEGIN + textwrap.dedent(source))
    return name


def line_of(source):
    """The line of a script that holds ``# here``."""
    text = BEGIN + textwrap.dedent(source)
    return 1 + next(number for number, line in enumerate(text.splitlines()) if "# here" in line)


def processes():
    """This process's descendants, but for those that ranks are forked from: they lead sessions of their own."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if os.getsid(process.pid) != process.pid and "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process.pid)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory, monkeypatch):
    """No process and no temporary folder outlives a run.

    A data loader's workers make sockets in that folder, and that of a test has too long a path for these: the worker
    says so, and the script waits for its data for ever.
    """
    temporary = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = processes()
    yield temporary
    until = time.monotonic() + 120
    while (left := processes() - before) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left
    assert not [name for name in os.listdir(temporary) if name.startswith(("pardemo-measure", "pardemo-copy"))]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "here"
    made.mkdir()
    return made


def failure(folder, source, ranks=2, **options):
    """The one line that is said of a script."""
    with pytest.raises(measure.ScriptError) as caught:
        measure.script(write(folder, source), ranks=ranks, folder=folder, steps=1, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("os._exit(0)", r"^bad.py: ranks 0, 1 ended by os._exit\(0\), which leaves no report"),
        ("os._exit(3)", "^bad.py: rank 0 died: exit code 3"),
        ("input('name?')", "ranks have no standard input"),
        ("os.kill(os.getpid(), 11)", "^bad.py: rank 0 died: killed by SIGSEGV"),
        ("sys.exit('no data in /data')", "^bad.py ended by sys.exit: no data in /data, at bad.py:11; what it printed"),
        ("train(2)", "^bad.py: the script ended after 2 steps: 3 warm it up"),
        ("from absent import x", "^bad.py: rank 0 raised ModuleNotFoundError: No module named 'absent', at bad.py:11$"),
        ("raise ValueError('a\\nb' * 500)", r"^bad.py: rank 0 raised ValueError: a ba b.* … .*, at bad.py:11$"),
        (
            "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=3)",
            "^bad.py: the script starts 3 processes by torch.multiprocessing.spawn, and the ranks are 2: measure with",
        ),
    ],
)
def test_it_is_told_in_one_line(folder, source, message):
    assert re.search(message, failure(folder, source))


def test_argparse_says_what_it_misses(folder, monkeypatch, capsys):
    source = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()"
    write(folder, source)
    monkeypatch.chdir(folder)
    assert cli.main(["measure", "--ranks", "2", "--", "bad.py"]) == 2
    *printed, last = capsys.readouterr().err.strip().splitlines()
    assert says(printed, "[0]", "bad.py", "--data")
    assert says(last, "bad.py", "2")


def test_a_rank_that_exits_ends_those_that_wait_for_it(folder):
    source = """
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.barrier()
    """
    began = time.monotonic()
    said = failure(folder, source)
    assert says(said, "exit status 3", "bad.py:14", "on rank 1")
    assert time.monotonic() - began < 600, "not the whole limit"


@pytest.mark.parametrize(
    "source",
    [
        # a child that ends, and one that trains on alone, and comes out of the script
        "pid = os.fork()\nif pid == 0:\n    sys.exit(0)\nos.waitpid(pid, 0)\ndist.init_process_group('gloo')\ntrain()",
        "pid = os.fork()\nif pid:\n    dist.init_process_group('gloo')\ntrain(12)",
        # the interpreter ends while steps that count are over: what was seen is not lost
        "dist.init_process_group('gloo')\ntrain(4)\nos._exit(0)",
        "assert sys.stdin.read() == ''\ndist.init_process_group('gloo')\ntrain()",
        "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
        "dist.init_process_group('gloo')\ntrain()",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sys.argv[:] = ['other', '--x']\nos.makedirs('sub', exist_ok=True)\nos.chdir('sub')\n"
        "dist.init_process_group('gloo')\ntrain()",
        "import torch.multiprocessing as mp\nprint(open(__file__).read()[:0])\n"
        "def main(rank, world_size, steps):\n"
        "    os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = 'localhost', str(PORT)\n"
        "    dist.init_process_group('nccl', rank=rank, world_size=world_size)\n    train(steps)\n"
        "if __name__ == '__main__':\n    n = torch.cuda.device_count()\n    mp.spawn(main, args=(n, 9), nprocs=n)",
    ],
    ids=["fork", "fork that trains", "os._exit", "stdin", "thread", "signals, chdir, argv", "mp.spawn"],
)
def test_it_runs_as_well(folder, source):
    measured = measure.script(
        write(folder, source.replace("PORT", str(free_port()))), ranks=2, folder=folder, steps=1, timeout_s=60
    )
    assert [one.kind for one in measured.parallelism] == ["DDP"]
    assert measured.sent_bytes[0] > 0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_more_ranks_than_memory_holds(folder, monkeypatch):
    monkeypatch.setattr(measurement, "RANK_BYTES", psutil.virtual_memory().total / 32)
    said = failure(folder, "train()", ranks=64)
    assert re.fullmatch(r"64 ranks take [\d.]+ GB before the script has anything, and [\d.]+ GB are free: say .*", said)


def test_workers_of_a_data_loader(folder):
    source = """
    from torch.utils.data import DataLoader, TensorDataset
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=4, num_workers=2, persistent_workers=True):
        model(x).sum().backward()
        optimizer.step()
    """
    measured = measure.script(write(folder, source), ranks=2, folder=folder, steps=1)
    assert (measured.ended, measured.steps) == ("enough", 1)


@pytest.mark.parametrize("own_port", [False, True])
def test_a_store_of_the_scripts_own_is_not_counted(folder, own_port):
    source = f"""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = {free_port()} if {own_port} else int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        store.set(f"rank{{rank}}", "x" * 2**20)
    """
    measured = measure.script(write(folder, source), ranks=2, folder=folder)
    for counted, of_calls in zip(measured.wire_bytes, measured.gloo_bytes, strict=True):
        assert counted == pytest.approx(of_calls, rel=0.01), "not the megabyte of each step"


@pytest.mark.parametrize("how", ["init_method", "MASTER_PORT"])
def test_a_port_that_is_in_use(folder, how):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = {
            "init_method": f"dist.init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', "
            "rank=int(os.environ['RANK']), world_size=2)  # here",
            "MASTER_PORT": f"os.environ['MASTER_PORT'] = '{port}'\ndist.init_process_group('gloo')  # here",
        }[how]
        said = failure(folder, source, timeout_s=60)
    assert says(said, "bad.py", "0", "DistNetworkError")
    assert f"port: {port}" in said
    assert "EADDRINUSE" in said
    assert said.endswith(f", at bad.py:{line_of(source)}")


def test_each_rank_of_a_hang_says_where_it_is(folder):
    source = """
    dist.init_process_group("gloo")
    if dist.get_rank() < 2:
        dist.barrier(group=dist.new_group([0, 1], use_local_synchronization=True))
    if dist.get_rank() == 0:
        time.sleep(600)  # here
    if dist.get_rank() < 3:
        dist.all_reduce(torch.ones(10))
    """
    line = line_of(source)
    said = failure(folder, source, ranks=4)
    part, waited = said.rsplit("; ", 1)
    assert part == (
        f"bad.py: the ranks part in call 1 of their group: ranks 1, 2: all-reduce 1 of ranks 0–3, 40 bytes, "
        f"at bad.py:{line + 2}; rank 0 does not come: it is at bad.py:{line}, after barrier 1 of ranks 0, 1, 0 bytes, "
        f"at bad.py:{line - 2}; rank 3 does not come: its script has ended"
    )
    assert re.fullmatch(r"ranks 1, 2 have waited for ranks 0, 3 for [\d.]+ s", waited)


def test_a_script_that_never_steps(folder):
    source = "while True:\n    time.sleep(1)  # here"
    said = failure(folder, source, timeout_s=3)
    told = f"bad.py: not over after 3 s: ranks 0, 1 are at bad.py:{line_of(source)}, before any collective"
    assert said.partition("; the machine was busy")[0] == told


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "binary.py",
            b"\x7fELF\x00\x01",
            "^binary.py: rank 0 raised SyntaxError: source code string cannot contain null",
        ),
        ("latin.py", b"x = '\xe9'\n", "^latin.py: rank 0 raised SyntaxError: .*codec can't decode.*, at latin.py:1$"),
        (
            "latin1.py",
            b"# -*- coding: latin-1 -*-\nassert '\xe9' == chr(233)\n",
            "ended without a step of an optimizer",
        ),
        ("broken.py", b"x = 1\ndef f(:\n", "^broken.py: rank 0 raised SyntaxError: invalid syntax .*, at broken.py:2$"),
        ("dir.py", None, "^dir.py is a folder: name the script in it$"),
    ],
)
def test_a_file_that_is_no_script(folder, name, content, message):
    if content is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(measure.ScriptError) as caught:
        measure.script(name, ranks=1, folder=folder)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_path_with_spaces(folder):
    (folder / "my scripts").mkdir()
    name = write(folder, "from beside import x\ntrain()", "my scripts/train it.py")
    (folder / "my scripts" / "beside.py").write_text("x = 1\n")
    assert measure.script(name, ranks=1, folder=folder, steps=1).steps == 1


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("absent", "absent: rank 0 raised ImportError: No module named absent"),
        ("pack", "pack: rank 0 raised ImportError: No module named pack.__main__; 'pack' is a package and cannot be"),
        ("pack.absent", "pack.absent: rank 0 raised ImportError: No module named pack.absent"),
    ],
)
def test_a_module_that_is_none(folder, module, message):
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").touch()
    with pytest.raises(measure.ScriptError) as caught:
        measure.script(module, ranks=1, module=True, folder=folder)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "file"], "--out is a folder, and file is a file"),
        (["--out", "file/below"], "--out: nothing can be written to file/below: Not a directory"),
        (["--out", "/proc/nowhere"], "--out: nothing can be written to /proc/nowhere"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--timeout", "0"], "--timeout must be above 0, not 0"),
        (["--timeout", "nan"], "--timeout must be above 0, not nan"),
    ],
)
def test_what_is_said_before_anything_runs(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    (folder / "file").touch()
    write(folder, "open('ran', 'w')")
    assert cli.main(["measure", *arguments, "--", "bad.py"]) == 2
    told = capsys.readouterr().err.strip()
    assert message in told
    assert "\n" not in told
    assert not (folder / "ran").exists()


def test_files_that_a_failed_script_wrote_stay_and_a_copys_go(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    write(folder, "open('wrote.pt', 'w').close()\ntrain()")
    assert cli.main(["measure", "--ranks", "1", "--steps", "1", "--copy", "--json", "--", "bad.py"]) == 0
    assert "it wrote wrote.pt" in " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert os.listdir(folder) == ["bad.py"]
    assert cli.main(["measure", "--ranks", "1", "--steps", "1", "--", "bad.py"]) == 0
    assert (folder / "wrote.pt").exists()
    monkeypatch.setattr(runner, "LARGEST_COPY", 10)
    assert cli.main(["measure", "--ranks", "1", "--copy", "--", "bad.py"]) == 2
    assert "--copy would copy" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), few([(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_a_signal_ends_a_run(folder, nothing_is_left, number, status):
    write(folder, "print('it trains', flush=True)\ntime.sleep(600)")
    line = [sys.executable, "-m", "pardemo", "measure", "--ranks", "2", "--copy", "--out", "made", "--", "bad.py"]
    run = subprocess.Popen(line, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for text in run.stderr:
        if "it trains" in text:
            break
    started = psutil.Process(run.pid).children(recursive=True)
    assert len(started) >= 3, "a fork server and two ranks"
    began = time.monotonic()
    os.killpg(run.pid, number)
    rest = [text for text in run.stderr.read().splitlines() if text and "it trains" not in text]
    assert run.wait(120) == status
    assert time.monotonic() - began < 120, "the script sleeps for 600 s"
    said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert rest == [f"pardemo measure: {said}"]
    psutil.wait_procs(started, 120)
    assert [process for process in started if process.is_running()] == []
    assert [name for name in os.listdir(nothing_is_left) if name.startswith("pardemo")] == []
    assert os.listdir(folder / "made") == []
