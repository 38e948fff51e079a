"""``pardemo prove --search``: which layouts it draws, how it shrinks them, and how it reproduces what it finds."""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import fenced
from hypothesis import given, settings
from hypothesis import strategies as st

from pardemo import project
from pardemo.cli import main
from pardemo.script.compare.differences import Finding
from pardemo.script.compare.run_layouts import from_texts
from pardemo.script.compare.runs import ProveError, RunOptions
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.search import axes
from pardemo.script.search.axes import LAYOUT, SIZE, VARIED, Axis, parse_axis, read_space
from pardemo.script.search.conditions import read_condition
from pardemo.script.search.coverage import PairCoverage
from pardemo.script.search.evidence import Evidence, HeldPart
from pardemo.script.search.reproduction import reproduce, reproduction_text
from pardemo.script.search.script_options import script_options
from pardemo.script.search.search import search
from pardemo.script.search.search_results import SearchFinding
from pardemo.script.search.shrink import shrink
from pardemo.script.search.verdicts import ALIKE, PARTED, LayoutVerdict, SeenFinding

ROOT = project.PACKAGE.parent
SCRIPT = ROOT / "tests" / "scripts" / "norm_of_heads.py"
#: A script that is right, on one rank, as quick as can be; it refuses four micro-batches.
RIGHT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--batch", type=int, default=8)
args = parser.parse_args()
if args.accumulate == 4:
    raise ValueError("four micro-batches are too many")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    for part in torch.randn(args.batch * args.accumulate, 4, generator=torch.Generator().manual_seed(step)).chunk(
        args.accumulate
    ):
        (model(part).square().mean() / args.accumulate).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

names = st.from_regex(r"[a-z]{1,5}", fullmatch=True).filter(
    lambda name: name not in {"ranks", "samples", "batch", *axes.SIZES}
)
words = st.one_of(st.integers(0, 99), st.from_regex(r"[a-z][a-z0-9_.+-]{0,5}", fullmatch=True))


@given(names, st.lists(words, min_size=1, max_size=5, unique_by=str), st.sampled_from([LAYOUT, VARIED, SIZE]))
@settings(max_examples=100, deadline=None)
def test_an_axis_is_read_as_it_is_written(name, values, kind):
    assert parse_axis(f"{name}={','.join(map(str, values))}", kind) == Axis(name, tuple(values), kind)


@given(st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_any_text_is_an_axis_or_refused(text):
    with contextlib.suppress(ValueError):
        axis = parse_axis(text)
        assert axis.name.isidentifier()
        assert axis.values


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tp", 'takes a name and its values, as "tp=1,2"'),
        ("tp=1,1", "values that differ"),
        ("tp=0", "a number from 1 on"),
        ("tp=two", "a number from 1 on"),
        ("ranks=1,2", "ranks follow"),
        ("a b=1", "an axis has a name"),
    ],
)
def test_axes_that_are_none(text, line):
    with pytest.raises(ValueError, match=line):
        parse_axis(text)


def space(*texts, line=("train.py", "--x", "{x}"), **more):
    return read_space(line, [parse_axis(text) for text in texts], **more)


def test_legal_layouts_have_as_many_ranks_as_there_may_be_and_whole_micro_batches():
    made = read_space(
        ["t.py", "{batch}"],
        [parse_axis(text) for text in ("tp=1,2,4", "dp=1,2,4", "accumulate=1,3")],
        ranks=4,
        samples=6,
    )
    layouts = [made.values(point) for point in made.points()]
    assert {(v["ranks"], v["dp"], v["accumulate"], v["batch"]) for v in layouts} == {
        (1, 1, 3, 2), (2, 1, 1, 6), (2, 1, 3, 2), (4, 1, 1, 6), (4, 1, 3, 2), (2, 2, 1, 3), (2, 2, 3, 1), (4, 2, 1, 3),
        (4, 2, 3, 1),
    }  # fmt: skip
    assert all(v["ranks"] == v["dp"] * v["tp"] for v in layouts)
    assert made.layout({**made.reference_of(next(made.points()))}).name == "ranks=1 tp=1 accumulate=1 batch=6"


