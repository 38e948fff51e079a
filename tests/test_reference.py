"""``python .ci/reference.py`` with answers of the test's own: what is kept."""

import json
import re

import pytest
import reference
from conftest import says

from pardemo import Ledger, project
from pardemo.book.run.report import command as report_command
from pardemo.claims import Claim

HIT = {"name": "fast", "ratio": 2.0, "target": 1.0, "met": True}
MISSED = {"name": "slow", "ratio": 0.5, "target": 1.0, "met": False}
VALIDATED = [{"what": "a run"}]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """``build(bench=(1, "rows"))`` makes a reference beside an old one; ``build.asked`` are the commands."""
    old = tmp_path / "reference"
    old.mkdir()
    (old / "old.ipynb").write_text("old")
    (old / "plan_cuda.json").write_text("of a GPU")
    (old / "world_sizes.csv").write_text("of another command")
    (old / "bench_runs.json").write_text("earlier runs")
    readme = tmp_path / "README.md"
    readme.write_text(f"{report_command.BEGIN}\nold\n{report_command.END}\n")

    def command(out, name, *arguments):
        build.asked.append(name)
        if "--add" in arguments:  # the table of all runs, which is here the newest one's
            (out / "bench.json").write_text((out / "bench_run.json").read_text())
        if name == "run":
            Ledger("01_a", out).check(Claim("01.a", "one is one"), 1, 1)
        answer = build.answers.get(name, (0, ""))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def build(*options, **answers):
        build.asked = []
        build.answers = {"bench": (0, json.dumps([HIT])), "plan": (0, json.dumps(VALIDATED)), **answers}
        return reference.main(["--out", str(old), "--readme", str(readme), *options])

    monkeypatch.setattr(reference, "_pardemo", command)
    return build


def test_a_missed_target_is_told_at_the_end_and_stops_nothing(build, tmp_path, capsys):
    assert build(bench=(1, json.dumps([HIT, MISSED]))) == 1
    assert build.asked == ["run", "bench", "bench", "plan", "report"], "the second adds the first one's rows"
    printed = capsys.readouterr()
    assert printed.err == "missed target: slow: 0.50 of 1\n"
    assert says(printed.out, "reference", "1", "2")
    made = tmp_path / "reference"
    assert json.loads((made / "bench.json").read_text()) == [HIT, MISSED]
    assert json.loads((made / "plan_validate.json").read_text()) == VALIDATED
    assert "| 1 | 1 |" in (tmp_path / "README.md").read_text(), "the table of the new run's claims"


def test_a_whole_build_replaces_the_old_one_and_keeps_what_other_commands_wrote(build, tmp_path, capsys):
    of_prove = {"zoo.json", "releases.json", "right_layouts.json", "searched.json"}
    for name in of_prove:
        (tmp_path / "reference" / name).write_text('["of another command"]\n')
    assert build() == 0
    made = tmp_path / "reference"
    written = {"claims", "bench.json", "bench_runs.json", "plan_validate.json"}
    assert {path.name for path in made.iterdir()} == written | {"plan_cuda.json", "world_sizes.csv"} | of_prove
    assert (made / "plan_cuda.json").read_text() == "of a GPU"
    assert (made / "bench_runs.json").read_text() == "earlier runs", "to which the command adds"
    assert (made / "zoo.json").read_text() == '["of another command"]\n'
    assert {path.name for path in tmp_path.iterdir()} == {"reference", "README.md"}, "nothing is left beside it"


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"run": (1, "")}, "`pardemo run` ended with status 1"),
        ({"plan": (0, "")}, "`pardemo plan` ended with status 0 and no table"),
        ({"plan": KeyboardInterrupt()}, None),
    ],
)
def test_a_build_that_stops_on_the_way_leaves_the_old_reference_untouched(build, answers, told, tmp_path, capsys):
    if told is None:
        with pytest.raises(KeyboardInterrupt):
            build(**answers)
    else:
        assert build(**answers) == 1
        assert told in (error := capsys.readouterr().err)
        assert error.endswith("is as it was\n")
        assert error.count("\n") == 1
    assert {path.name for path in (tmp_path / "reference").iterdir()} == {
        "old.ipynb",
        "plan_cuda.json",
        "world_sizes.csv",
        "bench_runs.json",
    }
    assert "\nold\n" in (tmp_path / "README.md").read_text()
    assert build() == 0, "what was left beside it is in nobody's way"


def test_its_commands_are_pardemos(tmp_path):
    Ledger("01_a", tmp_path).check(Claim("01.a", "one is one"), 1, 1)
    assert reference._rows(tmp_path, "claims")[0]["id"] == "01.a"
    with pytest.raises(RuntimeError, match=r"pardemo.*2"):
        reference._do(tmp_path, "report")


def test_no_committed_file_of_another_command_would_be_dropped():
    """Whatever a script of the tests writes into the committed run has to be kept."""
    tests = project.root() / "tests"
    scripts = [path.read_text(encoding="utf-8") for name in ("run", "command") for path in tests.rglob(f"{name}.py")]
    written = {name for text in scripts for name in re.findall(r'"outputs" / "reference" / "([\w.]+)"', text)}
    assert (
        {"zoo.json", "releases.json", "right_layouts.json", "searched.json", "soak.json"}
        <= written
        <= set(reference.KEPT)
    )
