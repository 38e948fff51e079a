"""The scorecard: which run it reads, what it counts, and where a claim is shown."""

import json

import nbformat
import pytest
from book import figures
from conftest import says

from pardemo import claims, project
from pardemo.book.chapters.scorecard import findings
from pardemo.book.contents import notebook_of
from pardemo.book.page import Page
from pardemo.book.run import scorecard
from pardemo.claims import Ledger

OWN = notebook_of("scorecard")
NOTEBOOK = project.root() / "notebooks" / f"{OWN}.ipynb"
REFERENCE = project.root() / "outputs" / "reference"


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A project without any run; ``empty(folder)`` books a claim of *Data parallelism* there."""
    (tmp_path / "notebooks").mkdir()
    for name in ("01_data_parallel", "02_pipeline", OWN):
        nbformat.write(nbformat.v4.new_notebook(), tmp_path / "notebooks" / f"{name}.ipynb")
    monkeypatch.setattr(project, "root", lambda: tmp_path)
    monkeypatch.setenv("PARDEMO_OUT", str(tmp_path / "mine"))

    def book(folder, chapter="01_data_parallel"):
        Ledger(chapter, tmp_path / folder).check(claims.Claim("s09.sent", "sent", evidence="wire"), 10, 10)

    return book


def test_it_reads_the_run_that_is_going_on_and_says_what_is_missing(empty):
    for folder in ("mine", "outputs/latest", "outputs/reference"):
        empty(folder)
    empty("mine", OWN)
    run = scorecard.find()
    assert run.folder.name == "mine"
    assert [row["notebook"] for row in run.rows] == ["01_data_parallel"], "without the scorecard's own"
    assert run.told == "This run: 1 of 2 chapters; without 02."
    assert run.chapters == ["01_data_parallel"]
    assert run.links == {"s09.sent": "01_data_parallel.ipynb"}


@pytest.mark.parametrize("folder", ["outputs/latest", "outputs/reference"])
def test_alone_it_names_the_run_that_it_reads(empty, folder):
    for there in (folder, "outputs/reference"):  # the latest goes before the committed one
        empty(there)
    empty("mine", OWN)  # its own claims make no run
    read = f"This run has no other chapter, so what is read is {folder}"
    run = scorecard.find()
    assert run.told == f"{read}: 1 of 2 chapters; without 02."
    assert run.links == {}, "from where this run is written nothing of it can be reached"


def test_without_any_run_it_says_how_to_make_one(empty):
    with pytest.raises(FileNotFoundError, match=r"executes.*chapters"):
        scorecard.find()


def row(predicted, measured, relation="equal", **more):
    ledger_row = dict.fromkeys(claims.COLUMNS, "")
    id = more.get("id", "s09.x")
    return {**ledger_row, "id": id, "claim": id, "notebook": "01_a", "predicted": predicted, "measured": measured,
            "rel": 0.0, "relation": relation, "verdict": "holds", "evidence": "wire", **more}  # fmt: skip


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [(4, 6, 1.5), (-2, -1, 0.5), (1e-6, 0, 0), (0, 0, 1), (0, 3, None), ("a", "a", None), (True, True, None),
     (None, None, None), (2, True, None)],
)  # fmt: skip
def test_ratio(predicted, measured, expected):
    assert scorecard.ratio(row(predicted, measured)) == expected


def test_points_of_the_picture():
    bounds = [row(2, 1, "at most"), row(2, 3, "at least"), row(2, 5, "at most", verdict="fails")]
    found = scorecard.points([row(2, 2), *bounds[:2], row(2, 3, verdict="differs"), bounds[2], row("a", "a")])
    assert found == [(1, "holds"), (0.5, "at most"), (1.5, "at least"), (1.5, "differs"), (2.5, "fails")]
    fig = figures.ratios({"one": {"a": found}, "two": {"b": found[:1], "c": [(1e9, "at least")]}})
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["one", "two"]
    drawn = [tuple(p) for points in fig.axes[0].collections for p in points.get_offsets()]
    assert sorted(x for x, _ in drawn) == pytest.approx([-0.5, 0, 0.5, 0.5, 1.5]), "every point is there"
    far = [x for points in fig.axes[1].collections for x, _ in points.get_offsets()]
    assert max(far) == 10, "what is far off stands at the end of the axis"


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"measured": 3}, False),
        ({"measured": 3, "verdict": "fails"}, True),
        ({"verdict": "fails"}, False),
        ({"measured": 3, "verdict": "differs", "reason": "measured as 3 predicts: why"}, True),
        ({"measured": 3, "verdict": "differs"}, False),
        ({"measured": 3, "verdict": "off"}, False),
        ({"measured": 3, "verdict": "off", "evidence": "time"}, True),
        ({"measured": 3, "verdict": "off", "evidence": "published"}, False),
        ({"measured": 3, "verdict": "off", "evidence": "published", "reason": "why"}, True),
        ({"measured": None, "verdict": "not measured", "reason": "no GPU"}, True),
        ({"measured": None, "verdict": "holds"}, False),
        ({"notebook": "02_pipeline"}, True),
    ],
)
def test_the_chapters_own_audit_finds_a_verdict_that_does_not_follow(empty, changes, right):
    assert audited([row(1, 1, id="s09.a"), row(2, 2) | changes]) == {
        "scorecard.verdicts": "holds" if right else "fails",
        "scorecard.ids": "holds",
        "scorecard.claims": "holds",
    }


def test_the_chapters_own_audit_finds_one_id_in_two_chapters(empty):
    found = audited([row(1, 1), row(2, 2, notebook="02_pipeline")])
    assert found == {"scorecard.verdicts": "holds", "scorecard.ids": "fails", "scorecard.claims": "fails"}


def test_the_chapters_own_audit_finds_one_claim_in_two_chapters_under_two_cases(empty):
    cases = [row(1, 1, id="s09.x.n2", claim="s09.x"), row(2, 2, id="s09.x.n4", claim="s09.x")]
    assert set(audited(cases).values()) == {"holds"}
    cases[1]["notebook"] = "02_pipeline"
    assert audited(cases) == {"scorecard.verdicts": "holds", "scorecard.ids": "holds", "scorecard.claims": "fails"}


def audited(rows):
    """What the cell of *The scorecard* that looks the ledger over says of these rows."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (source,) = (cell.source for cell in notebook.cells if 'claim("ids"' in cell.source)
    ledger = Page("scorecard").ledger()
    exec(source, {"rows": rows, "claims": claims, "claim": ledger})
    return {one["claim"]: one["verdict"] for one in ledger.rows}


