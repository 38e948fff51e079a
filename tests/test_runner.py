"""``pardemo run`` on small collections of the test's own: order, failures, resume, bad input."""

import errno
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import nbformat
import psutil
import pytest
from conftest import few, gone, says

from pardemo import cli, project
from pardemo.book.run import fingerprint, kernels, parameters, runner
from pardemo.draw import pictures
from pardemo.small_models import classifier as small

GOOD = (
    "from pardemo.claims import Claim, Ledger\nclaims = Ledger('{name}')\n"
    "claims.check(Claim('s09.x', 'a < b'), 1, {measured})\nvalue"
)


@pytest.fixture
def collection(tmp_path, monkeypatch):
    """``collection(name, source…)`` writes a notebook into an own project; returns its folder."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setattr(project, "root", lambda: tmp_path)
    monkeypatch.delenv("PARDEMO_OUT", raising=False)

    def add(name, *cells, parameters="world_size = 2\npreset = 'laptop'\nrate = 0.5", reads=()):
        notebook = nbformat.v4.new_notebook()
        notebook.metadata.pardemo = {"reads": list(reads)}
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        first = nbformat.v4.new_code_cell(parameters)
        first.metadata["tags"] = ["parameters"]
        notebook.cells = [first, *(nbformat.v4.new_code_cell(cell) for cell in cells)]
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
        return tmp_path

    return add


def run(*arguments):
    return cli.main(["run", *map(str, arguments)])


def test_a_run_leaves_everything_behind(collection, capsys):
    root = collection("01_good", "value = world_size * 10", GOOD.format(name="01_good", measured=1))
    out = root / "out"
    begin = time.monotonic()
    assert run("--out", out, "-p", "world_size", "3") == 0
    took_s = time.monotonic() - begin
    executed = nbformat.read(out / "01_good.ipynb", as_version=4)
    assert executed.cells[-1].outputs[-1]["data"]["text/plain"] == "30", "the parameter arrived"
    (outcome,) = json.loads((out / "run.json").read_text())
    assert outcome["status"] == "ok"
    assert 0 < outcome["seconds"] < took_s, "a part of the whole run, not what the clock shows"
    lines = (out / "claims.csv").read_text().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("s09.x,01_good,a < b,,1,1")
    assert "a &lt; b" in (out / "report.html").read_text()
    printed = capsys.readouterr()
    assert "01_good" in printed.err
    assert " ok" in printed.err
    assert not list(out.glob(".*partial*"))


def test_plain_papermill_leaves_claims_beside_its_output(collection):
    root = collection("01_good", GOOD.format(name="01_good", measured=1).replace("value", "claims.rows"))
    (root / "runs").mkdir()
    command = [sys.executable, "-m", "papermill", "notebooks/01_good.ipynb", "runs/mine.ipynb", "--no-progress-bar"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(path.name for path in (root / "runs" / "mine").rglob("*.json")) == ["01_good.json"]
    assert not (root / "outputs").exists()


@pytest.mark.parametrize(
    ("command", "written"),
    [("python -m papermill a.ipynb b.ipynb -p n 2", "b.ipynb"), ("python /x/bin/papermill a.ipynb b.ipynb", "b.ipynb"),
     ("/x/bin/papermill a.ipynb runs/b.ipynb", "runs/b.ipynb"), ("papermill a.ipynb s3://b/c.ipynb", None),
     ("papermill a.ipynb -", None), ("jupyter-lab a.ipynb b.ipynb", None), ("bash -c papermill a.ipynb b.ipynb", None)],
)  # fmt: skip
def test_what_papermill_writes_is_read_from_its_command(command, written):
    found = project.papermills_output(command.split())
    assert (found and found.as_posix()) == written


def test_a_failing_notebook_does_not_stop_the_others(collection, capsys):
    collection("01_bad", "1 + 1", "raise ValueError('no luck')")
    root = collection("02_good", "value = 1", GOOD.format(name="02_good", measured=1))
    assert run("--out", root / "out") == 1
    outcomes = {o["notebook"]: o for o in json.loads((root / "out" / "run.json").read_text())}
    assert outcomes["01_bad"]["status"] == "failed"
    assert outcomes["01_bad"]["error"] == "cell 3: ValueError: no luck"
    assert outcomes["02_good"]["status"] == "ok"
    assert says(capsys.readouterr().err, "01_bad", "3", "ValueError")
    assert "no luck" in (root / "out" / "01_bad.ipynb").read_text(), "the executed copy shows the error"
    assert "no luck" in (root / "out" / "report.html").read_text()


def test_a_failing_claim_fails_the_run(collection, capsys):
    root = collection("01_claim", "value = 1", GOOD.format(name="01_claim", measured=2), "claims.close()")
    assert run("--out", root / "out") == 1
    assert says(capsys.readouterr().err, "ClaimFailed", "1", "1", "s09.x")
    assert cli.main(["claims", str(root / "out")]) == 1


def test_a_kernel_that_dies_and_a_cell_that_hangs_are_failures(collection, capsys):
    collection("01_dies", "import os; os.kill(os.getpid(), 9)")
    root = collection("02_hangs", "import time; time.sleep(60)")
    assert run("--out", root / "out", "--cell-timeout", 3) == 1
    errors = {o["notebook"]: o["error"] for o in json.loads((root / "out" / "run.json").read_text())}
    assert "DeadKernelError" in errors["01_dies"]
    assert "Timeout" in errors["02_hangs"]


WHERE = """import json, os, random, sys
import numpy as np
import psutil
from pardemo import World
loaded = sorted(name for name in ("pandas", "matplotlib.pyplot", "torch") if name in sys.modules)
world = World(2)
ranks = world.run(os.getpid)
told = dict(parent=os.getppid(), pid=os.getpid(), ranks=ranks, server=psutil.Process(ranks[0]).ppid(), loaded=loaded,
            random=[random.random(), float(np.random.rand())], later=os.environ.get("PARDEMO_LATER"), cwd=os.getcwd())
