"""The figures of the report, of the README's table and of the scorecard, counted a second time from the claims.

The run has claims of every verdict in every chapter, also failing ones: a report that leaves them out is worth nothing.
"""

import shutil
from collections import Counter

import pytest
from bs4 import BeautifulSoup

from pardemo import claims, project
from pardemo.claims import Ledger, scorecard
from pardemo.collection import report, runner
from pardemo.collection.report import command

ZERO, RING = "1910.02054 §7", "Patarasuk & Yuan 2009"
#: chapter -> claims: id, predicted, measured, evidence, source, further arguments.
CLAIMS = {
    "01_a": [
        ("s09.holds", 100, 101, "wire", RING, {"rel": 0.02}),
        ("s09.differs", 2, 3, "wire", RING, {"instead": (3, "the reason")}),
        ("s09.fails", 4, 9, "wire", RING, {"rel": 0.01}),
        ("s09.bound", 8, 2, "memory", RING, {"relation": "at most"}),
        ("01.time", 1, 2, "time", "", {}),
    ],
    "02_b": [
        ("s10.holds", 1000, 1000, "memory", ZERO, {}),
        ("s10.near", 1000, 1030, "memory", ZERO, {"rel": 0.05}),
        ("s10.fails", 5, 6, "memory", ZERO, {}),
        ("s10.fails_too", 5, 7, "numeric", ZERO, {}),
        ("02.count", 3, 3, "count", "", {}),
    ],
    "03_c": [("s08.fails", 5, 6, "numeric", "1909.08053 §3", {})],
    "13_scorecard": [("s09.scorecard", 1, 1, "arithmetic", RING, {}), ("13.fails", 1, 2, "count", ZERO, {})],
}
VERDICTS = {"holds": 6, "differs": 1, "not measured": 1, "off": 1, "fails": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The ledgers of that run, and one claim that could not be measured."""
    folder = tmp_path_factory.mktemp("run")
    for chapter, told in CLAIMS.items():
        ledger = Ledger(chapter, folder)
        for id, predicted, measured, evidence, source, more in told:
            ledger.check(id, f"statement of {id}", predicted, measured, "B", evidence=evidence, source=source, **more)
        if chapter == "02_b":
            ledger.skip("s10.skipped", "statement of s10.skipped", "no GPU", source=ZERO)
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    rows = claims.read(folder)
    assert Counter(row["verdict"] for row in rows) == VERDICTS
    return rows


@pytest.fixture(scope="module")
def page(folder, rows):
    outcomes = [runner.Outcome(name, "failed" if name == "03_c" else "ok", 2.0) for name in CLAIMS]
    bench = {"name": "slow", "ours": 1.0, "peer": 2.0, "unit": "s", "ratio": 2.0, "spread": [1.5, 2.5], "target": 3.0}
    project.write_json(folder / "bench.json", [{**bench, "met": False}, {**bench, "name": "quick", "met": True}])
    return BeautifulSoup(report.write(folder, outcomes, rows).read_text(), "html.parser")


def cells(row):
    return [" ".join(cell.get_text().split()) for cell in row.find_all("td")]


def table_below(page, heading):
    """The rows of the first table after the heading with this id, as texts."""
    return [cells(row) for row in page.find(id=heading).find_next("table").tbody.find_all("tr")]


def told(rows):
    """Verdicts as the tables tell them: 2 holds, 1 fails."""
    found = Counter(row["verdict"] for row in rows)
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in claims.VERDICTS if found[verdict])


def test_the_head_counts_every_claim(page):
    counted = [" ".join(item.get_text().split()) for item in page.find(class_="counts").find_all("li")]
    assert counted == [*(f"{n} {verdict}" for verdict, n in VERDICTS.items()), "14 claims in 14 cases"]


def test_the_chapters_count_their_own_claims(page, rows):
    expected = []
    for chapter in CLAIMS:
        own = [row for row in rows if row["notebook"] == chapter]
        status = "failed" if chapter == "03_c" else "ok"
        expected.append([status, "2.0", str(len(own)), str(len(own)), told(own)])
    assert [line[1:] for line in table_below(page, "chapters")] == expected


def test_the_kinds_of_evidence_count_their_own_claims(page, rows):
    table = page.find(id="chapters").find_all_next("table")[1]
    found = [cells(line) for line in table.tbody.find_all("tr")]
    expected = []
    for kind in sorted({row["evidence"] for row in rows} - {""}):
        own = Counter(row["verdict"] for row in rows if row["evidence"] == kind)
        counted = [str(own[verdict] or "") for verdict in claims.VERDICTS]
        expected.append([kind, claims.EVIDENCE[kind], str(own.total()), str(own.total()), *counted])
    assert found == expected


def test_each_claim_has_its_row_with_its_figures_and_its_verdict(page):
    found = {line[0]: line for line in map(cells, page.find(id="claims").tbody.find_all("tr"))}
    expected = {
        "s09.holds": ["100 ± 2 %", "101", "B", "1.0100", "wire", "holds"],
        "s09.differs": ["2", "3", "B", "1.5000", "wire", "differs"],
        "s09.fails": ["4 ± 1 %", "9", "B", "2.2500", "wire", "fails"],
        "s09.bound": ["≤ 8", "2", "B", "0.2500", "memory", "holds"],
        "01.time": ["1", "2", "B", "2.0000", "time", "off"],
        "s10.holds": ["1,000", "1,000", "B", "1.0000", "memory", "holds"],
        "s10.near": ["1,000 ± 5 %", "1,030", "B", "1.0300", "memory", "holds"],
        "s10.fails": ["5", "6", "B", "1.2000", "memory", "fails"],
        "s10.fails_too": ["5", "7", "B", "1.4000", "numeric", "fails"],
        "s10.skipped": ["", "", "", "", "", "not measured"],
        "02.count": ["3", "3", "B", "1.0000", "count", "holds"],
        "s08.fails": ["5", "6", "B", "1.2000", "numeric", "fails"],
        "s09.scorecard": ["1", "1", "B", "1.0000", "arithmetic", "holds"],
        "13.fails": ["1", "2", "B", "2.0000", "count", "fails"],
    }
    assert {id: line[2:] for id, line in found.items()} == expected
    for id, line in found.items():
        assert line[1].startswith(f"statement of {id}")
    assert "the reason" in found["s09.differs"][1]


def test_the_filters_know_each_claims_chapter_evidence_and_verdict(page, rows):
    found = [
        (row.td.get_text(), row["data-chapter"], row["data-evidence"], row["data-verdict"])
        for row in page.find(id="claims").tbody.find_all("tr")
    ]
    assert found == [(row["id"], row["notebook"], row["evidence"], row["verdict"]) for row in rows]
    chosen = [option.get_text() for option in page.find("select", {"name": "verdict"}).find_all("option")]
    assert chosen == ["all", *VERDICTS]


def test_each_statement_tells_what_was_found_without_the_scorecards_own(page):
    found = {line[0]: line for line in map(cells, page.find(id="statements").tbody.find_all("tr"))}
    assert len(found) == len(claims.statements())
    assert found["s09"][5].startswith("2 × holds, 1 × differs, 1 × fails")
    assert found["s10"][5].startswith("2 × holds, 1 × not measured, 2 × fails")
    assert found["s08"][5].startswith("1 × fails")
    judged = Counter(statement["judgement"] for statement in claims.statements())
    heading = page.find(id="article").find_next("p").get_text()
    assert heading == f"{judged.total()} statements; {judged['no'] + judged['if']} need a correction or a condition."


PAPERS = [
    ["Shoeybi et al. 2019, Megatron-LM", "1909.08053 §3", "1", "1", "1 fails", "numeric", ""],
    ["Rajbhandari et al. 2020, ZeRO", ZERO, "5", "5", "2 holds, 1 not measured, 2 fails", "memory, numeric", "3.00%"],
    ["Patarasuk & Yuan 2009, ring all-reduce", RING, "4", "4", "2 holds, 1 differs, 1 fails", "memory, wire", "1.00%"],
]


def test_the_papers_count_what_fails_and_tell_the_deviation_of_equalities_that_hold(page):
    assert table_below(page, "papers") == PAPERS


def test_speed_that_misses_its_target_is_told(page):
    rows = table_below(page, "speed")
    assert [(line[0], *line[4:]) for line in rows] == [
        ("slow", "2", "1.5 – 2.5", "3", "not met"),
        ("quick", "2", "1.5 – 2.5", "3", "met"),
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
    assert scorecard.read(folder) == own
    assert scorecard.evidence_by_chapter(own) == [
        {"notebook": "01_a", **dict.fromkeys(claims.EVIDENCE, 0), "wire": 3, "memory": 1, "time": 1},
        {"notebook": "02_b", **dict.fromkeys(claims.EVIDENCE, 0), "memory": 3, "numeric": 1, "count": 1},
        {"notebook": "03_c", **dict.fromkeys(claims.EVIDENCE, 0), "numeric": 1},
    ]
    assert len(scorecard.points(own)) == 11, "every claim with figures is a point of the picture, also one that fails"
    shown = BeautifulSoup(scorecard.ledger(own, {}).data, "html.parser").find_all("details")
    summaries = [chapter.summary.get_text() for chapter in shown]
    chapters = [name for name in CLAIMS if name != scorecard.OWN]
    assert summaries == [f"{name}: {told([row for row in own if row['notebook'] == name])}" for name in chapters]
    table = {line[0]: line[2:] for chapter in shown for line in map(cells, chapter.find_all("tr")) if line}
    assert table["s09.fails"] == ["4 ± 1 %", "9 B", "2.2500", "wire", "fails"]
    assert len(table) == len(own)


def test_a_run_of_failing_claims_ends_on_the_report(folder, tmp_path, monkeypatch):
    """What the runner hands to the report is every chapter's ledger, whole."""
    out = tmp_path / "run"
    shutil.copytree(folder / "claims", out / "claims")
    monkeypatch.setattr(project, "notebooks", lambda: {"01_a": out / "01_a.ipynb", "02_b": out / "02_b.ipynb"})
    for name in ("of_sources", "with_inputs"):
        monkeypatch.setattr(runner.fingerprint, name, lambda *of: "same")
    monkeypatch.setattr(runner, "assign", lambda selected, given: {name: {} for name in selected})
    monkeypatch.setattr(runner, "_execute", lambda name, *rest: runner.Outcome(name, "failed", error="ClaimFailed"))
    runner.run(out=out, say=lambda *a, **k: None)
    page = BeautifulSoup((out / "report.html").read_text(), "html.parser")
    assert [line[3:] for line in table_below(page, "chapters") if len(line) > 1] == [
        ["5", "5", "2 holds, 1 differs, 1 off, 1 fails"],
        ["6", "6", "3 holds, 1 not measured, 2 fails"],
    ]
    assert "s10.fails_too" in (out / "claims.csv").read_text()
