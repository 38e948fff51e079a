"""Verdicts, the ledger's file, what may not be claimed, and that the measures behind the claims can fail."""

import json
import re
from collections import Counter

import nbformat
import numpy as np
import pytest
import torch
from bs4 import BeautifulSoup
from conftest import says

from pardemo import Ledger, claims, project
from pardemo.book.contents import CHAPTERS
from pardemo.book.page import declared_in
from pardemo.book.run import scorecard
from pardemo.claims import declarations
from pardemo.claims.lines import Line
from pardemo.claims.verdicts import SECONDS
from pardemo.cluster.tiers import Tier
from pardemo.meters.timeline import Span, begun_before_end
from pardemo.planner.layouts.published import megatron_2019
from pardemo.small_models import gpt


@pytest.fixture
def ledger(out):
    return Ledger("01_example")


def claimed(id="s09.x", says="statement", **fields):
    """A claim whose tolerance or seconds have a reason."""
    seconds = {"off": "why"} if fields.get("evidence") in SECONDS else {}
    return claims.Claim(id, says, **{"because": "a reason"} | seconds | fields)


@pytest.mark.parametrize(
    ("predicted", "measured", "options", "verdict"),
    [
        (100, 100, {}, "holds"),
        (100, 100.4, {"within": 0.005}, "holds"),
        (100, 100.6, {"within": 0.005}, "fails"),
        (-100, -100.4, {"within": 0.005}, "holds"),
        (1, 2, {"within": 0.5}, "fails"),
        (0, 0, {}, "holds"),
        (0, 1e-9, {"within": 0.5}, "fails"),
        (True, True, {}, "holds"),
        (True, 1, {}, "fails"),
        ("abc", "abd", {}, "fails"),
        ("1", 1, {}, "fails"),
        (1e-6, 1e-7, {"bounded": "most"}, "holds"),
        (1e-6, 1e-5, {"bounded": "most"}, "fails"),
        (1, 2, {"bounded": "least"}, "holds"),
        (1, 0.5, {"bounded": "least"}, "fails"),
        (1, float("nan"), {"within": 1}, "fails"),
        (1, float("inf"), {"bounded": "least"}, "fails"),
        (1, float("nan"), {"bounded": "most"}, "fails"),
        (2, 3, {"instead": "reason"}, "differs"),
        (2, 2, {"instead": "reason"}, "holds"),
        (2, 4, {"instead": "reason"}, "fails"),
        (1, 1, {"evidence": "time"}, "holds"),
        (1, 2, {"evidence": "arithmetic", "off": "no excuse"}, "fails"),
        (float("inf"), 5, {"within": 0.1}, "fails"),
        (np.float32(1), torch.tensor(1.0), {}, "holds"),
        (np.int64(3), torch.tensor(3), {}, "holds"),
    ],
)
def test_verdicts(ledger, predicted, measured, options, verdict):
    assert ledger.check(claimed(**options), predicted, measured, 3 if "instead" in options else None) == verdict
    assert ledger.rows[0]["verdict"] == verdict


@pytest.mark.parametrize("evidence", claims.EVIDENCE)
def test_only_times_and_explained_figures_of_papers_may_be_off(ledger, evidence):
    seconds = ("time", "host links", "paced links", "paced")
    expected = "off" if evidence in seconds else "fails"
    assert ledger.check(claimed(within=0.01, evidence=evidence), 100, 102) == expected
    explained = ledger.check(claimed("s09.y", evidence=evidence, off="why"), 1, 2)
    assert explained == ("off" if evidence in (*seconds, "published") else "fails")
    if expected == "fails":
        with pytest.raises(claims.ClaimFailed, match=r"s09\.x"):
            ledger.close()


def test_rows_have_the_promised_fields_and_survive_the_file(ledger, out):
    ledger.check(claimed(unit="B", within=0.005, source="a paper", evidence="wire"), 2**22, 4194304.0)
    rows = claims.read(out)
    assert rows == ledger.rows
    promised = "id notebook statement source predicted measured unit rel evidence verdict reason"
    assert set(promised.split()) <= set(rows[0])
    assert rows[0]["notebook"] == "01_example"
    assert json.loads((out / "claims" / "01_example.json").read_text()) == rows


def test_a_cell_that_runs_again_replaces_its_claim_and_a_new_ledger_begins_empty(ledger, out, monkeypatch):
    monkeypatch.delenv("PARDEMO_HEADLESS", raising=False)
    ledger.check(claimed(), 1, 2)
    ledger.check(claimed(), 1, 1)
    ledger.skip(claimed(), "no GPU any more")
    assert [r["verdict"] for r in ledger.rows] == ["not measured"]
    Ledger("01_example")
    assert claims.read(out) == []


