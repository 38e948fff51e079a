"""The collection itself, run as its users run it; and every statement of the article that has a chapter has a claim.

The gate runs the notebooks that are made of something else than those of the committed run were, and three in any
case; of the others it has the committed claims. At night all of them run.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import run_again
from conftest import in_gate, says

from pardemo import claims, project
from pardemo.book.contents import notebook_of
from pardemo.book.run import endings, fingerprint, scorecard
from pardemo.draw import pictures

pytestmark = pytest.mark.collection
ROOT = project.PACKAGE.parent
COMMITTED = ROOT / "outputs" / "reference"
ALWAYS = frozenset(map(notebook_of, ("megatron_mlp", "zero_memory", "scorecard")))


@functools.cache
def chosen(gate):
    """The notebooks that this run of the tests executes, in their order."""
    if not gate:
        return list(project.notebooks())
    before = endings.read_endings(COMMITTED)
    same = {
        name for name, path in project.notebooks().items()
        if name in before and before[name].sources == fingerprint.of_sources(path, {})
    }  # fmt: skip
    return [name for name in project.notebooks() if name in ALWAYS or name not in same]


def pytest_generate_tests(metafunc):
    if "executed" in metafunc.fixturenames:
        metafunc.parametrize("executed", chosen(in_gate(metafunc.config)))


@pytest.fixture(scope="session")
def notebooks(pytestconfig):
    return chosen(in_gate(pytestconfig))


@pytest.fixture(scope="session")
def run(tmp_path_factory, notebooks):
    """One run of notebooks through the command line; their kernels run claims once more, see run_again.py."""
    out, settings = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("ipython")
    (settings / "profile_default").mkdir()
    extensions = 'c = get_config()\nc.IPKernelApp.extensions = ["run_again"]\n'
    (settings / "profile_default" / "ipython_kernel_config.py").write_text(extensions)
    (out / "again").mkdir()
    here = Path(run_again.__file__).parent
    environment = {"IPYTHONDIR": str(settings), "PYTHONPATH": str(here), run_again.FOLDER: str(out / "again")}
    done = subprocess.run(
        [sys.executable, "-m", "pardemo", "run", *notebooks, "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def rows(run, notebooks):
    return claims.read(run) + [row for row in claims.read(COMMITTED) if row["notebook"] not in notebooks]


def test_the_committed_run_has_every_notebook():
    before = endings.read_endings(COMMITTED)
    assert {name: ending.status for name, ending in before.items()} == dict.fromkeys(project.notebooks(), "ok")


def test_every_notebook_finished(run, notebooks):
    outcomes = json.loads((run / "run.json").read_text())
    assert {o["notebook"]: o["status"] for o in outcomes} == dict.fromkeys(notebooks, "ok")


def test_a_claim_or_an_answer_run_again_after_the_whole_notebook_shows_the_same(run, executed):
    cells = json.loads((run / "again" / f"{executed}.json").read_text())
    assert cells
    for cell in cells:
        first, again = cell["first"], cell["again"]
        assert isinstance(again, list), f"{again}, of {cell['cell']}"
        assert again[1] == first[1], cell["cell"]
        assert again[0].keys() == first[0].keys(), cell["cell"]
        for claim, value in first[0].items():
            same = value if isinstance(value, str | None) else pytest.approx(value, rel=1e-6, abs=1e-6)
            assert again[0][claim] == same, (claim, cell["cell"])  # sums in another order


def test_no_claim_fails_and_none_differs_without_a_reason(rows):
    assert {r["id"]: r["measured"] for r in rows if r["verdict"] == "fails"} == {}
    assert all(r["reason"] for r in rows if r["verdict"] in ("differs", "not measured"))


def test_ids_are_unique(rows):
    ids = [r["id"] for r in rows]
    assert len(ids) == len(set(ids))


CLAIMED = [(s, c) for s in scorecard.statements() for c in s["chapters"].split()]


@pytest.mark.parametrize(("statement", "chapter"), CLAIMED, ids=[f"{s['id']}-{c}" for s, c in CLAIMED])
def test_every_statement_whose_chapter_exists_is_claimed(rows, statement, chapter):
    if statement["judgement"] == "doc":
        notebook = nbformat.read(project.notebooks()[notebook_of(chapter)], as_version=4)
        told = [cell.metadata.get("pardemo", {}).get("statements", []) for cell in notebook.cells]
        assert any(statement["id"] in ids for ids in told), "the cell that tells it has its id in its metadata"
    else:
        own = [r for r in rows if r["notebook"] == notebook_of(chapter)]
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


def test_the_run_leaves_pictures_and_a_report(run, notebooks):
    drawn = {p.name for p in (run / "figures").glob("*.svg")}
    assert drawn == {p.name for name in notebooks for p in pictures.of_notebook(COMMITTED, name) if p.suffix == ".svg"}
    page = (run / "report.html").read_text()
    assert page.count("<img ") == len(drawn)
    assert page.count('<img alt=""') == 0
    table = (run / "claims.csv").read_text().splitlines()
    assert len(table) == 1 + len(claims.read(run)), "a row for each case, in one line"


def test_executed_copies_carry_no_path_of_this_machine(run):
    for copy in run.glob("*.ipynb"):
        text = copy.read_text()
        for private in (str(ROOT), str(run), sys.prefix, os.path.expanduser("~") + "/"):
            assert private not in text, f"{copy.name} names {private}"


def papermill(folder, source, tmp_path):
    """A notebook run by papermill alone, by its command, in that folder; the verdicts that lie beside its output."""
    done = subprocess.run(
        [sys.executable, "-m", "papermill", source, str(tmp_path / "out.ipynb"), "-p", "world_size", "2",
         "--no-progress-bar"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={name: value for name, value in os.environ.items() if name != "PARDEMO_OUT"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [r["verdict"] for r in claims.read(tmp_path / "out")]


@pytest.mark.nightly
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


def test_an_exercise_that_nobody_attempted_shows_one_quiet_line(run, executed):
    cells = nbformat.read(run / f"{executed}.ipynb", as_version=4).cells
    asked = [c for c in cells if c.cell_type == "code" and "page.check(" in c.source]
    assert asked
    for cell in asked:
        (output,) = cell.outputs
        assert says(output.data["text/plain"], "attempted", "my_")
        assert output.data["text/html"].count("<details>") == 2, "the hint and the solution"
