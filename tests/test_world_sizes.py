"""Every notebook with 1, 2, 3, 4 and 8 ranks: the committed table, and the command that writes it."""

import pytest
import world_sizes

from pardemo import project
from pardemo.book.contents import notebook_of
from pardemo.book.run import endings, runner
from pardemo.book.run.endings import NotebookEnding
from pardemo.book.run.parameters import RunError, assign, parameters_of


@pytest.fixture(scope="module")
def table():
    return {(row["notebook"], int(row["world_size"])): row["result"] for row in world_sizes.read(COMMITTED)}


COMMITTED = project.root() / world_sizes.TABLE


def test_no_notebook_fails_with_another_number_of_ranks(table):
    assert set(table) == {(name, size) for name in project.notebooks() for size in world_sizes.SIZES}
    assert {key: result for key, result in table.items() if result.startswith("failed")} == {}
    own = {(name, int(parameters_of(path)["world_size"])) for name, path in project.notebooks().items()}
    assert {table[key] for key in own if key in table} == {"held"}
    assert str(project.root()) not in COMMITTED.read_text()


def test_a_notebook_holds_with_each_number_of_ranks_that_it_does_not_refuse(table):
    for (name, size), result in table.items():
        try:
            assign({name: project.notebooks()[name]}, {"world_size": size})
            told = "held"
        except RunError as error:
            told = f"refused: {error}"
        assert result == told, "run python .ci/world_sizes.py"


def test_the_command_runs_what_is_not_refused_and_keeps_the_other_rows(tmp_path, monkeypatch):
    data, layout, zero = map(notebook_of, ("data_parallel", "which_layout", "zero_memory"))
    asked = []

    def run(names, given, out, resume):
        asked.append((names, given["world_size"], resume))
        broken = NotebookEnding(data, "failed", error="cell 3: ValueError: sizes differ\n--- rank 0 ---\nTrace")
        ended = {name: NotebookEnding(name, "ok") for name in names} | {broken.notebook: broken}
        out.mkdir(parents=True, exist_ok=True)
        endings.write_endings(out, ended)

    monkeypatch.setattr(runner, "run_notebooks", run)
    table = tmp_path / "table.csv"
    world_sizes.run(["which_layout"], [4], tmp_path, table)
    rows = world_sizes.run(["data_parallel", "zero_memory"], [1, 3], tmp_path, table)
    assert asked == [([layout], 4, True), ([data], 3, True)]
    assert [tuple(row.values()) for row in rows] == [
        (data, "1", f"refused: {data} needs world_size of at least 2, not 1"),
        (data, "3", "failed: cell 3: ValueError: sizes differ"),
        (zero, "1", f"refused: {zero} needs world_size of at least 2 that 2 divides, not 1"),
        (zero, "3", f"refused: {zero} needs world_size of at least 2 that 2 divides, not 3"),
        (layout, "4", "held"),
    ]
    assert world_sizes.read(table) == rows
    world_sizes.run(["data_parallel", "which_layout"], [3, 4], tmp_path, table, missing=True)
    assert asked[2:] == [([data, layout], 3, True), ([data], 4, True)]