def test_a_second_claim_under_the_same_id_is_refused_and_hides_nothing(ledger, out):
    ledger.check(claimed(says="bytes sent"), 1, 1)
    received = claimed(says="received")
    for book in (lambda: ledger.check(received, 2, 2), lambda: ledger.skip(received, "why")):
        with pytest.raises(ValueError, match=r"s09\.x.*bytes.*'received'"):
            book()
    assert [r["statement"] for r in claims.read(out)] == ["bytes sent"]


def test_where_no_cell_runs_twice_no_id_comes_twice(ledger, monkeypatch):
    monkeypatch.setenv("PARDEMO_HEADLESS", "1")  # as `pardemo run` sets it
    ledger.check(claimed(says="N ranks"), 2, 3)  # fails
    with pytest.raises(ValueError, match=r"s09\.x.*taken.*N"):
        ledger.check(claimed(says="N ranks"), 4, 4)
    assert [r["verdict"] for r in ledger.rows] == ["fails"], "a loop without its variable in the id hides no failure"


@pytest.mark.parametrize(
    ("id", "figures", "options", "message"),
    [
        ("s09.x", (1, 1), {"evidence": "guess"}, "evidence must be one of wire"),
        ("09.", (1, 1), {}, "not '09.'"),
        ("S09.x", (1, 1), {}, "looks like s09"),
        ("s09.x", ([1], 1), {}, "not list"),
        ("s09.x", (None, 1), {}, "not NoneType"),
        ("s09.x", ("a", "b"), {"bounded": "most"}, "bound needs numbers"),
    ],
)
def test_what_cannot_be_claimed(ledger, id, figures, options, message):
    with pytest.raises(ValueError, match=message):
        ledger.check(claimed(id, **options), *figures)
    assert ledger.rows == []


def test_a_damaged_ledger_is_named(ledger, out):
    ledger.check(claimed(), 1, 1)
    for damage in ('[{"id"', "{}", "[null]", "7"):
        (out / "claims" / "01_example.json").write_text(damage)
        with pytest.raises(ValueError, match=r"01_example\.json"):
            claims.read(out)


def test_no_claims_yet(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `pardemo run` first"):
        claims.read(tmp_path)


def test_figures_are_shortened_for_readers():
    shown = {4194304: "4,194,304", 5592405.333: "5,592,405.3", 0.03125: "0.03125", 1e-6: "1e-06", True: "True"}
    assert {value: claims.short(value) for value in shown} == shown
    assert claims.short(None) == ""


@pytest.mark.parametrize(
    ("predicted", "options", "shown"),
    [
        (100, {}, "100"),
        (100, {"within": 0.005}, "100 ± 0.5 %"),
        (0.2, {"within": 0.05 / 0.2}, "0.2 ± 25 %"),
        (100, {"bounded": "most"}, "≤ 100"),
        (True, {"within": 0.005}, "True"),
        ("abc", {"within": 0.005}, "abc"),
    ],
)
def test_a_tolerance_stands_beside_what_is_predicted(ledger, predicted, options, shown):
    ledger.check(claimed(**options), predicted, predicted)
    assert claims.predicted_text(ledger.rows[0]) == shown


def test_the_articles_statements_are_all_there():
    found = scorecard.statements()
    assert [s["id"] for s in found] == [f"s{k:02d}" for k in range(1, 107)]
    assert {s["judgement"] for s in found} == {"ok", "if", "no", "doc"}
    assert all(s["chapters"] for s in found)


# --- the measures behind claims, given something broken --------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({}, "holds"), ({"tensor-parallel all-reduces": 0.0}, "fails"), ({"tensor-parallel all-reduces": 1.9}, "fails")],
    ids=["as it is", "no all-reduces", "nearly twice of them"],
)
def test_the_scaling_figure_tells_whether_tensor_parallel_all_reduces_are_reckoned(ledger, changed, expected):
    ratios = []
    for parts, paper in megatron_2019.figure_5().values():
        planned = sum(changed.get(part, 1) * percent for part, percent in parts.items())
        ratios.append((100 + planned) / (100 + paper))
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    assert ledger.check(claimed("s49.x", within=0.11, evidence="published"), 1, worst) == expected