def test_samples_are_as_many_as_all_layouts_divide_and_as_the_script_takes():
    text = 'parser.add_argument("--batch-size", type=int, default=7)\nparser.add_argument("--accumulate", default=1)'
    made = read_space(["t.py"], [parse_axis("accumulate=1,3")], text=text, ranks=4)
    assert made.line == ("t.py", "--accumulate", "{accumulate}", "--batch-size", "{batch}")
    assert next(axis for axis in made.axes if axis.name == "samples").values[0] == 12
    with pytest.raises(ValueError, match=r"--samples needs \{batch\}"):
        space("x=1,2", samples=8)


def test_conditions_leave_layouts_out_and_are_no_code():
    made = space("x=1,2,3", "dp=1,2", conditions=["x != 2 or dp == 1", "x in (1, 2)"])
    assert [(point["x"], point["dp"]) for point in made.points()] == [(1, 2), (2, 1)]
    for text in ("__import__('os')", "x.real", "[x]", "x if x else 1", "y == 1", "x ==", "f'{x}'", "x ** 9"):
        with pytest.raises(ValueError, match="the condition"):
            read_condition(text, {"x"})
    with pytest.raises(ValueError, match="has no value"):
        read_condition("x < 'a'", {"x"}).holds({"x": 1})
    with pytest.raises(ValueError, match=r"the reference, .* is no layout"):
        space("x=1,2", conditions=["x == 2"])


def test_axes_of_a_script_are_its_options_that_say_how_it_is_run():
    text = """
import argparse
from os import system
parser.add_argument("--tensor-model-parallel-size", "-t", type=int, default=1)
parser.add_argument("--sharding", choices=["none", "ddp", "fsdp2"], default="ddp")
parser.add_argument("--model", choices=["a", "b"])
parser.add_argument("--cp", action="store_true")
parser.add_argument(system("false"))
"""
    made = read_space(["train.py"], text=text, ranks=4)
    assert made.line == ("train.py", "--sharding", "{sharding}", "--tensor-model-parallel-size", "{tp}")
    assert {axis.name: axis.values for axis in made.axes if axis.kind == LAYOUT} == {
        "dp": (1, 2, 4), "tp": (1, 2, 4), "sharding": ("ddp", "none", "fsdp2"),
    }  # fmt: skip
    assert script_options("no python at all {") == {}
    with pytest.raises(ValueError, match="nowhere in the script's line"):
        read_space(["train.py"], [parse_axis("pp=1,2"), parse_axis("other=1,2")], text=text)