with open("{name}.json", "w") as stream:
    json.dump(told, stream)"""


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux")
def test_kernels_are_processes_of_their_own_with_the_libraries_loaded(collection, monkeypatch):
    monkeypatch.setenv("PARDEMO_LATER", "set after the first kernel of this process")
    collection("01_a", WHERE.format(name="01_a"))
    root = collection("02_b", WHERE.format(name="02_b"))
    assert run("--out", root / "out") == 0
    a, b = (json.loads((root / "notebooks" / f"{name}.json").read_text()) for name in ("01_a", "02_b"))
    assert a["parent"] == b["parent"] != os.getpid(), "one process that both were forked from"
    assert a["loaded"] == ["matplotlib.pyplot", "pandas", "torch"]
    for told in (a, b):
        assert psutil.pid_exists(told["parent"])
        assert gone([told["pid"], told["server"], *told["ranks"]]), "nothing of the kernel's is left"
        assert told["later"] == "set after the first kernel of this process"
        assert told["cwd"] == str(root / "notebooks")
    assert a["server"] != b["server"]
    assert not set(a["random"]) & set(b["random"])


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux")
def test_kernels_end_when_they_are_asked_to(collection, monkeypatch):
    """None is sent a signal: one in five waited for a thread that had ended before it, for 2.6 seconds."""
    from jupyter_client.provisioning.local_provisioner import LocalProvisioner

    terminated, real = [], LocalProvisioner.terminate

    async def terminate(self, *arguments, **options):
        terminated.append(self.pid)
        return await real(self, *arguments, **options)

    monkeypatch.setattr(LocalProvisioner, "terminate", terminate)
    for number in range(1, 13):
        root = collection(f"{number:02}_short")
    assert run("--out", root / "out") == 0
    assert terminated == []


RUNS = """import pathlib, sys
from pardemo import cli, project
project.root = lambda: pathlib.Path(sys.argv[1])
sys.exit(cli.main(['run', '--out', sys.argv[2]]))"""


def wait_for_kernel(root, process):
    """What a notebook of :data:`WHERE`, 01_a, tells of its processes, as soon as it does."""
    told, until = root / "notebooks" / "01_a.json", time.monotonic() + 120
    while not told.exists() or not told.read_text().endswith("}"):  # it is written in pieces
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.1)
    return json.loads(told.read_text())


@pytest.mark.parametrize("how", few([signal.SIGKILL, signal.SIGTERM]))
def test_no_kernel_outlives_its_run(collection, tmp_path, how):
    root = collection("01_a", WHERE.format(name="01_a"), "import time; time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", RUNS, root, root / "out"], stderr=subprocess.DEVNULL) as process:
        told = wait_for_kernel(root, process)
        process.send_signal(how)
        process.wait(60)
    assert gone([told["parent"], told["pid"], told["server"], *told["ranks"]], within_s=60)
    assert how == signal.SIGTERM or not (root / "out" / "01_a.ipynb").exists(), "half a copy has no name"
    assert json.loads((root / "out" / "run.json").read_text()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="kernels talk through sockets in a folder on Linux")
def test_a_run_that_is_told_to_end_leaves_no_sockets_and_no_connection_file(collection, tmp_path):
    root = collection("01_a", WHERE.format(name="01_a"), "import time; time.sleep(600)")
    runtime = tmp_path / "runtime"
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:  # short enough for sockets
        process = subprocess.Popen(
            [sys.executable, "-c", RUNS, root, root / "out"], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": temporary, "JUPYTER_RUNTIME_DIR": str(runtime),
                 "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")},
        )  # fmt: skip
        try:
            told = wait_for_kernel(root, process)
            (sockets,) = (name for name in os.listdir(temporary) if name.startswith("pardemo-kernel-"))
            assert "kernel.json" in os.listdir(f"{temporary}/{sockets}"), "the connection file lies with the sockets"
            process.send_signal(signal.SIGTERM)
            error = process.communicate(timeout=60)[1]
        finally:
            process.kill()  # where something above was wrong; it takes its kernel along
        assert process.returncode == 128 + signal.SIGTERM
        assert error.splitlines()[-1] == "pardemo run: ended by SIGTERM"
        assert gone([told["parent"], told["pid"], told["server"], *told["ranks"]], within_s=60)
        assert os.listdir(temporary) == []
        assert not runtime.exists() or list(runtime.iterdir()) == []


def test_a_kernel_whose_start_is_interrupted_is_gone_before_its_folder_is(tmp_path, monkeypatch):
    """Alone it would write its connection file, with the folder that it is in, when it comes to that."""
    from jupyter_client.provisioning import local_provisioner

    writes = f"import os, time\ntime.sleep(1)\nos.makedirs({str(tmp_path / 'sockets')!r})\ntime.sleep(60)"
    launch = lambda *arguments, **options: subprocess.Popen([sys.executable, "-c", writes])  # noqa: E731
    monkeypatch.setattr(local_provisioner, "launch_kernel", launch)
    begun = []

    def interrupted():
        with kernels.none_left():
            begun.append(local_provisioner.launch_kernel(["python"], cwd="."))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert begun[0].poll() == -signal.SIGKILL
    assert local_provisioner.launch_kernel is launch
    assert not list(tmp_path.iterdir())


def test_kernels_have_libraries_loaded_where_several_notebooks_name_some(tmp_path):
    """What one or two notebooks want they load themselves: all of it would take longer."""
    texts = {"01_a": "", "02_b": "pardemo.peers.megatron", "03_c": "pardemo.finetune.train", "04_d": "torch"}
    for name, text in texts.items():
        cell = nbformat.v4.new_code_cell(f"%%ranks 2 --preload {text}")
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / name)
    notebooks = {name: tmp_path / name for name in texts}
    assert kernels.with_libraries(notebooks) == frozenset()
    cell = nbformat.v4.new_code_cell("from pardemo.peers.pytorch import fsdp")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "04_d")
    assert kernels.with_libraries(notebooks) == {"02_b", "03_c", "04_d"}


def test_resume_skips_what_finished_with_the_same_sources_and_parameters(collection, capsys):
    root = collection("01_a", "import os, time; value = time.time_ns()", GOOD.format(name="01_a", measured=1))
    collection("02_b", "raise KeyError")
    out = root / "out"

    def seconds():
        return [o["seconds"] for o in json.loads((out / "run.json").read_text())]

    assert run("--out", out) == 1
    first = seconds()
    assert run("--out", out, "--resume") == 1
    second = seconds()
    assert second[0] == first[0], "finished: not run again"
    assert second[1] != first[1], "failed: run again"
    assert "finished earlier" in capsys.readouterr().err
    assert run("01", "--out", out, "--resume", "-p", "rate", "0.25") == 0
    assert seconds()[0] != first[0], "another parameter: run again"
    third = seconds()
    collection("01_a", "value = 1", GOOD.format(name="01_a", measured=1))
    assert run("01", "--out", out, "--resume", "-p", "rate", "0.25") == 0
    assert seconds()[0] != third[0], "another source: run again"
    assert len(seconds()) == 2, "what an earlier run left is kept"


PICTURE = """from pardemo.draw import style
fig, ax = style.new()
style.save(fig, '{name}', 'a picture of {name}')"""


def test_two_notebooks_of_one_chapter_run_by_its_number_and_each_has_its_own_pictures(collection):
    collection("01_first", "value = 1", GOOD.format(name="01_first", measured=1), PICTURE.format(name="first_one"))
    root = collection("01_second", PICTURE.format(name="second_two"), PICTURE.format(name="second_more"))
    collection("02_other", "raise KeyError")
    out = root / "out"
    for names in (["01"], ["01_first"]):  # the second time it clears away what it left before, and no more
        assert run(*names, "--out", out) == 0
        assert sorted(path.stem for path in out.glob("*.ipynb")) == ["01_first", "01_second"]
        assert sorted(path.stem for path in (out / "figures").glob("*.svg")) == [
            "first_one",
            "second_more",
            "second_two",
        ]
        assert [path.stem for path in pictures.of_notebook(out, "01_first")] == ["first_one"]
        assert [path.stem for path in pictures.of_notebook(out, "01_second")] == ["second_more", "second_two"]
    assert (out / "report.html").read_text().count("<img ") == 3
    assert 'rel="next">01' in (out / "01_first.html").read_text()


#: A package of which a chapter uses a part: by an import, an import of an import, a name in a text, its own room.
PACKAGE = {
    "__init__": "from importlib import import_module\n_HOME = {'World': 'pardemo.world', 'No': 'pardemo.other'}",
    "world": "START = 'pardemo.rank:main'", "rank": "", "other": "", "elsewhere": "", "unused/__init__": "",
    "used/__init__": "from importlib import import_module\n_HOME = {'late': 'late'}",
    "used/late": "import pardemo.deep", "deep": "", "book/__init__": "",
    "book/chapters/__init__": "", "book/chapters/a/__init__": "", "book/chapters/a/figures": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "matters"),
    [
        *[(f"package/{name}.py", True) for name in ("world", "rank", "used/late", "deep", "book/chapters/a/figures")],
        *[(f"package/{name}.py", False) for name in ("elsewhere", "unused/__init__")],
        ("package/used/recipes/tiny.yaml", True), ("package/book/chapters/a/claims.toml", True),
        ("package/unused/e.toml", False), ("package/world/__pycache__/compiled.pyc", False),
        ("data/rows.json", True), ("requirements.txt", True),
    ],
)  # fmt: skip
def test_resume_runs_again_where_what_a_notebook_uses_has_changed(collection, monkeypatch, changed, matters):
    root = collection("01_a", "from pardemo import World\nfrom pardemo.used import (late)")
    monkeypatch.setattr(project, "PACKAGE", root / "package")
    for name, text in PACKAGE.items():
        file = root / "package" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    file = root / changed
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(file.read_text() if file.exists() else "")
    path, out = project.notebooks()["01_a"], root / "out"

    def now():
        for cached in (fingerprint._files, fingerprint._imports, fingerprint._tables):
            cached.cache_clear()
        return fingerprint.with_inputs(fingerprint.of_sources(path, {}), path, out)

    before = now()
    assert now() == before
    with file.open("a") as more:
        more.write("\n# as it is")
    assert (now() != before) == matters


def test_a_large_file_of_data_is_not_read(collection, monkeypatch):
    root = collection("01_a", "value = 1")
    (root / "data").mkdir()
    large = root / "data" / "weights"
    large.write_text("three")
    path = project.notebooks()["01_a"]
    monkeypatch.setattr(fingerprint, "LARGE_BYTES", 4)
    os.utime(large, (1, 1))
    before = fingerprint.of_sources(path, {})
    large.write_text("other")
    os.utime(large, (1, 1))
    assert fingerprint.of_sources(path, {}) == before, "size and time stand for what is in it"
    os.utime(large, (2, 2))
    assert fingerprint.of_sources(path, {}) != before


def test_resume_runs_again_where_what_a_notebook_reads_of_others_has_changed(collection, monkeypatch):
    collection("00_machine", "1")
    collection("01_reads", "1", reads=["machine.json"])
    root = collection("02_does_not", "1")
    out, executed = root / "out", []

    def execute(name, path, parameters, folder, *rest):
        executed.append(name)
        if name == "00_machine" or not (folder / "machine.json").exists():  # the reader makes it where it is not there
            (folder / "machine.json").write_text(f"made by {name} as the {len(executed)}th")
        (folder / f"{name}.ipynb").write_text(path.read_text())
        return runner.NotebookEnding(name, "ok")

    def rerun(*names):
        executed.clear()
        runner.run_notebooks(names, out=out, resume=True, say=lambda *a, **k: None)
        return executed

    monkeypatch.setattr(runner, "_execute", execute)
    assert rerun() == ["00_machine", "01_reads", "02_does_not"]
    assert rerun() == []
    (out / "machine.json").write_text("of another day")
    assert rerun() == ["01_reads"]
    (out / "machine.json").unlink()
    assert rerun() == ["01_reads"]
    assert rerun() == [], "what it made itself is what it has read"


#: What in a notebook's source reads another notebook's results -> what its metadata then names.
READING = {
    "machine.profile(": "machine.json",
    "read_claims()": "claims/0[0-8]_*.json",
    "scorecard.find()": "claims/*.json",
    "plan_cuda.json": "outputs/reference/plan_cuda.json",
    'run / "adapter"': "finetune/tiny-cpu/adapter/*",
}


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_a_notebook_names_what_it_reads_of_others(name):
    path = project.notebooks()[name]
    source = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
    named = fingerprint.reads(path)
    for words, pattern in READING.items():
        writes = words == 'run / "adapter"' and name.endswith("_baichuan2_finetune")  # it trains that adapter
        assert (words in source and not writes) == (pattern in named), words


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["99_nothing"], "no notebook '99_nothing'; there are: 01_good"),
        (["-p", "colour", "red"], "no selected notebook has a parameter 'colour'; there are: preset, rate, world_size"),
        (["-p", "world_size", "two"], "parameter world_size of 01_good is a int (default 2), not 'two'"),
        (["-p", "world_size", "2.5"], "is a int (default 2), not 2.5"),
        (["-p", "world_size", "True"], "is a int (default 2), not True"),
        (["-p", "preset", "3"], "is a str (default 'laptop'), not 3"),
        (["--cell-timeout", "0"], "--cell-timeout must be above 0"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(collection, capsys, arguments, told):
    root = collection("01_good", "1")
    assert run("--out", root / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not (root / "out").exists()


def test_a_whole_number_will_do_where_a_fraction_is_expected(collection):
    collection("01_good", "1")
    path = project.notebooks()
    assert parameters.assign(path, {"rate": 1}) == {"01_good": {"rate": 1}}


def test_an_output_folder_that_cannot_be_written(collection, capsys):
    root = collection("01_good", "1")
    (root / "file").write_text("in the way")
    assert run("--out", root / "file") == 2
    assert says(capsys.readouterr().err, "output", "folder")
    assert (root / "file").read_text() == "in the way"
    assert run("--out", "/proc/nothing") == 2
    assert says(capsys.readouterr().err, "/proc/nothing")


@pytest.fixture
def long_tmpdir(tmp_path, monkeypatch):
    """A temporary folder as batch systems make them: too long for a socket."""
    folder = tmp_path / "a_user_of_a_cluster" / "scratch_of_job_1234567.batch.example" / "temporary_files_of_node_0123"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    assert len(os.fsencode(folder)) > 100
    return folder


def test_a_long_tmpdir_does_not_stop_a_run(collection, long_tmpdir):
    root = collection("01_good", "1")
    assert run("--out", root / "out") == 0


def test_where_no_folder_is_short_enough_for_sockets_it_is_said_before_anything_runs(
    collection, long_tmpdir, monkeypatch, capsys
):
    root = collection("01_good", "1")
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(str(long_tmpdir)))
    assert run("--out", root / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says(line, "TMPDIR", "/tmp")
    assert says(line, "folder", "70")
    assert not (root / "out").exists()


WAITS = (
    "import os, time\nopen('{folder}/begun', 'w').close()\nwhile not os.path.exists('{folder}/end'): time.sleep(0.05)"
)


def test_two_runs_do_not_write_to_one_folder(collection, tmp_path, capsys):
    root = collection("01_waits", WAITS.format(folder=tmp_path))
    collection("02_other", "1")
    first = threading.Thread(target=runner.run_notebooks, args=(["01"], None, root / "out"))
    first.start()
    until = time.monotonic() + 120
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    try:
        assert run("02", "--out", root / "out") == 2
        refused = f"another run (process {os.getpid()}) writes to {root / 'out'}: wait for it, or give another folder"
        assert f"pardemo run: {refused} with --out\n" in capsys.readouterr().err
        assert run("02", "--out", root / "other") == 0
    finally:
        (tmp_path / "end").touch()
        first.join(120)
    assert run("02", "--out", root / "out") == 0
    assert [o["notebook"] for o in json.loads((root / "out" / "run.json").read_text())] == ["01_waits", "02_other"]
    assert not (root / "out" / project.LOCK).exists()


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(collection, monkeypatch, capsys):
    from papermill.iorw import LocalHandler

    def write(self, text, path):
        with open(path, "w") as stream:
            stream.write(text[:100])  # what still went onto the disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    collection("01_first", "1")
    root = collection("02_second", "1")
    monkeypatch.setattr(LocalHandler, "write", write)
    assert run("--out", root / "out") == 2
    told = f"pardemo run: {root / 'out'}: no space left; 01_first is not finished: make room, then run --resume\n"
    assert capsys.readouterr().err == told
    assert not list((root / "out").glob("*01_first*"))
    monkeypatch.undo()
    monkeypatch.setattr(project, "root", lambda: root)
    assert run("--out", root / "out", "--resume") == 0


def test_list_shows_notebooks_and_parameters(collection, capsys):
    root = collection("01_good", "1")
    assert run("--list", "--out", root / "out") == 0
    assert capsys.readouterr().out.split() == ["01_good", "world_size=2,", "preset='laptop',", "rate=0.5"]
    assert not (root / "out").exists()


def test_an_empty_project_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(project, "root", lambda: tmp_path)
    assert run() == 2
    assert "no notebooks in" in capsys.readouterr().err


def test_claims_and_pictures_of_an_earlier_run_do_not_pass_for_new_ones(collection):
    picture = "from pardemo.draw import style; fig, _ = style.new(); style.save(fig, 'a_old', 'alt')"
    root = collection("01_a", "value = 1", GOOD.format(name="01_a", measured=1), picture)
    out = root / "out"
    assert run("--out", out) == 0
    collection("01_a", "raise ValueError")
    assert run("--out", out) == 1
    assert len((out / "claims.csv").read_text().splitlines()) == 1
    assert not (out / "figures" / "01_old.svg").exists()
    assert cli.main(["claims", str(out)]) == 2


@pytest.mark.parametrize(
    ("needs", "given", "told"),
    [
        ("world_size, least=2", "1", "01_few needs world_size of at least 2, not 1"),
        ("world_size, least=2, multiple_of=2", "3", "01_few needs world_size of at least 2 that 2 divides, not 3"),
        ("world_size, divides=8", "3", "01_few needs world_size of at least 1 that divides 8, not 3"),
        ("world_size", "0", "01_few needs world_size of at least 1, not 0"),
    ],
)
def test_too_few_ranks_are_refused_before_a_kernel_starts(collection, capsys, needs, given, told):
    asks = f"from pardemo.book.page.presets import need_ranks\nneed_ranks({needs})"
    root = collection("01_few", "%matplotlib inline", asks)
    assert run("--out", root / "out", "-p", "world_size", given) == 2
    assert capsys.readouterr().err == f"pardemo run: {told}\n"
    assert not (root / "out").exists()


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_a_notebook_says_how_many_ranks_it_needs_before_it_makes_any(name):
    """The set-up cell, the first after the parameters, asks; the default can be run."""
    path = project.notebooks()[name]
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    (setup,) = [cell for before, cell in itertools.pairwise(code) if before.startswith("world_size = ")]
    assert setup.startswith("page.need_ranks(world_size"), "in its first line"
    parameters.assign({name: path}, {"world_size": parameters.parameters_of(path)["world_size"]})


def test_the_batch_of_chapter_01_divides_over_its_ranks():
    samples = inspect.signature(small.train).parameters["samples"].default
    for ranks in (2, 3, 4, 8):
        assert small.shard(samples, ranks - 1, ranks).stop == samples