def test_a_factor_shows_in_small_gradients_too():
    small = 1e-4 * gpt.numbers(64, 64)
    assert (1.005 * small - small).abs().max() < 1e-5, "which an absolute 1e-5 does not see"
    assert gpt.relative_error(1.005 * small, small) == pytest.approx(0.005)
    assert gpt.largest_error({"a": small, "b": 1.03 * small}, {"a": small, "b": small}) == pytest.approx(0.03)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_small_error(broken):
    right = torch.ones(3)
    wrong = torch.tensor([1.0, broken, 1.0])
    assert gpt.relative_error(wrong, right) == float("inf")
    assert gpt.largest_error({"a": right, "b": wrong}, {"a": right, "b": right}) == float("inf")
    assert gpt.relative_error(right, torch.zeros(3)) == float("inf")
    assert gpt.relative_error(torch.zeros(3), torch.zeros(3)) == 0


def test_the_order_of_spans_tells_whether_anything_overlaps():
    def steps(exchange_at):  # two ranks; layers from 0 to 2 and from 2 to 4, two exchanges of 1
        layers = [Span(rank, "compute", "", begin, begin + 2) for rank in (0, 1) for begin in (0.0, 2.0)]
        return layers + [Span(rank, "communication", "", at, at + 1) for rank in (0, 1) for at in exchange_at]

    assert begun_before_end(steps((2.0, 4.0)), "communication", "compute") == 2, "each rank's first"
    assert begun_before_end(steps((4.0, 5.0)), "communication", "compute") == 0, "without overlap none"
    late = [Span(0, "compute", "", 0.0, 1.0), Span(1, "compute", "", 0.0, 9.0), Span(0, "communication", "", 2.0, 3.0)]
    assert begun_before_end(late, "communication", "compute") == 0, "another rank's end does not count"
    assert begun_before_end([Span(0, "communication", "", 0.0, 1.0)], "communication", "compute") == 0


DECLARED = """
[tolerance.headers]
within = 0.01
because = "headers are bytes, too"

["s09.sent"]
says = "what a rank sends"
unit = "φ"
cases = "N"
tolerance = "headers"
source = "a paper"
evidence = "wire"
instead = "the library sends all of it"

["s09.error"]
says = "relative error"
at_most = 1e-5
because = "sums in another order"
cases = ["N", ""]

["01.seconds"]
says = "how long"
unit = "s"
within = 0.1
because = "the clock's own spread"
evidence = "time"
off = "two cores are shared"

["01.same"]
says = "same bits on every rank"
"""


@pytest.fixture
def declared(out, tmp_path):
    """Writes declarations, and opens the ledger of their chapter."""

    def write(text=DECLARED, links=None):
        (tmp_path / "claims.toml").write_text(text)
        return Ledger("01_example", links=links, declared=tmp_path / "claims.toml")

    return write


def test_a_claim_has_a_row_for_each_case(declared):
    claim = declared()
    claim("s09.sent", 8, {2: 8.01, 4: 7.95})
    claim("s09.error", measured={(2, "forward"): 1e-6, (2, "backward"): 1e-7})
    claim("01.same", True, True)
    found = [(row["id"], row["claim"], row["case"], row["predicted"], row["measured"]) for row in claim.rows]
    assert found == [
        ("s09.sent.n2", "s09.sent", "N = 2", 8, 8.01),
        ("s09.sent.n4", "s09.sent", "N = 4", 8, 7.95),
        ("s09.error.n2_forward", "s09.error", "N = 2, forward", 1e-5, 1e-6),
        ("s09.error.n2_backward", "s09.error", "N = 2, backward", 1e-5, 1e-7),
        ("01.same", "01.same", "", True, True),
    ]
    first = claim.rows[0]
    assert (first["unit"], first["rel"], first["source"], first["evidence"]) == ("φ", 0.01, "a paper", "wire")
    assert first["because"] == "headers are bytes, too"
    assert claim.rows[2]["relation"] == "at most"
    assert claims.summary(claim.rows) == "3 claims in 5 cases: 3 hold."


def test_cases_may_come_one_by_one_with_their_own_tolerance_and_evidence(declared):
    claim = declared()
    for n in (2, 4):
        claim("s09.sent", {2: 8, 4: 9}[n], 8.4, case=n, within=0.1, evidence="count")
    assert [row["verdict"] for row in claim.rows] == ["holds", "holds"]
    assert {row["evidence"] for row in claim.rows} == {"count"}


OVER_LINKS = """
["01.seconds"]
says = "seconds of an exchange"
within = 0.1
because = "what the kernel keeps"
evidence = "links"
off = "Another load."
["01.same"]
says = "the same sum"
"""


