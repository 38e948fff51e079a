"""Cells that only import, ask, book or draw are folded in JupyterLab and on the page; experiments are not."""

import nbformat
import pytest
from folding import fold, is_folded
from nbformat import v4

from pardemo import project
from pardemo.book.run.report import pages


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_a_chapters_cells_are_folded_as_the_rule_says(name):
    notebook = nbformat.read(project.notebooks()[name], 4)
    before = [dict(cell.metadata) for cell in notebook.cells]
    fold(notebook)
    assert [dict(cell.metadata) for cell in notebook.cells] == before, "run python .ci/folding.py"


def test_what_is_folded():
    for source in (
        "%load_ext pardemo\nimport torch\nfrom pardemo import World",
        'sent = page.guess("How many times?", ...)\nsent',
        'wrong = {2: "No."}\nclaim("s09", 1.5, max(sent))\nguess.reveal(max(sent), wrong, "S")',
        "drawings.ring_all_reduce(4)",
        "found = world.run(step)\nclaim('s09', 1.5, found)",
    ):
        assert is_folded(source), source
    for source in (
        "%%ranks 4\nimport torch",
        "x = 2 * y",
        "page.check('f', f)",
        "def seconds(n): ...\n\n\nfigures.draw(seconds(3))",
        "for n in (1, 2):\n    claim('s09', n, n)",
        "print('a')\nfigures.draw()",
        "rates = measure()\nfigures.draw(rates)",
        "",
    ):
        assert not is_folded(source), source


def test_a_page_folds_what_the_notebook_folds(tmp_path):
    sources = ["import os", "claim('s09', 1, 1)", "x = 2"]
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# 01 A"), *map(v4.new_code_cell, sources)])
    fold(notebook)
    notebook.cells[2].metadata["jupyter"] = {"source_hidden": True}  # the claim, as on a page of the book
    nbformat.write(notebook, tmp_path / "01_a.ipynb")
    chapter = {"name": "01_a", "number": "01", "title": "A", "page": "01_a.html"}
    text = pages.write_page(tmp_path, "01_a", [chapter], tmp_path).read_text()
    assert text.count('<details class="source">') == 2
    assert "<summary>imports</summary>" in text
    assert "<summary>how this was claimed</summary>" in text
