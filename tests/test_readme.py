"""What README and docs say is so: the examples run, links lead somewhere, the messages are the tools' own."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import yaml
from conftest import fenced

from pardemo import project
from pardemo.book.contents import CHAPTERS, notebook_of
from pardemo.collectives.links import Link
from pardemo.pipeline_parallel.exchange import USES
from pardemo.world import world
from pardemo.world.errors import Failure, RankDied, RankFailed, RankTimeout

ROOT = project.PACKAGE.parent
TEXT = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
CODE = (ROOT / "docs" / "in-your-code.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT + CODE, flags=re.S)


def run_example(number, folder):
    """What the README's example prints, run as a script of its own."""
    script = folder / "example.py"
    script.write_text(EXAMPLES[number])
    done = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_bytes_of_a_ring(tmp_path):
    sent = [int(word) for word in re.findall(r"\d+", run_example(0, tmp_path))]
    assert len(sent) == 4
    assert sent == pytest.approx([1.5 * (4 << 20)] * 4, rel=0.005)


def test_does_it_fit(tmp_path):
    lines = run_example(1, tmp_path).splitlines()
    psi = 13_896_668_160 / 1e9
    expected = [16 * psi, (4 + 12 / 8) * psi, (2 + 14 / 8) * psi, 16 / 8 * psi]
    assert [float(re.search(r"([\d.]+) GB", line)[1]) for line in lines] == pytest.approx(expected, abs=0.05)


def test_a_layer_of_ones_own(tmp_path):
    assert run_example(2, tmp_path) == "['holds', 'holds']\n"
    shown = subprocess.run(
        [sys.executable, "-m", "pardemo", "claims", "my_run"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "99.sent" in shown.stdout


def test_every_chapter_is_listed_with_its_executed_copy():
    """Which GitHub shows; the pages are not committed, and a link to one would lead nowhere in a clone."""
    table = TEXT[TEXT.index("<!-- chapters:") : TEXT.index("<!-- end of chapters -->")]
    for name in project.notebooks():
        assert f"](outputs/reference/{name}.ipynb)" in table
    for page in (ROOT / "README.md", *DOCS):
        assert not re.findall(r"\]\([^)]*outputs/reference/[^)]*\.html", page.read_text()), page.name


def test_the_first_screen_installs_uses_and_shows_results():
    """Before the book: what it is, how a script of one's own comes to it, and both commands with what they print."""
    screen = TEXT[TEXT.index("<!-- end of badges -->") : TEXT.index("## The book\n")]
    places = [screen.index(text) for text in ("pip install", "\npardemo prove ", "\ndifferent\n", "\npardemo measure ")]
    assert places == sorted(places)
    requirement = re.search(r'pip install "pardemo @ git\+(\S+)"', screen)[1]
    assert requirement == project.REPOSITORY == PROJECT["urls"]["Homepage"]


def test_the_verdict_is_the_one_of_the_page_of_prove():
    """Whose example tests/test_prove_page.py runs; here the script has a user's name for it."""
    (command, printed), (run, shown) = (
        fenced("prove", TEXT),
        fenced("example", (ROOT / "docs" / "prove.md").read_text()),
    )
    words, named = shlex.split(command.replace("\\\n", " ")), shlex.split(run.replace("\\\n", " "))
    assert [word for word in named if word not in words] == ["tests/zoo/no_sync_over_the_last_micro_batch.py"]
    assert [word for word in words if word not in named] == ["train.py"]
    assert printed == shown
    assert len(printed.splitlines()) == 10


def test_measure_prints_what_the_readme_shows(tmp_path):
    """Shortened where there is an ellipsis; the script has a user's name for it."""
    command, shown = fenced("measure", TEXT)
    shutil.copy(ROOT / "tests" / "scripts" / "nanogpt_like.py", tmp_path / "train.py")
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    place = 0
    for piece in (piece.strip() for line in shown.splitlines() for piece in line.split("…")):
        assert piece in done.stdout[place:], piece
        place = done.stdout.index(piece, place) + len(piece)


def test_the_releases_of_the_findings_are_the_pinned_ones():
    pinned = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "requirements.txt").read_text(), flags=re.M))
    told = re.search(r"silent bugs in (.*?), as tested; of (\d+) no report was found", TEXT, flags=re.S)
    names = {"PEFT": "peft", "DeepSpeed": "deepspeed", "Megatron-core": "megatron-core"}
    found = re.findall(r"([\w-]+) (\d+\.\d+)", told[1])
    assert len(found) == 5
    assert all(pinned[names.get(name, name)] == version for name, version in found)
    assert f"of the other {told[2]} no report was found" in (ROOT / "docs" / "records" / "found.md").read_text()


