"""Sections of a chapter are numbered from 1 on, and what the text refers to is there."""

import re

import nbformat
import pytest

from pardemo import project

ELSEWHERE = re.compile(r"chapters? \d\d|article|paper|arXiv|\d{4}\.\d{5}|documentation|its section")
CHAPTERS = [name for name in sorted(project.notebooks()) if name != "15_scorecard"]  # findings, not sections


def markdown(name):
    cells = nbformat.read(project.notebooks()[name], 4).cells
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def sections(name):
    return [int(number) for text in markdown(name) for number in re.findall(r"^## (\d+) ", text, re.M)]


@pytest.mark.parametrize("name", CHAPTERS)
def test_sections_are_numbered_one_after_the_other(name):
    assert sections(name) == list(range(1, len(sections(name)) + 1))
    assert sections(name)


@pytest.mark.parametrize("name", CHAPTERS)
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
    by_number = {}
    for other in CHAPTERS:
        by_number.setdefault(other[:2], []).append(max(sections(other)))
    for text in markdown(name):
        for chapter, section in re.findall(r"chapter (\d\d), section (\d+)", text.replace("\n", " ")):
            assert int(section) <= max(by_number[chapter]), f"chapter {chapter}, section {section}"