@pytest.mark.parametrize("kept", ["host links", "paced links"])
def test_the_machine_says_which_evidence_a_claim_about_links_has(declared, kept):
    claim = declared(OVER_LINKS, links=Tier("namespaces", kept, ""))
    claim("01.seconds", 1, {2: 1.05, 4: 2})
    assert [(row["evidence"], row["verdict"]) for row in claim.rows] == [(kept, "holds"), (kept, "off")]
    assert [row["reason"] for row in claim.rows] == ["", "Another load."], "what holds needs no excuse"


def test_where_no_link_can_be_limited_claims_about_them_are_not_measured(declared):
    claim = declared(OVER_LINKS, links=Tier("none", "", "what would give it"))
    claim("01.seconds", 1, {2: 5, 4: 7})
    claim("01.same", True, True)
    assert [(row["verdict"], row["reason"]) for row in claim.rows] == [
        ("not measured", "what would give it"),
        ("holds", ""),
    ]
    with pytest.raises(ValueError, match=r"01\.seconds.*Ledger\('01_example'.*links=tiers\.best_tier\(\)"):
        declared(OVER_LINKS)("01.seconds", 1, 1)


def test_what_differs_is_off_or_skipped_is_told_in_the_declarations_words(declared):
    claim = declared()
    claim("s09.sent", 8, {2: 16, 4: 8}, instead={2: 16, 4: 16})
    claim("01.seconds", 1, 2)
    claim.skip("01.same", reason="one rank alone")
    assert [row["verdict"] for row in claim.rows] == ["differs", "holds", "off", "not measured"]
    assert claim.rows[0]["reason"] == "measured as 16 predicts: the library sends all of it"
    closing = repr(claim.close())
    assert closing.splitlines()[0] == "3 claims in 4 cases: 1 differs, 1 not measured, 1 off."
    for sentence in ("It is 16 instead: the library sends all of it.", "Two cores are shared.", "One rank alone."):
        assert sentence in closing


def test_a_declared_claim_that_fails_or_is_forgotten_fails_the_notebook(declared, monkeypatch):
    claim = declared()
    claim("s09.sent", 8, {2: 8, 4: 9})
    with pytest.raises(claims.ClaimFailed, match=r"1.*2.*s09\.sent\.n4"):
        claim.close()
    claim = declared()
    claim("s09.sent", 8, 8)
    claim.close()  # a reader may run a part
    monkeypatch.setenv("PARDEMO_HEADLESS", "1")
    with pytest.raises(claims.ClaimFailed, match=r"01\.same.*01\.seconds.*s09\.error"):
        claim.close()