def test_the_two_commands_are_there():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for command in re.findall(r"make (\w+)", TEXT):
        assert command in targets
    assert {"run", "test", "lab", "bench"} <= set(targets)


def rows_of(name):
    lines = [line for line in (ROOT / "docs" / f"{name}.md").read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def said_by_the_code():
    """The messages of real failures, and the source of the others."""
    lock = threading.Lock()

    def f():
        return lock

    with pytest.raises(TypeError) as cannot_send:
        world._pack(f, (), {})
    yield str(cannot_send.value)
    yield str(RankDied({2: -9}))
    yield str(RankTimeout(300, {0: "", 1: ""}, []))
    yield str(RankFailed({0: Failure("ValueError", "x", "")}, stopped=[1]))
    link = Link.__new__(Link)
    link.predecessor, link.exchange = 1, "all_reduce (sum) of bucket 0"
    for link.use in ("ring", *USES.values()):
        yield str(link._lost("closed the connection"))
    with pytest.raises(ValueError, match="pointer") as pointer:
        project.refuse_pointer("model.safetensors", project.LFS_POINTER, "weights")
    yield str(pointer.value)
    for path in (ROOT / "Makefile", *project.PACKAGE.rglob("*.py")):
        yield re.sub(r'"\s*\n\s*f?"', "", path.read_text())


def test_troubleshooting_quotes_what_the_tools_really_say():
    said = list(said_by_the_code())
    quoted = [text for row in rows_of("troubleshooting") for text in re.findall(r"`([^`]+)`", row[0])]
    assert len(quoted) > 12
    for text in quoted:
        for part in text.split("…"):
            piece = part.removeprefix("cannot send f").strip() if part.startswith("cannot send f") else part.strip()
            assert any(piece in message for message in said), text


def test_troubleshooting_names_commands_that_exist():
    from pardemo.cli import _parser

    commands = _parser()._subparsers._group_actions[0].choices
    for page in (ROOT / "README.md", *DOCS):
        for command in re.findall(r"(?:`|^)pardemo ([a-z]+)", page.read_text(), flags=re.M):
            assert command in commands or command == "needs", command


def test_the_glossary_sets_chinese_beside_english():
    page = (ROOT / "docs" / "glossary.md").read_text()
    headings = re.findall(r"^## \[([^]]+)\]\(\.\./outputs/reference/(\w+)\.ipynb\)$", page, re.M)
    assert headings == [(title, notebook_of(name)) for name, title in CHAPTERS.items() if title in dict(headings)]
    rows = re.findall(r"^- \*\*(.+?)\*\* \((.+?)\): (.+)$", page, re.M)
    assert len(rows) == page.count("\n- ")
    assert all(re.search(r"[\u4e00-\u9fff]", chinese) for _, chinese, _ in rows)


def test_the_workflow_runs_what_the_readme_says_and_keeps_the_report():
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]["test"]
    (tests,) = [step for step in job["steps"] if step.get("run") == ".ci/run"]
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    (kept,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert kept["if"] == "always()", "of a run that failed, above all"
    base = tests["env"]["PYTEST_ADDOPTS"].removeprefix("--basetemp=")
    assert kept["with"]["path"] == f"{base}/run*/", "where the collection's run is written"
    collection = Path(ROOT / "tests" / "notebooks" / "test_collection.py").read_text()
    assert 'mktemp("run")' in collection


def test_the_search_prints_what_the_page_shows(capsys):
    from pardemo import cli

    page = (ROOT / "docs" / "plan.md").read_text()
    command = re.search(r"^pardemo (plan --search .*)$", page, re.M)[1]
    shown = re.search(r"<!-- search:.*?```text\n(.*?)```", page, re.S)[1]
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_how_long_between_hosts(tmp_path):
    tier, seconds = run_example(3, tmp_path).split()
    assert tier in ("namespaces", "pacing")
    assert 0.95 * 0.168 < float(seconds) < 2, "no load makes a link faster than its limit"
