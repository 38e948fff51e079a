"""The figures of the report, of the README's table and of the scorecard, counted a second time from the claims.

The run has claims of every verdict in every chapter, also failing ones: a report that leaves them out is worth nothing.
"""

import shutil
from collections import Counter

import pytest
from bs4 import BeautifulSoup
from conftest import says

from pardemo import claims, project
from pardemo.book.contents import notebook_of
from pardemo.book.run import report, runner, scorecard
from pardemo.book.run.report import command
from pardemo.claims import Ledger

ZERO, RING = "1910.02054 7", "Patarasuk & Yuan 2009"
#: chapter -> claims: id, predicted, measured, evidence, source, further arguments.
CLAIMS = {
    "01_a": [
        ("s09.holds", 100, 101, "wire", RING, {"within": 0.02}),
        ("s09.differs", 2, 3, "wire", RING, {"instead": "the reason"}),
        ("s09.fails", 4, 9, "wire", RING, {"within": 0.01}),
        ("s09.bound", 8, 2, "memory", RING, {"bounded": "most"}),
        ("01.time", 1, 2, "time", "", {}),
    ],
    "02_b": [
        ("s10.holds", 1000, 1000, "memory", ZERO, {}),
        ("s10.near", 1000, 1030, "memory", ZERO, {"within": 0.05}),
        ("s10.fails", 5, 6, "memory", ZERO, {}),
        ("s10.fails_too", 5, 7, "numeric", ZERO, {}),
        ("02.count", 3, 3, "count", "", {}),
    ],
    "03_c": [("s08.fails", 5, 6, "numeric", "1909.08053 3", {})],
    notebook_of("scorecard"): [("s09.scorecard", 1, 1, "arithmetic", RING, {}), ("15.fails", 1, 2, "count", ZERO, {})],
}
VERDICTS = {"holds": 6, "differs": 1, "not measured": 1, "off": 1, "fails": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The ledgers of that run, and one claim that could not be measured."""
    folder = tmp_path_factory.mktemp("run")
    for chapter, told in CLAIMS.items():
        ledger = Ledger(chapter, folder)
        for id, predicted, measured, evidence, source, more in told:
            known = {"because": "a reason", "off": "the machine", "evidence": evidence, "source": source}
            claim = claims.Claim(id, f"statement of {id}", "B", **known | more)
            ledger.check(claim, predicted, measured, 3 if claim.instead else None)
        if chapter == "02_b":
            ledger.skip(claims.Claim("s10.skipped", "statement of s10.skipped", "B", source=ZERO), "no GPU")
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    rows = claims.read(folder)
    assert Counter(row["verdict"] for row in rows) == VERDICTS
    return rows


@pytest.fixture(scope="module")
def page(folder, rows):
    outcomes = [runner.NotebookEnding(name, "failed" if name == "03_c" else "ok", 2.0) for name in CLAIMS]
    bench = {"name": "slow", "ours": 1.0, "peer": 2.0, "unit": "s", "ratio": 2.0, "spread": [1.5, 2.5], "target": 3.0}
    several = {**bench, "name": "of.runs", "met": True, "range": [1.2, 2.7], "runs": 5, "days": 5, "met_in": 4}
    young = {**several, "name": "young", "met": None, "runs": 3, "days": 2, "met_in": 3}
    project.write_json(
        folder / "bench.json", [{**bench, "met": False}, {**bench, "name": "quick", "met": True}, several, young]
    )
    return BeautifulSoup(report.write_pages(folder, outcomes, rows).read_text(), "html.parser")


def text(item):
    return " ".join(item.get_text().split())


def cells(row):
    return [text(cell) for cell in row.find_all("td")]


def told(rows):
    """Verdicts as the tables tell them: 2 holds, 1 fails."""
    found = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in claims.VERDICTS if found[verdict])


def test_the_head_counts_every_claim(page, rows):
    assert f"14 claims, 14 cases: {told(rows)}." in text(page.main.p)
    bar = page.main.find(class_="bar").find_all("i")
    assert [int(part["style"].rpartition(" ")[2]) for part in bar] == [n for n in VERDICTS.values() if n]


def test_the_chapters_count_their_own_claims(page, rows):
    found = [(text(line.find(class_="unseen")), "failed" in text(line)) for line in page.find(id="chapters")("li")]
    expected = []
    for chapter in CLAIMS:
        own = [row for row in rows if row["notebook"] == chapter]
        expected.append((f"{len(own)} claims: {told(own)}", chapter == "03_c"))
    assert found == expected


def test_what_fails_stands_open_at_the_top(page, rows):
    section = page.find(id="failed")
    assert not section.find_parents("details")
    assert [item.a.get_text() for item in section.ul("li")] == [r["id"] for r in rows if r["verdict"] == "fails"]
    assert says(text(section), "predicted", "4", "1", "9")


def test_everything_else_is_folded(page):
    parts = page.main.find_all("details", class_="part")
    assert [part["id"] for part in parts] == ["scorecard", "evidence", "article", "papers", "speed", "pictures"]
    assert not any(part.has_attr("open") for part in page.find_all("details"))


def test_the_kinds_of_evidence_count_their_own_claims(page, rows):
    found = [cells(line) for line in page.find(id="evidence").tbody.find_all("tr")]
    expected = []
    for kind in sorted({row["evidence"] for row in rows} - {""}):
        own = Counter(row["verdict"] for row in rows if row["evidence"] == kind)
        counted = [str(own[verdict] or "") for verdict in claims.VERDICTS]
        expected.append([kind, claims.EVIDENCE[kind], str(own.total()), str(own.total()), *counted])
    assert found[:-1] == expected
    assert found[-1] == ["all", "", "14", "14", *(str(n) for n in VERDICTS.values())]


def test_each_claim_has_its_row_with_its_figures_and_its_verdict(page):
    found = {one.a.get_text(): one for one in page.find(id="claims").find_all("article")}
    expected = {
        "s09.holds": ["100 B ± 2 %", "101 B", "holds"],
        "s09.differs": ["2 B", "3 B", "differs"],
        "s09.fails": ["4 B ± 1 %", "9 B", "fails"],
        "s09.bound": ["≤ 8 B", "2 B", "holds"],
        "01.time": ["1 B", "2 B", "off"],
        "s10.holds": ["1,000 B", "1,000 B", "holds"],
        "s10.near": ["1,000 B ± 5 %", "1,030 B", "holds"],
        "s10.fails": ["5 B", "6 B", "fails"],
        "s10.fails_too": ["5 B", "7 B", "fails"],
        "s10.skipped": ["", "", "not measured"],
        "02.count": ["3 B", "3 B", "holds"],
        "s08.fails": ["5 B", "6 B", "fails"],
        "s09.scorecard": ["1 B", "1 B", "holds"],
        "15.fails": ["1 B", "2 B", "fails"],
    }
    figures = {
        id: [cell.removeprefix("predicted ").removeprefix("measured ") for cell in cells(one.table)]
        for id, one in found.items()
    }
    assert figures == expected
    for id, one in found.items():
        assert text(one).startswith(f"statement of {id}")
    assert "the reason" in text(found["s09.differs"])
    assert f"Source: {RING}." in text(found["s09.holds"])


def test_the_filters_know_each_claims_chapter_evidence_and_verdict(page, rows):
    found = [
        (one.a.get_text(), text(one.find_parent("details").summary)[:2], one["data-evidence"], one["data-verdict"])
        for one in page.find(id="claims").find_all("article")
    ]
    assert found == [(row["id"], row["notebook"][:2], row["evidence"], row["verdict"]) for row in rows]
    chosen = [option.get_text() for option in page.find("select", {"name": "verdict"}).find_all("option")]
    assert chosen == ["all", *VERDICTS]


def test_each_statement_tells_what_was_found_without_the_scorecards_own(page):
    found = {one.p.find(["a", "span"]).get_text(): text(one) for one in page.find(id="statements").find_all("article")}
    assert len(found) == len(scorecard.statements())
    assert "2 × holds, 1 × differs, 1 × fails" in found["s09"]
    assert "2 × holds, 1 × not measured, 2 × fails" in found["s10"]
    assert "1 × fails" in found["s08"]
    judged = Counter(statement["judgement"] for statement in scorecard.statements())
    need = f"{judged.total()} statements, of which {judged['no'] + judged['if']} need a correction or a condition"
    assert text(page.find(id="article").summary).endswith(need)


PAPERS = {
    "Patarasuk & Yuan 2009, ring all-reduce 4 claims": [
        f"{RING}: 2 holds, 1 differs, 1 fails, at most 1.00% apart where it holds memory, wire"
    ],
    "Rajbhandari et al. 2020, ZeRO 5 claims": [
        f"{ZERO}: 2 holds, 1 not measured, 2 fails, at most 3.00% apart where it holds memory, numeric"
    ],
    "Shoeybi et al. 2019, Megatron-LM 1 claim": ["1909.08053 3: 1 fails numeric"],
}


def test_the_papers_count_what_fails_and_tell_the_deviation_of_equalities_that_hold(page):
    groups = page.find(id="papers").find_all("details")
    assert {text(group.summary): [text(line) for line in group("li")] for group in groups} == PAPERS


def test_speed_that_misses_its_target_is_told(page):
    part = page.find(id="speed")
    assert says(text(part.summary), "2", "3", "targets")
    assert says(text(part.summary), "1", "wait")
    rows = [cells(line) for line in part("tr") if line.td]
    assert sorted((line[0], *line[4:]) for line in rows) == [
        ("of.runs", "2", "1.2 – 2.7", "3", "met in 4 of 5"),
        ("quick", "2", "1.5 – 2.5", "3", "met"),
        ("slow", "2", "1.5 – 2.5", "3", "not met"),
        ("young", "2", "1.2 – 2.7", "3", "open: in 3 of 3, on 2 days"),
    ]


def test_the_readmes_table_counts_what_fails(rows):
    head, _, *lines = command.markdown(rows).splitlines()
    assert head == "| evidence | claims | cases | holds | differs | not measured | off | fails |"
    found = [[cell.strip().partition(":")[0] for cell in line.split("|")[1:-1]] for line in lines]
    assert found == [
        ["arithmetic", "1", "1", "1", "", "", "", ""],
        ["count", "2", "2", "1", "", "", "", "1"],
        ["memory", "4", "4", "3", "", "", "", "1"],
        ["numeric", "2", "2", "", "", "", "", "2"],
        ["time", "1", "1", "", "", "", "1", ""],
        ["wire", "3", "3", "1", "1", "", "", "1"],
        ["all", "14", "14", "6", "1", "1", "1", "5"],
    ]


def test_the_scorecard_reads_failing_claims_and_counts_them(folder, rows):
    own = [row for row in rows if row["notebook"] != scorecard.OWN]
    assert scorecard.read_claims(folder) == own
    assert len(scorecard.points(own)) == 11, "every claim with figures is a point of the picture, also one that fails"


def test_a_run_of_failing_claims_ends_on_the_report(folder, tmp_path, monkeypatch):
    """What the runner hands to the report is every chapter's ledger, whole."""
    out = tmp_path / "run"
    shutil.copytree(folder / "claims", out / "claims")
    monkeypatch.setattr(project, "notebooks", lambda: {"01_a": out / "01_a.ipynb", "02_b": out / "02_b.ipynb"})
    for name in ("of_sources", "with_inputs"):
        monkeypatch.setattr(runner.fingerprint, name, lambda *of: "same")
    monkeypatch.setattr(runner.fingerprint, "named", lambda path: set())
    monkeypatch.setattr(runner, "assign", lambda selected, given: {name: {} for name in selected})
    monkeypatch.setattr(
        runner, "_execute", lambda name, *rest: runner.NotebookEnding(name, "failed", error="ClaimFailed")
    )
    runner.run_notebooks(out=out, say=lambda *a, **k: None)
    page = BeautifulSoup((out / "report.html").read_text(), "html.parser")
    assert [text(line.find(class_="unseen")) for line in page.find(id="chapters")("li")] == [
        "5 claims: 2 holds, 1 differs, 1 off, 1 fails",
        "6 claims: 3 holds, 1 not measured, 2 fails",
    ]
    assert text(page.find(id="failed")).count("ClaimFailed") == 2
    assert "s10.fails_too" in (out / "claims.csv").read_text()
