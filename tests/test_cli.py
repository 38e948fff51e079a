"""The command line: help, tables, JSON, exit statuses; bench rows and the doctor."""

import json
import subprocess
import sys
import tomllib

import pytest
import torch
import torch.distributed as dist
from conftest import says

from pardemo import Ledger, WireMeter, bench, cli, project
from pardemo.book.page.presets import choose


@pytest.mark.parametrize(
    "command", [[], ["run"], ["claims"], ["bench"], ["soak"], ["doctor"], ["score"], ["predict"], ["export"], ["chat"]]
)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: pardemo" in capsys.readouterr().out


def test_the_module_and_the_script_are_the_same():
    done = subprocess.run([sys.executable, "-m", "pardemo", "--version"], capture_output=True, text=True, check=True)
    settings = tomllib.loads((project.PACKAGE.parent / "pyproject.toml").read_text())
    assert settings["project"]["scripts"] == {"pardemo": "pardemo.cli:main"}
    assert done.stdout.strip() == "0.1.0"


def test_claims_as_table_and_json(out, capsys):
    ledger = Ledger("01_example")
    ledger.check("s09.x", "bytes sent", 4194304, 4194400, "B", 0.005, "a paper", "wire")
    ledger.check("01.y", "error", 1e-6, 1e-7, relation="at most")
    assert cli.main(["claims", str(out)]) == 0
    table = capsys.readouterr().out
    assert "4,194,304 ± 0.5 %" in table
    assert "≤ 1e-06" in table
    assert "2 holds" in table
    assert cli.main(["claims", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ledger.rows


def test_claims_of_a_folder_without_any(tmp_path, capsys):
    assert cli.main(["claims", str(tmp_path)]) == 2
    assert "no claims in" in capsys.readouterr().err


def test_an_unknown_bench_is_refused(capsys):
    assert cli.main(["bench", "warp"]) == 2
    assert says(capsys.readouterr().err, "cluster", "pipeline")


def test_a_row_is_the_ratio_of_medians():
    row = bench.compare("x", [1.0, 2.0, 10.0], [4.0, 4.0, 4.0], "s", 2.0)
    assert (row.ours, row.peer, row.ratio, row.met) == (2.0, 4.0, 2.0, True)
    assert row.spread[0] < 2 < row.spread[1]
    assert bench.compare("x", [2.0], [1.0], "s", 1.0).met is False
    assert bench.compare("x", [2.0], [1.0], "s", None).met is None


@pytest.mark.parametrize(("peer", "met"), [(0.957, False), (0.992, True), (1.0, True), (1.008, True), (1.043, False)])
def test_what_is_to_be_the_same_is_neither_lower_nor_higher(peer, met):
    row = bench.compare("loss", [1.0, 1.0], [peer, peer], "nats", 1.0, within=0.01)
    assert row.met is met
    assert "1 ± 0.01" in bench.as_text([row])


def test_bench_import_runs_and_prints(capsys, monkeypatch):
    monkeypatch.setattr("pardemo.bench.importing.ROUNDS", 2)
    assert cli.main(["bench", "import", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"name", "ours", "peer", "unit", "ratio", "spread", "target", "met"} <= set(rows[0])
    assert rows[0]["name"] == "import"
    assert rows[0]["met"] is True
    missed = bench.BenchRow("slow", 2.0, 1.0, "s", 0.5, (0.4, 0.6), 1.0, False)
    monkeypatch.setattr(bench, "run", lambda names, on_start: [missed])
    assert cli.main(["bench"]) == 1
    assert "NO" in capsys.readouterr().out


def the_bounds_work(nbytes):
    from pardemo.bench import bound

    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((nbytes // 4,), rank + 1.0)
    with bound.to_itself() as (out, into), WireMeter() as wire:
        seconds = bound.work(out, into, tensor, size)
    written = int((tensor == 0).sum())  # by what arrived, which is zeros
    return wire.sent_bytes, wire.received_bytes, written, seconds


@pytest.mark.parametrize("size", [2, 4])
def test_the_bound_of_an_all_reduce_moves_its_bytes_and_no_more(world_of, size):
    """With fewer bytes it would be a bound that nobody can reach, with more one that can be beaten."""
    nbytes = 4 << 20
    half = (size - 1) / size * nbytes
    for sent, received, written, seconds in world_of(size).run(the_bounds_work, nbytes):
        assert sent == pytest.approx(2 * half, rel=0.005)  # the meter's barrier is below
        assert received == pytest.approx(2 * half, rel=0.005)
        assert 4 * written == half
        assert seconds > 0


def test_the_bound_shares_all_ranks_work_among_the_cores():
    from pardemo.bench import bound

    assert bound.seconds([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], cores=3) == [3.0, 4.0]


def test_doctor_tells_what_is_here(capsys):
    assert cli.main(["doctor"]) == 0
    assert f"{project.available_cores()} usable" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"system", "cores", "torch", "bytes on the wire", "01_data_parallel"} <= {r["what"] for r in rows}
    assert all(set(r) == {"what", "found", "ok"} for r in rows)


def test_an_interrupt_is_an_exit_status(monkeypatch, capsys):
    def interrupted(names, on_start):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run", interrupted)
    assert cli.main(["bench"]) == 130
    assert "interrupted" in capsys.readouterr().err


def piped(*command, lines=0, **kwargs):
    """A command's status when its reader leaves after some lines, and what it said on stderr."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               cwd=project.PACKAGE.parent, **kwargs)  # fmt: skip
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read()
    return process.wait(120), told


def test_a_closed_pipe_ends_what_only_prints_quietly(tmp_path):
    row = {"instruction": "", "output": "b", "source": ""}
    (tmp_path / "rows.json").write_text(json.dumps([row | {"input": ""} for _ in range(5000)]))
    assert piped("-m", "pardemo", "data", "check", str(tmp_path / "rows.json"), lines=1) == (141, "")
    assert piped("-m", "pardemo", "finetune", "tiny-cpu", "--show") == (0, ""), "nothing to be done, and not an error"


def test_a_closed_pipe_does_not_end_what_works(tmp_path):
    status, told = piped("-m", "pardemo", "data", "build", "--out", str(tmp_path), "--train", "200", "--test", "20")
    assert (status, told) == (0, "")
    assert {"train.json", "test.json", "manifest.json"} <= {path.name for path in tmp_path.iterdir()}


WORKS = """
import sys
from pardemo.closed_pipe import work_goes_on

@work_goes_on()
def works():
    for number in range(100_000):
        print(number)
        print(number, file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write("done")

works()
print("said by what only prints", flush=True)
"""


def test_work_goes_on_without_a_reader(tmp_path):
    reader = subprocess.Popen([sys.executable, "-c", WORKS, str(tmp_path / "file")], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
    reader.stdout.readline()
    reader.stdout.close()
    assert reader.wait(120) == 0
    assert (tmp_path / "file").read_text() == "done"


def test_presets():
    assert choose("laptop", laptop=1, gpus=2) == 1
    with pytest.raises(ValueError, match="'phone'"):
        choose("phone", laptop=1, gpus=2)


def test_a_deepspeed_configuration_is_looked_through(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}')
    assert cli.main(["doctor", "--deepspeed", str(path), "--ranks", "4"]) == 0
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimisation": {"stage": 2}}')
    assert cli.main(["doctor", "--deepspeed", str(path)]) == 2
    assert "did you mean 'zero_optimization'?" in capsys.readouterr().err
    path.write_text("{")
    assert cli.main(["doctor", "--deepspeed", str(path)]) == 2
    assert cli.main(["doctor", "--deepspeed", str(tmp_path / "none.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_help_names_what_there_is():
    """help(pardemo) is a map: what it names exists, every package is on it, and every module says what it is."""
    import ast
    import re

    import pardemo
    from pardemo import project

    named = re.findall(r"``pardemo\.(\w+)``", pardemo.__doc__)
    modules = {path.stem if path.suffix else path.name for path in project.PACKAGE.iterdir()}
    assert set(named) <= modules
    packages = {path.parent.name for path in project.PACKAGE.glob("*/__init__.py")}
    assert packages <= set(named)
    for name in set(pardemo.__all__) - {"__version__"}:
        assert f":class:`{name}`" in pardemo.__doc__
    silent = [p for p in project.PACKAGE.rglob("*.py") if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []
