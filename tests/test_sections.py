"""Sections of a chapter are numbered from 1 on, and what the text refers to is there."""

import re

import chapter_order as order
import nbformat
import pytest

from pardemo import project
from pardemo.book.contents import CHAPTERS, notebook_of

ELSEWHERE = re.compile(r"\.ipynb\)|article|paper|arXiv|\d{4}\.\d{5}|documentation|its section")
WITH_SECTIONS = [
    name for name in sorted(project.notebooks()) if not name.endswith("_scorecard")
]  # findings, not sections


def markdown(name):
    cells = nbformat.read(project.notebooks()[name], 4).cells
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def sections(name):
    return [int(number) for text in markdown(name) for number in re.findall(r"^## (\d+) ", text, re.M)]


@pytest.mark.parametrize("name", WITH_SECTIONS)
def test_sections_are_numbered_one_after_the_other(name):
    assert sections(name) == list(range(1, len(sections(name)) + 1))
    assert sections(name)


@pytest.mark.parametrize("name", WITH_SECTIONS)
def test_a_section_that_the_text_names_is_there(name):
    """Of this chapter; where another work is named in the same sentence, it is that one's."""
    there, missing = sections(name), []
    for text in markdown(name):
        for sentence in re.split(r"(?<=[.!?])\s", text.replace("\n", " ")):
            if not ELSEWHERE.search(sentence):
                numbers = re.findall(r"\b[Ss]ections? (\d+)(?:(?:,| and| to) (\d+))?", sentence)
                missing += [sentence for pair in numbers for n in pair if n and int(n) not in there]
    assert missing == []


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_a_section_of_another_chapter_is_there(name):
    """As in ``[The cluster](15_cluster.ipynb), section 2``."""
    for text in markdown(name):
        for chapter, section in re.findall(r"\((\d\d_\w+)\.ipynb\), section (\d+)", text.replace("\n", " ")):
            assert int(section) <= max(sections(chapter)), f"{chapter}, section {section}"


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_chapters_are_called_by_their_names(name):
    """A link has the chapter's title as its text; no sentence has a number, which may change."""
    chapter = project.chapter_name(name)
    assert markdown(name)[0].startswith(f"# {CHAPTERS[chapter]}\n")
    cells = nbformat.read(project.notebooks()[name], 4).cells
    assert [c.source for c in cells if re.search(r"[Cc]hapters? \d", c.source)] == []
    for text in markdown(name):
        assert order.mended(text, chapter) == text, "python .ci/chapter_order.py"
        for words, other, _ in order.LINK.findall(text):
            assert " ".join(words.split()) == CHAPTERS[other], f"[{words}] leads to {CHAPTERS[other]}"
            assert other != chapter, "a chapter that links itself"


def test_files_and_links_follow_the_list(tmp_path):
    """What a chapter that moves needs: a line of the list, and this command."""
    for file, source in {
        "03_data_parallel": "# 03 Old title\ntext",
        "01_cluster": "[x](03_data_parallel.ipynb#a)",
    }.items():
        nbformat.write(
            nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(source)]), tmp_path / f"{file}.ipynb"
        )
    changed = order.rename(tmp_path)
    assert len(changed) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{notebook_of(chapter)}.ipynb" for chapter in ("data_parallel", "cluster")
    ]
    read = {path.stem: nbformat.read(path, 4).cells[0].source for path in tmp_path.iterdir()}
    assert read[notebook_of("data_parallel")] == f"# {CHAPTERS['data_parallel']}\ntext"
    assert read[notebook_of("cluster")] == f"[x]({notebook_of('data_parallel')}.ipynb#a)"
    assert order.rename(tmp_path) == []


def test_links_of_documents_follow_the_list():
    text = "[x](../outputs/reference/01_cluster.ipynb#a), [y](notebooks/44_data_parallel.ipynb), [z](other/02_x.ipynb)"
    text += ", [w](../../outputs/reference/01_cluster.ipynb)"
    cluster, first = notebook_of("cluster"), notebook_of("data_parallel")
    expected = f"[x](../outputs/reference/{cluster}.ipynb#a), [y](notebooks/{first}.ipynb), [z](other/02_x.ipynb)"
    expected += f", [w](../../outputs/reference/{cluster}.ipynb)"
    assert order.mended_document(text) == expected
    for path in [*project.root().glob("*.md"), *(project.root() / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert order.mended_document(text) == text, f"{path.name}: python .ci/chapter_order.py"