@pytest.mark.parametrize(
    ("book", "told"),
    [
        (lambda claim: claim("s09.snet", 8, 8), "declares no claim 's09.snet'; did you mean 's09.sent'?"),
        (lambda claim: claim("s09.sent", 8), "needs what was measured"),
        (lambda claim: claim("s09.sent", measured=8), "needs what was predicted"),
        (lambda claim: claim("s09.sent", {2: 8}, {4: 8}), "no figure for the case 4; there are: 2"),
        (lambda claim: claim("s09.error", measured=0, instead=2), "say in its declaration why it may differ"),
        (lambda claim: claim.skip("s09.sent"), "only skipped with a reason"),
    ],
)
def test_a_claim_that_cannot_be_booked_says_what_is_missing(declared, book, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        book(declared())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('["01.x"]\nsays = "x"\nwithin = 0.1', "01.x: within needs a reason"),
        ('["01.x"]\nsays = "x"\nat_most = 0', "01.x: at_most needs a reason"),
        ('["01.x"]\nsays = "x"\nwithin = 0.1\nat_least = 1\nbecause = "b"', "within and at_least: a claim has one"),
        ('["01.x"]\nunit = "B"', "01.x: a claim says something"),
        ('["01.x"]\nsays = "x"\nwithn = 0.1', "no field 'withn'; did you mean 'within'?"),
        ('["01.x"]\nsays = "x"\nevidence = "guess"', "evidence must be one of"),
        ('["01.x"]\nsays = "x"\nevidence = "time"', "seconds may be off on another machine"),
        ('["01.x"]\nsays = "x"\ntolerance = "bytes"', "no [tolerance.bytes]; there are: none"),
        ('["01.x"]\nsays = ', "claims.toml:"),
    ],
)
def test_a_declaration_with_a_fault_is_refused_in_one_line(declared, text, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        declared(text)


def test_a_prediction_of_nothing_has_no_tolerance_in_per_cent(declared):
    claim = declared()
    claim("s09.sent", 0, {2: 0})
    assert repr(Line(claim.rows)) == "✓ what a rank sends: predicted 0 φ, measured 0 φ (N = 2)  [s09.sent]"


def test_a_claim_shows_as_one_line(declared):
    claim = declared()
    claim("s09.sent", 8, {2: 8.003, 4: 16}, instead=16)
    claim("01.same", True, True)
    line = Line([row for row in claim.rows if row["claim"] == "s09.sent"])
    assert repr(line).splitlines() == [
        "≠ what a rank sends: predicted 8 φ ± 1 %, measured 8.003 φ (N = 2), 16 φ (N = 4)  [s09.sent]",
        "  It is 16 instead: the library sends all of it.",
    ]
    page = BeautifulSoup(line._repr_html_(), "html.parser")
    sign, sentence = page.find_all("span")
    assert sign["title"] == "differs: not as predicted; a second prediction holds, and the reason is given"
    assert sentence["title"] == "headers are bytes, too; a paper; wire; s09.sent", "its id is no part of what is read"
    assert "s09.sent" not in page.get_text()
    assert page.div["data-claim"] == "s09.sent"
    assert repr(Line(claim.rows[-1:])) == "✓ same bits on every rank: yes  [01.same]"


def test_four_cases_are_a_table_and_three_a_line(declared):
    claim = declared()
    claim("s09.sent", 8, {n: 8 + n / 1000 for n in range(3)})
    assert "<table" not in Line(claim.rows)._repr_html_()
    claim = declared()
    claim("s09.sent", 8, {n: 8 + n / 1000 for n in range(4)})
    page = BeautifulSoup(Line(claim.rows)._repr_html_(), "html.parser")
    assert page.get_text().startswith("✓ what a rank sends: predicted 8 φ ± 1 %"), "said once, for all cases"
    assert [[cell.get_text() for cell in row.find_all(["td", "th"])] for row in page.find_all("tr")][:2] == [
        ["", "measured φ"], ["N = 0", "8"],
    ]  # fmt: skip
    claim = declared()
    claim("s09.sent", {n: n for n in range(1, 5)}, {n: 1.001 * n for n in range(1, 5)})
    rows = BeautifulSoup(Line(claim.rows)._repr_html_(), "html.parser").find_all("tr")
    assert [cell.get_text() for cell in rows[0].find_all("th")] == ["", "predicted φ ± 1 %", "measured φ"]
    assert [cell.get_text() for cell in rows[2].find_all("td")] == ["N = 2", "2", "2.002"]
    claim = declared()
    claim("s09.sent", 8, dict.fromkeys(range(5), 8))
    assert "<table" not in Line(claim.rows)._repr_html_(), "one figure of all cases"


def test_many_cases_fold_and_hostile_text_stays_text(declared):
    claim = declared(DECLARED.replace("what a rank sends", "a <b> sends"))
    claim("s09.sent", 8, {n: 8 + n / 1000 for n in range(12)})
    page = BeautifulSoup(Line(claim.rows)._repr_html_(), "html.parser")
    assert says(page.summary.get_text(), "12", "predicted", "1", "1.001")
    assert "a <b> sends" in page.summary.get_text()
    assert len(page.find_all("tr")) == 13
    closing = BeautifulSoup(claim.close()._repr_html_(), "html.parser")
    assert closing.p.get_text() == "1 claim in 12 cases: 1 holds."
    assert len(closing.find_all("tr")) == 13


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_what_a_chapter_declares_is_what_it_books(name):
    """Every id in the notebook has its declaration, and every declaration its place."""
    source = "\n".join(c.source for c in nbformat.read(project.notebooks()[name], 4).cells if c.cell_type == "code")
    declared = declarations.read_declarations(declared_in(project.chapter_name(name)))
    if "claim(" not in source and not declared:
        pytest.skip("not yet declared as data")
    own = f"{project.chapter_name(name)}."
    there = {id.removeprefix(own) for id in re.findall(r"[\"']((?:\w+\.)?[a-z0-9_.]+)[\"']", source)}
    assert set(declared) <= there
    assert "claim.check(" not in source


def test_each_claim_is_declared_by_one_chapter():
    """Booked by two, the rows of one would be taken for cases of the other's."""
    where = Counter(id for name in CHAPTERS for id in declarations.read_declarations(declared_in(name)) if "." in id)
    assert [id for id, chapters in where.items() if chapters > 1] == []
