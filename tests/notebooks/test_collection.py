"""The collection itself, run as its users run it; and every statement of the article that has a chapter has a claim."""

import json
import os
import subprocess
import sys

import nbformat
import pytest

from pardemo import claims, project

pytestmark = pytest.mark.collection
ROOT = project.PACKAGE.parent


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """One run of all notebooks through the command line."""
    out = tmp_path_factory.mktemp("run")
    done = subprocess.run(
        [sys.executable, "-m", "pardemo", "run", "--out", str(out)], cwd=ROOT, capture_output=True, text=True,
        timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def rows(run):
    return claims.read(run)


def test_every_notebook_finished(run):
    outcomes = json.loads((run / "run.json").read_text())
    assert {o["notebook"]: o["status"] for o in outcomes} == dict.fromkeys(project.notebooks(), "ok")


def test_no_claim_fails_and_none_differs_without_a_reason(rows):
    assert {r["id"]: r["measured"] for r in rows if r["verdict"] == "fails"} == {}
    assert all(r["reason"] for r in rows if r["verdict"] in ("differs", "not measured"))


def test_ids_are_unique(rows):
    ids = [r["id"] for r in rows]
    assert len(ids) == len(set(ids))


CHAPTERS = project.chapters()
CLAIMED = [(s, c) for s in claims.statements() for c in s["chapters"].split() if c in CHAPTERS]


@pytest.mark.parametrize(("statement", "chapter"), CLAIMED, ids=[f"{s['id']}-{c}" for s, c in CLAIMED])
def test_every_statement_whose_chapter_exists_is_claimed(rows, statement, chapter):
    if statement["judgement"] == "doc":
        notebooks = [nbformat.read(project.notebooks()[name], as_version=4) for name in CHAPTERS[chapter]]
        prose = " ".join(c.source for n in notebooks for c in n.cells if c.cell_type == "markdown")
        assert statement["id"] in prose, "told with its number in the chapter's text"
    else:
        own = [r for r in rows if r["notebook"] in CHAPTERS[chapter]]
        found = [r for r in own if r["id"].startswith(statement["id"] + ".")]
        assert found, f"{chapter} claims nothing for {statement['id']}"


WAYS = ("sent", "received")


def test_bytes_of_chapter_01_hold_on_the_wire(rows):
    both_ways = [f"{claim}.{way}" for claim in ("s04.server", "s04.worker", "s09.per_rank") for way in WAYS]
    found = {r["id"]: r for r in rows}
    for name in (*both_ways, "s05.imbalance", "s07.sent.ring", "s10.one_successor", "s11.balance"):
        row = found[name]
        assert (row["verdict"], row["evidence"]) == ("holds", "wire"), name
        assert row["rel"] <= 0.005


def test_the_run_leaves_pictures_and_a_report(run):
    pictures = {p.stem for p in (run / "figures").glob("*.png")}
    assert {"00_collectives", "01_bytes_per_rank", "01_time", "01_overlap", "13_traffic", "13_to_a_loss"} <= pictures
    page = (run / "report.html").read_text()
    assert page.count("<img ") == len(pictures)
    assert page.count('<img alt=""') == 0
    table = (run / "claims.csv").read_text().splitlines()
    assert len(table) == 1 + len(claims.read(run)), "a row for each case, in one line"


def test_executed_copies_carry_no_path_of_this_machine(run):
    for copy in run.glob("*.ipynb"):
        text = copy.read_text()
        for private in (str(ROOT), str(run), sys.prefix, os.path.expanduser("~") + "/"):
            assert private not in text, f"{copy.name} names {private}"


def papermill(folder, source, tmp_path):
    """A notebook run by papermill alone, by its command, in that folder; the verdicts of its claims."""
    done = subprocess.run(
        [sys.executable, "-m", "papermill", source, str(tmp_path / "out.ipynb"), "-p", "world_size", "2",
         "--no-progress-bar"],
        cwd=folder, capture_output=True, text=True, timeout=300, env={**os.environ, "PARDEMO_OUT": str(tmp_path)},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [r["verdict"] for r in claims.read(tmp_path)]


def test_plain_papermill_works_too(tmp_path):
    verdicts = papermill(ROOT / "notebooks", "00_your_machine.ipynb", tmp_path)
    assert "holds" in verdicts
    assert "fails" not in verdicts


def test_plain_papermill_works_from_the_root(tmp_path):
    """Up to the first claim: what it finds from there does not depend on how far it goes."""
    notebook = nbformat.read(ROOT / "notebooks" / "00_your_machine.ipynb", as_version=4)
    first = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and "claim(" in cell.source)
    assert 0 < first < len(notebook.cells) - 1
    notebook.cells = [*notebook.cells[: first + 1], nbformat.v4.new_code_cell("claim.close()")]
    nbformat.write(notebook, tmp_path / "00_your_machine.ipynb")
    assert "holds" in papermill(ROOT, str(tmp_path / "00_your_machine.ipynb"), tmp_path)


@pytest.mark.parametrize("chapter", project.notebooks())
def test_an_exercise_that_nobody_attempted_shows_one_quiet_line(run, chapter):
    cells = nbformat.read(run / f"{chapter}.ipynb", as_version=4).cells
    asked = [c for c in cells if c.cell_type == "code" and "exercises.check(" in c.source]
    assert asked
    for cell in asked:
        (output,) = cell.outputs
        assert output.data["text/plain"].startswith("Not attempted yet: write my_")
        assert output.data["text/html"].count("<details>") == 2, "the hint and the solution"
