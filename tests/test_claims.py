"""Verdicts, the ledger's file, and what may not be claimed."""

import json

import numpy as np
import pytest
import torch

from pardemo import Ledger, claims


@pytest.fixture
def ledger(out):
    return Ledger("01_example")


@pytest.mark.parametrize(
    ("predicted", "measured", "options", "verdict"),
    [
        (100, 100, {}, "holds"),
        (100, 100.4, {"rel": 0.005}, "holds"),
        (100, 100.6, {"rel": 0.005}, "fails"),
        (100, 99.4, {"rel": 0.005}, "fails"),
        (-100, -100.4, {"rel": 0.005}, "holds"),
        (0, 0, {}, "holds"),
        (0, 1e-9, {"rel": 0.5}, "fails"),
        (True, True, {}, "holds"),
        (True, 1, {}, "fails"),
        ("abc", "abc", {}, "holds"),
        ("abc", "abd", {}, "fails"),
        ("1", 1, {}, "fails"),
        (1e-6, 1e-7, {"relation": "at most"}, "holds"),
        (1e-6, 1e-5, {"relation": "at most"}, "fails"),
        (1, 2, {"relation": "at least"}, "holds"),
        (1, 0.5, {"relation": "at least"}, "fails"),
        (1, float("nan"), {"rel": 1}, "fails"),
        (1, float("inf"), {"relation": "at least"}, "fails"),
        (1, float("nan"), {"relation": "at most"}, "fails"),
        (2, 3, {"instead": (3, "reason")}, "differs"),
        (2, 2, {"instead": (3, "reason")}, "holds"),
        (2, 4, {"instead": (3, "reason")}, "fails"),
        (1, 2, {"evidence": "time"}, "off"),
        (1, 2, {"evidence": "paced"}, "off"),
        (1, 1, {"evidence": "time"}, "holds"),
        (1, float("nan"), {"evidence": "wire"}, "fails"),
        (float("inf"), 5, {"rel": 0.1}, "fails"),
        (np.float32(1), torch.tensor(1.0), {}, "holds"),
        (np.int64(3), torch.tensor(3), {}, "holds"),
    ],
)
def test_verdicts(ledger, predicted, measured, options, verdict):
    assert ledger.check("s09.x", "statement", predicted, measured, **options) == verdict
    assert ledger.rows[0]["verdict"] == verdict


@pytest.mark.parametrize("evidence", ["wire", "memory", "numeric", "count", "arithmetic"])
def test_only_time_may_be_off(ledger, evidence):
    assert set(claims.EVIDENCE) - {"time", "paced"} == {"wire", "memory", "numeric", "count", "arithmetic"}
    assert ledger.check("s09.x", "statement", 100, 102, rel=0.01, evidence=evidence) == "fails"
    with pytest.raises(claims.ClaimFailed, match=r"1 of 1 claims fail: s09\.x"):
        ledger.close()


def test_a_failing_claim_fails_the_notebook_and_names_itself(ledger):
    ledger.check("s09.good", "fine", 1, 1)
    ledger.check("s09.bad", "bytes sent", 100, 200, "B")
    with pytest.raises(
        claims.ClaimFailed, match=r"1 of 2 claims fail: s09.bad \(bytes sent\): predicted 100, measured 200 B"
    ):
        ledger.close()


def test_off_differs_and_not_measured_do_not_fail(ledger):
    ledger.check("s09.off", "slow", 1, 2, evidence="time")
    ledger.check("s09.differs", "other", 1, 2, instead=(2, "because"))
    ledger.skip("s09.skip", "no GPU", "there is none")
    table = ledger.close()
    assert list(table.data["verdict"]) == ["off", "differs", "not measured"]
    assert "because" in ledger.rows[1]["reason"]


def test_a_sections_claims_are_shown_apart(ledger):
    for id in ("s09.a", "s10.b", "01.c"):
        ledger.check(id, "statement", 1, 1)
    assert list(ledger.table("s10", "01").data["id"]) == ["s10.b", "01.c"]
    assert len(ledger.table().data) == 3
    assert "statement" in ledger.table().to_html()


def test_rows_have_the_promised_fields_and_survive_the_file(ledger, out):
    ledger.check("s09.x", "statement", 2**22, 4194304.0, "B", 0.005, "a paper", "wire")
    rows = claims.read(out)
    assert rows == ledger.rows
    promised = [
        "id",
        "notebook",
        "statement",
        "source",
        "predicted",
        "measured",
        "unit",
        "rel",
        "evidence",
        "verdict",
        "reason",
    ]
    assert set(promised) <= set(rows[0])
    assert rows[0]["notebook"] == "01_example"
    assert json.loads((out / "claims" / "01_example.json").read_text()) == rows


def test_checking_again_replaces_and_a_new_ledger_begins_empty(ledger, out):
    ledger.check("s09.x", "statement", 1, 2)
    ledger.check("s09.x", "statement", 1, 1)
    assert [r["verdict"] for r in ledger.rows] == ["holds"]
    Ledger("01_example")
    assert claims.read(out) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("s09.x", "s", 1, 1, "", 0, "", "guess"), "evidence must be one of wire"),
        (("09", "s", 1, 1), "not '09'"),
        (("S09.x", "s", 1, 1), "looks like s09"),
        (("s09.x", "s", [1], 1), "not list"),
        (("s09.x", "s", None, 1), "not NoneType"),
    ],
)
def test_what_cannot_be_claimed(ledger, arguments, message):
    with pytest.raises(ValueError, match=message):
        ledger.check(*arguments)
    assert ledger.rows == []


def test_bounds_need_numbers_and_relations_exist(ledger):
    with pytest.raises(ValueError, match="relation must be one of"):
        ledger.check("s09.x", "s", 1, 1, relation="near")
    with pytest.raises(ValueError, match="bound needs numbers"):
        ledger.check("s09.x", "s", "a", "b", relation="at most")
    with pytest.raises(ValueError, match="only skipped with a reason"):
        ledger.skip("s09.x", "s", "")


def test_a_damaged_ledger_is_named(ledger, out):
    ledger.check("s09.x", "s", 1, 1)
    for damage in ('[{"id"', "{}", "[null]", "7"):
        (out / "claims" / "01_example.json").write_text(damage)
        with pytest.raises(ValueError, match=r"01_example\.json is not a ledger"):
            claims.read(out)


def test_no_claims_yet(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `pardemo run` first"):
        claims.read(tmp_path)


def test_figures_are_shortened_for_readers():
    shown = {4194304: "4,194,304", 5592405.333: "5,592,405.3", 0.03125: "0.03125", 1e-6: "1e-06", True: "True"}
    assert {value: claims.short(value) for value in shown} == shown
    assert claims.short(None) == ""


def test_the_articles_statements_are_all_there():
    found = claims.statements()
    assert [s["id"] for s in found] == [f"s{k:02d}" for k in range(1, 107)]
    assert {s["judgement"] for s in found} == {"ok", "if", "no", "doc"}
    assert all(s["chapters"] for s in found)
