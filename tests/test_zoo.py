"""The zoo is whole, its page says what was measured, and a few of its bugs are found, broken, and not found, mended."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from conftest import few, says

ZOO = Path(__file__).resolve().parent / "zoo"
SPEC = importlib.util.spec_from_file_location("zoo_run", ZOO / "run.py")
run = sys.modules["zoo_run"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)
CASES = {case.name: case for case in run.cases()}
KEPT = json.loads(run.RESULT.read_text(encoding="utf-8"))
#: Scripts that are no case: what cases share, and the runner's own.
SHARED = {"common", "cut_layers", "sequences", "stages", "run"}
#: Of different families, and quick. The whole zoo takes minutes: tests/zoo/run.py.
QUICK = (
    "ddp_bypassed", "mean_of_micro_batch_means", "last_stage_not_divided", "tied_weight_counted_twice",
    "one_mask_for_all_replicas",
)  # fmt: skip


def test_each_case_is_a_script_and_each_script_a_case():
    assert set(CASES) == {path.stem for path in ZOO.glob("*.py")} - SHARED
    assert len(CASES) == len(run.cases()), "a name is that of one case"
    assert {case.family for case in CASES.values()} == set(run.FAMILIES), "the page has a heading for each"
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_a_case_says_what_and_where_it_happened(name):
    case = CASES[name]
    text = case.script.read_text(encoding="utf-8")
    assert case.thread
    assert case.what
    for number in re.findall(r"\d{3,}", case.thread):
        assert number in text, f"the script names its thread, {number}"
    assert "mended" in text
    first, *others = case.layouts
    assert others, "a proof needs two layouts"
    fields = {layout: {word.partition("=")[0] for word in layout.split()} for layout in case.layouts}
    assert all("ranks" in fields[layout] for layout in case.layouts)
    assert all(fields[layout] == fields[first] for layout in others)


def test_what_was_measured_is_of_these_cases():
    assert [(row["family"], row["name"]) for row in KEPT] == [(case.family, case.name) for case in run.cases()]
    for row in KEPT:
        case = CASES[row["name"]]
        assert (row["thread"], row["what"]) == (case.thread, case.what)
        assert row["cause_right"] <= (row["cause"] == case.cause)
        assert row["found"] == bool(row["layout"])
        assert row["layout"] in ("", *case.layouts[1:])


def test_the_page_is_made_of_what_was_measured():
    text = run.PAGE.read_text(encoding="utf-8")
    assert text == run.page(KEPT, text), "make it anew: python tests/zoo/run.py --docs"
    assert [place[2] for place in run.PLACE.finditer(text)] == ["count", "families"]
    assert all(f"| `{row['name']}` |" in text for row in KEPT), "a row for each case"


def test_what_is_missed_is_told():
    row = dict(KEPT[0], module_right=True, cause_right=False, cause="loss", module="head", factor=None, said="a, b")
    said = run.counted([row, dict(KEPT[1], false_alarm=True)])
    assert says(said, "**2", "2", "2", "1", "False", "2", "1")
    assert f"(`{row['name']}`). It should say {CASES[row['name']].cause}, and says loss at `head`: a, b." in said
    assert "Missed" not in run.counted([dict(row, cause_right=True)])
    assert run.verdict(dict(row, found=False)) == "nothing"
    assert run.verdict(dict(row, factor=4.0, rest=1e-9)) == "loss, × 4 at `head`"
    assert run.verdict(dict(row, factor=0.4, rest=0.3)) == "loss at `head`"
    assert run.verdict(dict(row, factor=0.25, rest=1e-9, said="÷ 4 = the ranks: twice")) == "loss, ÷ 4 at `head`"


def test_a_row_names_the_first_thread():
    assert run.first_of("pytorch 1, 22 and 3") == "pytorch 1"
    assert run.first_of("a/b#12 and c/d 3") == "a/b 12"
    assert run.first_of("a paper of its own") == "a paper of its own"


@pytest.mark.parametrize("name", few(QUICK, 0, 2))
def test_broken_it_is_found_and_mended_it_is_not(name):
    made = run.outcome(CASES[name])
    assert all(made[key] for key in run.RIGHT), made
    assert not made["false_alarm"], made
