"""The problem sets: five for each chapter, answers that the package computes, shown so that one can try first."""

import json
import math
import re
from types import SimpleNamespace

import pytest
from bs4 import BeautifulSoup
from conftest import says

from pardemo.book.contents import CHAPTERS
from pardemo.book.page.guesses import guess
from pardemo.book.page.problems import ProblemSet, problems, problems_of
from pardemo.claims import short

ALL = [(chapter, number, problem) for chapter in CHAPTERS for number, problem in enumerate(problems_of(chapter), 1)]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_five(chapter):
    assert len(problems_of(chapter)) == 5


@pytest.mark.parametrize(("chapter", "number", "problem"), ALL, ids=[f"{c}-{n}" for c, n, _ in ALL])
def test_a_problem_asks_for_a_number_and_the_package_computes_it(chapter, number, problem):
    answer, way = problem.worked()
    assert math.isfinite(answer)
    assert problem.question.endswith("?"), problem.question
    assert len(problem.question) < 420
    assert len(way) < 700
    assert f"{short(answer)} {problem.unit}" not in problem.question, "the question tells its answer"
    assert any(math.isclose(float(number), answer, rel_tol=0.01, abs_tol=0.006) for number in _numbers(way)), (
        f"the way does not arrive at {short(answer)}: {way}"
    )
    own = f"pardemo.book.chapters.{chapter}.problems"
    assert _uses_the_package(problem.work, own), "it is computed by hand: ask the package's formulas, planner or code"


def _uses_the_package(function, own, depth=0):
    """Whether a function, or one that it calls in its module, asks another module of the package."""
    for name in _names(function.__code__):
        used = function.__globals__.get(name)
        home = getattr(used, "__module__", None) or getattr(used, "__name__", "")
        if name.startswith("pardemo.") or (
            home.startswith("pardemo") and home not in (own, "pardemo.book.page.problems")
        ):
            return True
        if home == own and callable(used) and depth < 3 and _uses_the_package(used, own, depth + 1):
            return True
    return False


def _names(code):
    """Names that a function's code asks for, or imports, in its comprehensions too."""
    inside = (name for const in code.co_consts if hasattr(const, "co_names") for name in _names(const))
    return [*code.co_names, *inside]


def _numbers(text):
    return re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", text.replace(",", "").replace("−", "-"))


def test_no_question_stands_twice():
    questions = [problem.question for _, _, problem in ALL]
    assert len(set(questions)) == len(questions)


def test_a_page_shows_a_question_with_a_field_and_folds_the_way():
    shown = BeautifulSoup(problems("data_parallel")._repr_html_(), "html.parser")
    asked, folded = shown.find_all("div", class_="guess"), shown.find_all("details", class_="guess")
    assert len(asked) == len(folded) == 5
    for question, way in zip(asked, folded, strict=True):
        assert question["data-question"] == way["data-question"], "the page's script finds one by the other"
        assert math.isfinite(json.loads(way["data-answer"])["value"])
        assert question.find("em") is not None, "the field takes its place"
        assert way.find("p").text.startswith("It is "), "and only below the fold"
    assert "It is" not in " ".join(question.text for question in asked)


def test_where_a_reader_has_the_notebook_open_the_script_comes_along(monkeypatch):
    shown = problems("data_parallel")
    assert "<script>" not in shown._repr_html_(), "a page brings it itself"
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.delenv("PARDEMO_HEADLESS", raising=False)
    assert shown._repr_html_().count("<script>") == 1
    assert "<script>" in guess("How many?", ...).reveal(2.0)._repr_html_()
    assert "<script>" not in guess("How many?", 3).reveal(2.0)._repr_html_(), "it is answered"
    monkeypatch.setenv("PARDEMO_HEADLESS", "1")
    assert "<script>" not in shown._repr_html_()


def test_a_terminal_shows_all_of_it():
    text = repr(ProblemSet(problems_of("data_parallel")[:1]))
    assert says(text, "1", "7", "parameters")
    assert "It is 24.5 GB." in text


def test_a_chapter_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"'data'.*your_machine.*data_parallel"):
        problems_of("data")