def test_every_statement_has_a_row_and_says_what_was_found():
    rows = [row(1, 1, id="s09.a"), row(1, 1, id="s09.b"), row(1, 2, id="s48.x", verdict="off"), row(1, 1, id="s100.x")]
    found = {s["id"]: s for s in scorecard.by_statement(rows, ["data_parallel"])}
    assert list(found) == [s["id"] for s in scorecard.statements()]
    assert found["s09"]["verdict"] == "2 × holds"
    assert found["s48"]["verdict"] == "1 × off, Hybrid parallelism not in this run"
    assert found["s06"]["verdict"] == "told in the chapter's text"
    assert found["s04"]["verdict"] == "no claim"
    assert found["s81"]["verdict"] == "Accelerate not in this run"
    assert found["s10"]["claims"] == [], "s100's are not s10's"
    assert [claim["id"] for claim in found["s100"]["claims"]] == ["s100.x"]


def test_a_chapter_that_the_run_has_not_is_called_by_its_title():
    assert scorecard.chapters_of(["01_data_parallel", "02_c"]) == {"data_parallel", "c"}
    found = {s["id"]: s for s in scorecard.by_statement([row(1, 1, id="s09.a", notebook="01_data_parallel")])}
    assert found["s09"]["verdict"] == "1 × holds"
    assert found["s04"]["verdict"] == "no claim", "the chapter is there"
    assert found["s48"]["verdict"] == "Hybrid parallelism not in this run"


def test_slips_are_the_statements_that_need_a_correction():
    found = {s["id"]: s["judgement"] for s in scorecard.slips(scorecard.by_statement([]))}
    assert found["s08"] == "wrong or garbled"
    assert found["s03"] == "right under a condition"
    assert "s04" not in found
    assert "s06" not in found


