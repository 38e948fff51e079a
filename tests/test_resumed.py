"""The committed table of frameworks, docs/records/resumed.md: of these scripts, and as they come out today."""

from dataclasses import replace
from pathlib import Path

import pytest
from resumed import matrix

from pardemo import project
from pardemo.script.resume import trials

BY_NAME = {one.name: one for one in matrix.FRAMEWORKS}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """The matrix's commands name their scripts from there."""
    monkeypatch.chdir(project.root())


def page() -> tuple[list[tuple[str, ...]], list[str]]:
    """The lines of the table without its head, and the sentences below it."""
    text = Path("docs/records/resumed.md").read_text(encoding="utf-8")
    lines = text[text.index(matrix.BEGIN) : text.index(matrix.END)].splitlines()
    table = [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in lines if line.startswith("|")]
    assert table[0] == matrix.HEAD
    return table[2:], [line.removeprefix("- ") for line in lines if line.startswith("- ")]


def lines_of(name: str) -> list[tuple[str, ...]]:
    table, _ = page()
    begin = next(number for number, line in enumerate(table) if line[0] == name)
    return table[begin : begin + len(BY_NAME[name].layouts)]


def test_the_table_is_of_these_scripts_in_these_layouts():
    table, _ = page()
    assert [line[0] for line in table if line[0]] == list(BY_NAME)
    for name, framework in BY_NAME.items():
        lines = lines_of(name)
        assert [line[2] for line in lines] == list(framework.layouts)
        assert [line[:2] for line in lines] == [(name, framework.layouts[0]), *[("", "")] * (len(lines) - 1)]


def test_what_is_lost_has_a_sentence():
    table, said = page()
    name = ""
    for line in table:
        name = line[0] or name
        if {"✗", "refuses", "begins anew", "not compared"} & set(line[3:-1]):
            assert any(one.startswith(f"{name}, {line[2]}: ") for one in said), line
        if line[-1] in ("raises", "begins anew", "not compared"):
            assert any(one.startswith(f"{name}, killed in a save: ") for one in said), line


def test_a_row_made_anew_is_that_of_the_page():
    name = "torch DDP, torch.save"
    lines, said = matrix.rows(replace(BY_NAME[name], layouts=BY_NAME[name].layouts[:2]))
    assert lines == lines_of(name)[:2]
    assert said == [one for one in page()[1] if one.startswith(f"{name}, ")]


def test_ddp_on_four_ranks_adds_up_in_another_order_in_its_first_step():
    """Its buckets are made anew behind that, in the order in which gradients come; with unused parameters they stay."""
    line = "tests/resumed/ddp.py --out {folder} --batch {batch} --buckets-stay"
    made = trials.stopped(line, ["ranks=4 batch=3"], stops=["all"])
    assert made.equal
    assert made.trials[0].exact
    assert lines_of("torch DDP, torch.save, from four ranks")[0][3] == "to rounding", "where they do not stay"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    ["Accelerate, save_state, one process", "pardemo's ZeRO-1", "DeepSpeed ZeRO-2, universal, generators saved too"],
)
def test_rows_made_anew_without_the_stop_in_a_save_are_those_of_the_page(name):
    """Where within a save a stop comes is a matter of time: what is left of the save may be another part."""
    few = replace(BY_NAME[name], layouts=BY_NAME[name].layouts[:2])
    lines, said = matrix.resumed(few)
    assert [line[:-1] for line in lines] == [line[:-1] for line in lines_of(name)[:2]]
    of_these = tuple(f"{name}, {layout}: " for layout in few.layouts)
    assert said == [one for one in page()[1] if one.startswith(of_these)]
