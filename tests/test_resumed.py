"""The committed table of frameworks, docs/records/resumed.md: of these scripts, and as they come out today."""

from dataclasses import replace

import pytest
from resumed import matrix

from pardemo import project
from pardemo.script.resume import trials

BY_NAME = {one.name: one for one in matrix.FRAMEWORKS}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """The matrix's commands name their scripts from there."""
    monkeypatch.chdir(project.root())


def page() -> tuple[dict[str, tuple[str, ...]], set[tuple[str, str]]]:
    """The lines of the table by framework, and where which sentence below it is said."""
    text = matrix.PAGE.read_text(encoding="utf-8")
    lines = text[text.index(matrix.BEGIN) : text.index(matrix.END)].splitlines()
    table = [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in lines if line.startswith("|")]
    assert table[0] == matrix.HEAD
    told = [line.removeprefix("- ").partition(": ") for line in lines if line.startswith("- ")]
    said = {(place, sentence) for places, _, sentence in told for place in places.split("; ")}
    return {name: (name, *line[1:]) for line in table[2:] for name in line[0].split("; ")}, said


def verdicts(name: str) -> dict[str, str]:
    """What the page says of each layout of a framework."""
    _, first, same, others, _ = page()[0][name]
    told = [one.rpartition(": ") for one in others.split("; ") if one]
    return {first: same} | {layout: verdict for verdict, _, layouts in told for layout in layouts.split(", ")}


def said_of(*places: str) -> set[tuple[str, str]]:
    return {one for one in page()[1] if one[0] in places}


def test_the_table_is_of_these_scripts_in_these_layouts():
    assert list(page()[0]) == list(BY_NAME)
    for name, framework in BY_NAME.items():
        assert set(verdicts(name)) == set(framework.layouts)
        assert page()[0][name] == matrix.table_line(framework, verdicts(name), page()[0][name][-1])


def test_what_is_lost_has_a_sentence():
    for name in BY_NAME:
        for layout, verdict in verdicts(name).items():
            if verdict.startswith(("✗", "refuses", "begins anew", "not compared")):
                assert said_of(f"{name}, {layout}"), (name, layout)
        if page()[0][name][-1] in ("raises", "begins anew", "not compared"):
            assert said_of(f"{name}, killed in a save"), name


def test_a_row_made_anew_is_that_of_the_page():
    name = "torch DDP, torch.save"
    few = replace(BY_NAME[name], layouts=BY_NAME[name].layouts[:2])
    line, said = matrix.rows(few)
    known = {layout: verdicts(name)[layout] for layout in few.layouts}
    assert line == matrix.table_line(few, known, page()[0][name][-1])
    assert set(said) == said_of(*(f"{name}, {place}" for place in (*few.layouts, "killed in a save")))


@pytest.mark.nightly
def test_ddp_on_four_ranks_adds_up_in_another_order_in_its_first_step():
    """Its buckets are made anew behind that, in the order in which gradients come; with unused parameters they stay."""
    line = "tests/resumed/ddp.py --out {folder} --batch {batch} --buckets-stay"
    made = trials.stopped(line, ["ranks=4 batch=3"], stops=["all"])
    assert made.equal
    assert made.trials[0].exact
    name = "torch DDP, torch.save, from four ranks"
    assert verdicts(name)["ranks=4 batch=3"] == "to rounding", "where they do not stay"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    ["Accelerate, save_state, one process", "pardemo's ZeRO-1", "DeepSpeed ZeRO-2, universal, generators saved too"],
)
def test_rows_made_anew_without_the_stop_in_a_save_are_those_of_the_page(name):
    """Where within a save a stop comes is a matter of time: what is left of the save may be another part."""
    few = replace(BY_NAME[name], layouts=BY_NAME[name].layouts[:2])
    made, said = matrix.resumed(few)
    assert made == {layout: verdicts(name)[layout] for layout in few.layouts}
    assert set(said) == said_of(*(f"{name}, {layout}" for layout in few.layouts))