@given(st.lists(st.integers(2, 3), min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_a_search_covers_all_pairs_before_it_repeats_any(counts):
    line = ["t.py", *(f"{{a{n}}}" for n in range(len(counts)))]
    made = read_space(
        line, [Axis("dp", (1,)), *(Axis(f"a{n}", tuple(range(c))) for n, c in enumerate(counts))], ranks=1
    )
    coverage = PairCoverage(made)
    first = coverage.next_point()
    assert all(first[f"a{n}"] for n in range(len(counts))), "the first is as different as can be"
    coverage.note(first, compared=True)
    while coverage.pairs - coverage.covered:
        before = len(coverage.covered)
        coverage.note(coverage.next_point(), compared=True)
        assert len(coverage.covered) > before
    while coverage.waiting:
        coverage.note(coverage.next_point(), compared=True)


def test_layouts_behind_a_known_difference_come_last():
    coverage = PairCoverage(space("x=1,2,3", "dp=1,2"))
    order = []
    while coverage.waiting:
        order.append(coverage.next_point([{"x": 3}]))
        coverage.note(order[-1], compared=False)
    assert [point["x"] == 3 for point in order] == [False, False, False, True, True]


def finding(cause="sum-for-mean", name="layers.3.norm.weight"):
    return SeenFinding(Finding("", 1, "gradients", cause, "", parameters=(name,)), "", None)


def test_shrinking_ends_with_the_fewest_values_that_show_the_same():
    made = read_space(
        ["t.py", "{tp}{x}{y}{n}"],
        [Axis("tp", (1, 2, 4)), Axis("x", (0, 1)), Axis("y", ("a", "b")), Axis("n", (4, 2, 1), SIZE)], ranks=8,
    )  # fmt: skip

    def judge(point):
        parts = point["tp"] > 1 and point["x"] and point["n"] > 1
        other = [finding("stale")] if point["y"] == "b" else []
        same = [finding(name=f"layers.{point['n']}.norm.weight")] if parts else []
        judged.append(point)
        layouts = made.layout(point), made.layout(made.reference_of(point))
        return LayoutVerdict(point, *layouts, PARTED if parts or other else ALIKE, "", other + same)

    judged = []
    followed = SearchFinding(judge({"dp": 2, "tp": 4, "x": 1, "y": "b", "n": 4, "steps": 3}), finding(), [])
    shrink(followed, made, judge)
    assert followed.point == {"dp": 1, "tp": 2, "x": 1, "y": "a", "n": 2, "steps": 1}
    assert followed.smallest
    steps = [point["steps"] for point in judged]
    assert steps == sorted(steps, reverse=True), "what follows is not tried with more steps again"
    assert len(judged) < 20


def tried(line, *texts, out, minutes=2.0, note=lambda line: None, **more):
    text = Path(line[0]).read_text(encoding="utf-8")
    made = read_space(line, [parse_axis(text) for text in texts], text=text, **more)
    return search(made, RunOptions(double=True, timeout_s=60), minutes=minutes, out=out, note=note)


@pytest.fixture
def right(tmp_path):
    path = tmp_path / "right.py"
    path.write_text(RIGHT, encoding="utf-8")
    return path


def test_nothing_is_found_in_a_right_script_and_what_it_refuses_is_no_finding(right, tmp_path):
    result = tried([str(right)], "dp=1", "accumulate=1,2,4", out=tmp_path / "out", steps=2)
    row = result.as_json()
    assert row["findings"] == row["not_reproduced"] == row["failed"] == []
    assert row["covered"] == {"layouts": ["ranks=1 accumulate=2 batch=4"], "pairs": 1}
    assert row["left"] == {"layouts": 0, "pairs": [{"accumulate": 4}]}
    assert [line["layout"] for line in row["refused"]] == ["ranks=1 accumulate=4 batch=2"]
    assert "four micro-batches are too many" in row["refused"][0]["line"]
    assert str(result).endswith("nothing found")
    assert not (tmp_path / "out").exists()


def test_an_interrupt_keeps_what_was_found(right, tmp_path):
    def interrupted(line):
        if "alike" in line:
            raise KeyboardInterrupt

    result = tried([str(right)], "dp=1", "accumulate=1,2,4,8", out=tmp_path, note=interrupted, steps=2)
    assert result.interrupted
    assert len(result.by_outcome(ALIKE)) == 1
    assert "interrupted" in str(result)


@pytest.mark.parametrize(("minutes", "first_s"), [(1e-6, 0), (0.03, 60)])
def test_minutes_that_are_over_leave_the_rest(right, tmp_path, minutes, first_s):
    right.write_text(f"import time\ntime.sleep({first_s})\n{RIGHT}", encoding="utf-8")
    result = tried([str(right)], "dp=1", "accumulate=1,2,4", out=tmp_path, minutes=minutes)
    assert result.verdicts == []
    assert result.seconds < 30
    assert len(result.coverage.waiting) == 2
    assert str(result).endswith("nothing compared")


def test_a_reference_that_cannot_be_run_is_an_error(right, tmp_path):
    right.write_text("raise ValueError('no data')", encoding="utf-8")
    with pytest.raises(ProveError, match="no data"):
        tried([str(right), "{accumulate}"], "dp=1", "accumulate=1,2", out=tmp_path)


def test_a_reproduction_is_short_whatever_it_needs(tmp_path):
    parts = {rank: HeldPart("layers.0.weight", (tuple(range(4 * rank, 4 * rank + 4)), None)) for rank in range(2)}
    launch = Launch(str(tmp_path / "train.py"), ("--tp", "2"), environment={"A": "1"}, local_rank="--local_rank=")
    for tensor in ("gradient", "before", "after"):
        evidence = Evidence("layers.2.weight", tensor, 1, parts, 0.5, clips=True)
        for versions in ("torch 2", "torch 2, deepspeed 0.19"):
            text = reproduction_text(
                evidence, [launch, launch], (1, 2), tmp_path, title="T", versions=versions, missing=True, double=True
            )
            assert text.count("\n") <= 60, text
            compile(text, "repro.py", "exec")
            assert "pardemo" not in text


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--axis", "tp=1,2"], "say --search, too"),
        (["--search", "--layout", "ranks=1"], "say --axis in place of --layout"),
        (["--search", "--minutes", "0"], "--minutes must be above 0"),
        (["--search", "--axis", "dp=1", "--", str(SCRIPT), "--accumulate", "1", "--tp", "1"], "allow no layout beside"),
        (["--search", "--", "nowhere.py"], "no script nowhere.py"),
        (["--search", "--ranks", "0", "--", str(SCRIPT)], "--ranks must be at least 1"),
    ],
)
def test_what_the_command_refuses(options, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["prove", *options]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_a_folder_with_other_things_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("dear", encoding="utf-8")
    assert main(["prove", "--search", "--out", str(tmp_path), "--", str(SCRIPT)]) == 2
    assert "has other things in it, as thesis.tex" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(("mended", "said"), [(True, "the same"), (False, "DIFFERENT")])
def test_a_reproduction_says_the_same_of_what_is_right(tmp_path, mended, said):
    """Of a parameter that is whole on each rank; of one that is cut, in both."""
    line = [str(SCRIPT), "--tp", "{tp}", "--accumulate", "{accumulate}", "--batch", "{batch}", *["--mended"] * mended]
    texts = ["ranks=1 tp=1 accumulate=1 batch=4", "ranks=2 tp=2 accumulate=2 batch=2"]
    reference, layout = from_texts(texts, line)
    cut = {rank: HeldPart("0.up", (tuple(range(8 * rank, 8 * rank + 8)), None)) for rank in range(2)}
    for number, (name, parts, shown) in enumerate([("0.norm.weight", {}, said), ("0.up", cut, "the same")]):
        made = reproduce(
            Evidence(name, "gradient", 1, parts, 1.0), layout, reference, tmp_path / str(number),
            title="T", versions="torch", missing=False, double=False, copied=False,
        )  # fmt: skip
        assert [text.rpartition(": ")[2] for text in made.output.splitlines()] == [shown, shown], made.reason
        assert made.shown == (shown == "DIFFERENT")


@pytest.mark.nightly
def test_the_example_prints_what_the_page_shows(tmp_path):
    command, printed = fenced("example of a search", (ROOT / "docs" / "prove.md").read_text(encoding="utf-8"))
    (tmp_path / "tests" / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "tests" / "scripts")
    words = shlex.split(command.replace("\\\n", " "))
    run = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert run.returncode == 1, run.stderr
    without_seconds = [re.sub(r"in \d+ s$", "", text, flags=re.MULTILINE) for text in (run.stdout, printed)]
    assert without_seconds[0] == without_seconds[1]


@pytest.mark.nightly
def test_a_bug_of_two_axes_is_found_shrunk_and_reproduced(tmp_path):
    """The command from prove.toml: exit status, JSON, and files that show the bug under torchrun, without pardemo."""
    (tmp_path / "prove.toml").write_text(
        f'script = "{SCRIPT}"\ndouble = true\n[search]\nranks = 4\nwhere = ["tp < 4"]\n[search.axis]\ntp = [1, 2, 4]\n'
        "accumulate = [1, 2, 4]\ndp = [1, 2, 4]\n[search.size]\nlayers = [2, 1]\n", encoding="utf-8",
    )  # fmt: skip
    line = [sys.executable, "-m", "pardemo", "prove", "--search", "--json", "--minutes", "4", "--out", "out"]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert run.returncode == 1, run.stderr
    row = json.loads(run.stdout)
    assert row == json.loads((tmp_path / "out" / "search.json").read_text(encoding="utf-8"))
    assert row["left"]["layouts"] == 0
    assert row["not_reproduced"] == []
    (found,) = row["findings"]
    assert found["cause"] == "summed-again"
    assert found["parameters"] == ["0.norm.bias", "0.norm.weight"]
    assert found["shrunk"] == "ranks=2 tp=2 accumulate=2 layers=1 batch=1"
    assert found["right"] == "ranks=2 tp=2 accumulate=1 layers=1 batch=2"
    assert len(found["layouts"]) == 4
    assert {"two replicas at most" in refused["line"] for refused in row["refused"]} == {True}
    folder = tmp_path / "out" / "1"
    assert "Gradients of 0.norm" in (folder / "issue.md").read_text(encoding="utf-8")
    test = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)], cwd=tmp_path, timeout=200,
        capture_output=True, text=True,
    )  # fmt: skip
    assert test.returncode == 1
    assert "DIFFERENT" in test.stdout
