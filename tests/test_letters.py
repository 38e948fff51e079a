"""Each letter means one thing in the whole book, and a chapter's text uses the letters of its table."""

import re

import letters
import nbformat
import pytest

from pardemo import project

NOTEBOOKS = sorted(project.notebooks())
#: A word of one letter in English, and units: no letters of a formula.
WORDS = {"A", "a", "I"}
#: A letter that stands alone, or before an index or in a product; no unit behind a number, no file's or code's name.
ALONE = re.compile(r"(?<![\w'’/.%`\-])([A-Za-zΨΘφτα])(?=[₀-₉]|[^\w'’`.\-]|\.\s|\.$|$)")
UNIT = re.compile(r"(?:\d|½|¼|⅓|⅔) ?(?:s|h|B|V|F|W|A|K|T|G|x|m)\b|/s\b|\bs/|[kMGT]?B/s|\bB\b(?= a )")


def read(name):
    return nbformat.read(project.notebooks()[name], 4)


def prose(notebook):
    """Markdown without code, links, pictures and HTML."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"```.*?```", " ", cell.source, flags=re.S)
            yield re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]+>", " ", text)


def test_no_meaning_is_given_twice_and_no_letter_has_two():
    meanings = [text.casefold() for text in letters.LETTERS.values()]
    assert len(set(meanings)) == len(meanings)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_chapter_s_table_is_the_book_s(name):
    """``python .ci/letters.py`` writes it."""
    notebook = read(name)
    used = letters.used_by(notebook)
    tables = [cell.source for cell in notebook.cells if "| letter |" in cell.source]
    assert len(tables) == (1 if used else 0)
    for text in tables:
        assert letters.with_table(text, used) == text
    assert not used or "| letter |" in notebook.cells[0].source


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_chapter_uses_the_letters_of_its_table(name):
    """No letter of the book's table is used by a chapter that does not have it in its own."""
    notebook = read(name)
    used, missing = set(letters.used_by(notebook)) | WORDS, set()
    for text in prose(notebook):
        found = set(ALONE.findall(UNIT.sub(" ", text)))
        missing |= (found & set(letters.LETTERS)) - used
    assert missing == set()


def test_a_table_is_written_anew_wherever_its_cell_ends():
    used = {"N": "", "S": "here 8 MiB"}
    for text in (letters.HEAD.rstrip(), "a\n\n" + letters.HEAD + "| x | old |\n\nb"):
        written = letters.with_table(text, used)
        assert letters.table(used) in written
        assert "old" not in written
        assert letters.with_table(written, used) == written
        assert written.endswith("b") == text.endswith("b")