def test_totals_add_up():
    rows = claims.read(REFERENCE)
    for key in ("notebook", "evidence"):
        *parts, whole = scorecard.totals(rows, key)
        unmeasured = sum(not r["evidence"] for r in rows) if key == "evidence" else 0
        assert sum(part["cases"] for part in parts) + unmeasured == whole["cases"] == len(rows)
        assert whole["claims"] == len({row["claim"] for row in rows}) < len(rows)
        for verdict in claims.VERDICTS:
            assert whole[verdict] == sum(r["verdict"] == verdict for r in rows)


def test_every_claim_of_the_reference_leads_to_a_cell_that_shows_it():
    rows = claims.read(REFERENCE)
    addresses = scorecard.links(REFERENCE, rows)
    for claim in rows:
        name, _, cell = addresses[claim["id"]].partition("#cell-id=")
        notebook = json.loads((REFERENCE / name).read_text())
        (shown,) = [c for c in notebook["cells"] if c["id"] == cell]
        assert claim["claim"] in json.dumps(shown["outputs"], ensure_ascii=False), claim["id"]


def test_a_link_without_an_executed_copy_names_the_notebook_alone(tmp_path):
    assert scorecard.links(tmp_path, [row(1, 1)]) == {"s09.x": "01_a.ipynb"}


def test_the_furthest_misses_are_those_that_are_off_by_the_largest_factor():
    off = {"verdict": "off", "reason": "why <it> is so", "statement": "a time"}
    rows = [
        row(100, 30, id="14.a.x", claim="14.a", case="x", **off),
        row(100, 90, id="14.a.y", claim="14.a", case="y", **off),
        row(2, 4, id="13.b", **off),
        row(1, 9, id="09.c", verdict="differs", reason="measured as 9 predicts: why"),
    ]
    told = findings.furthest(rows, 2).data
    assert told.index("× 3.3") < told.index("× 2.0")
    assert told.count("<p>") == 2, "a claim once, with its worst case"
    assert says(told, "100", "found", "30")
    assert "why &lt;it&gt; is so" in told
    assert "× 9.0" not in told, "what differs has its explanation"
    assert "None" in findings.furthest(rows[3:]).data


def test_of_a_paper_is_told_what_holds_and_how_far_the_others_are():
    rows = [row(4, 5, source="1910.02054 7", verdict="differs"), row(100, 101, source="1910.02054 7")]
    (found,) = findings.of_papers([*rows, row(1, 1, source="profile of *Your machine*")])
    assert found["paper"] == "Rajbhandari et al. 2020, ZeRO"
    assert (found["holds"], found["differs"], found["off"]) == ("1", "1", "0")
    assert (found["holds within"], found["others up to"]) == ("1.0%", "× 1.2")


def test_verdicts_are_bars_by_evidence(out):
    totals = scorecard.totals([row(1, 1), row(1, 2, verdict="off", evidence="paced")], "evidence")[:-1]
    assert figures.verdicts(totals).alt == "Cases by evidence and verdict. paced: 1 off; wire: 1 holds."


def test_the_text_counts_whose_errors_the_differing_claims_are():
    """The article's, a paper's and the book's own; in all others a program does something else than it says."""
    differ = {row["claim"] for row in claims.read(REFERENCE) if row["verdict"] == "differs"}
    article = {"s47.machines", "s58.trailing_commas", "s71.accumulated", "s72.over_stage_2", "s81.first_year"}
    article |= {"s82.torch_xla", "s85.larger"}
    assert article <= differ
    wrong = {one["id"] for one in scorecard.statements() if one["judgement"] == "no"}
    assert (len(wrong), len(wrong & {claim.split(".")[0] for claim in differ})) == (16, 5)
    assert "s25.selective_gpt3" in differ
    assert {claim for claim in differ if claim.startswith("which_layout.")} == {
        "which_layout.fast_link", "which_layout.rule_near",
    }  # fmt: skip
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "seven are errors of the article, one is a paper's, and two are this book's own" in text
    assert "Five of the 16 *differ* above" in text


def test_the_text_counts_the_article_s_statements_as_they_are_judged():
    judged = [one["judgement"] for one in scorecard.statements()]
    counts = [len(judged), *(judged.count(judgement) for judgement in ("ok", "if", "no", "doc"))]
    text = " ".join("".join(cell.source) for cell in nbformat.read(NOTEBOOK, as_version=4).cells)
    found = "Of its {} statements {} are right, {} under a condition that it does not name, and {} are wrong or\n"
    assert found.format(*counts) in text
    assert f"garbled in print; {counts[-1]} cannot be measured" in text
