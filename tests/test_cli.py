"""The command line: help, tables, JSON, exit statuses; the doctor."""

import json
import subprocess
import sys
import tomllib
from functools import partial

import pytest
from conftest import says

from pardemo import Ledger, cli, project
from pardemo.book.page.presets import choose
from pardemo.claims import Claim
from pardemo.finetune import commands as finetune

COMMANDS = [name for names, _ in cli.GROUPS.values() for name in names.split()]


def help_of(capsys, *command):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert help_of(capsys, command).startswith(f"usage: pardemo {command}")


def test_commands_are_shown_in_groups_with_examples_that_the_command_line_takes(capsys):
    told, parser = help_of(capsys), cli._parser()
    assert told.startswith("usage: pardemo COMMAND")
    assert sorted(COMMANDS) == sorted(parser._subparsers._group_actions[0].choices)
    for group, (names, example) in cli.GROUPS.items():
        lines = told[told.index(f"{group}, as {example}:\n") :].splitlines()[1:]
        shown = [line.split()[0] for line in lines[: lines.index("")] if line[2] != " "]
        assert shown == names.split()
        if example.split()[1] not in cli.OF_A_CHECKOUT:
            assert parser.parse_args(example.split()[1:]).command in names


def test_a_file_that_cannot_be_opened_is_named_in_one_line(tmp_path, capsys):
    assert cli.main(["data", "check", "none.json"]) == 2
    assert cli.main(["data", "check", str(tmp_path)]) == 2
    missing, folder = capsys.readouterr().err.splitlines()
    assert missing == "pardemo data: there is no none.json"
    assert folder == f"pardemo data: {tmp_path}: Is a directory"


@pytest.mark.parametrize(
    ("run", "command"),
    [
        (partial(cli.main, ["score", "none.yaml"]), "score"),
        (partial(cli.main, ["finetune", "none.yaml"]), "finetune"),
        (partial(finetune.main, ["none.yaml"]), "finetune"),  # python -m pardemo.finetune
    ],
)
def test_a_missing_file_is_told_alike_by_every_way_in(run, command, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert run() == 2
    assert capsys.readouterr().err == f"pardemo {command}: there is no none.yaml\n"


def test_the_module_and_the_script_are_the_same():
    done = subprocess.run([sys.executable, "-m", "pardemo", "--version"], capture_output=True, text=True, check=True)
    settings = tomllib.loads((project.PACKAGE.parent / "pyproject.toml").read_text())
    assert settings["project"]["scripts"] == {"pardemo": "pardemo.cli:main"}
    assert done.stdout.strip() == "0.1.0"


def test_claims_as_table_and_json(out, capsys):
    ledger = Ledger("01_example")
    sent = Claim("s09.x", "bytes sent", "B", within=0.005, because="headers", source="a paper", evidence="wire")
    ledger.check(sent, 4194304, 4194400)
    ledger.check(Claim("01.y", "error", at_most=1e-6, because="rounding"), None, 1e-7)
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


@pytest.mark.parametrize("command", cli.OF_A_CHECKOUT)
def test_a_command_of_the_checkout_says_so_where_there_is_none(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(project, "root", lambda: tmp_path)
    assert cli.main([command, "--json"]) == 2
    assert says(error := capsys.readouterr().err, f"pardemo {command}", "git clone")
    assert error.count("\n") == 1


def test_doctor_tells_what_is_here(capsys):
    assert cli.main(["doctor"]) == 0
    assert f"{project.available_cores()} usable" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"system", "cores", "torch", "bytes on the wire", "01_data_parallel"} <= {r["what"] for r in rows}
    assert all(set(r) == {"what", "found", "ok"} for r in rows)


def test_an_interrupt_is_an_exit_status(monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_from_checkout", interrupted)
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
