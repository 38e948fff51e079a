"""Shows problems: five for each chapter, each with a number as its answer, and the way to it folded below.

A problem of a chapter's ``problems.py`` is a function: its docstring asks, with all that is needed to compute the
answer, and it returns the answer and the way there. No answer is typed in: the package's own formulas, its planner or
its code compute it when the page is made, and the way shows the numbers that it went through. On a page of the report
or the site, and in JupyterLab, as with a guess, a question is a field that says how far off a reader's number is.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from pardemo.book.contents import CHAPTERS
from pardemo.book.page.guesses import for_the_page, script_of_an_open_notebook
from pardemo.claims import short
from pardemo.project import one_line


@dataclass(frozen=True)
class Problem:
    """A question with a number as its answer, in ``unit`` ("" for a plain number); ``work`` computes it."""

    question: str
    unit: str
    work: Callable[[], tuple[float, str]]

    def worked(self) -> tuple[float, str]:
        """The answer, and the way there."""
        answer, way = self.work()
        return answer, one_line(way)

    def sentence(self, answer: float) -> str:
        """The answer in words."""
        return f"It is {short(answer)} {self.unit}".rstrip() + "."


def problem(unit: str = "") -> Callable[[Callable[[], tuple[float, str]]], Problem]:
    """Makes a :class:`Problem` of a function, whose docstring is the question; ``unit``: of the answer, as ``GB``."""
    return lambda work: Problem(one_line(work.__doc__), unit, work)


class ProblemSet:
    """A chapter's problems, as a notebook and a page show them."""

    def __init__(self, problems: Sequence[Problem]):
        self._worked = [(problem, *problem.worked()) for problem in problems]

    def __repr__(self) -> str:
        lines = []
        for number, (problem, answer, way) in enumerate(self._worked, 1):
            lines += [f"{number}. {problem.question}", f"   {problem.sentence(answer)} {way}"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        shown = (_shown(number, *worked) for number, worked in enumerate(self._worked, 1))
        return f'<div class="problems">{"".join(shown)}</div>{script_of_an_open_notebook()}'


def problems_of(chapter: str) -> tuple[Problem, ...]:
    """The problems of a chapter, as they stand in its ``problems.py``.

    Raises:
        ValueError: no chapter of that name.
    """
    if chapter not in CHAPTERS:
        raise ValueError(f"no chapter {chapter!r}; there are: {', '.join(CHAPTERS)}")
    module = import_module(f"pardemo.book.chapters.{chapter}.problems")
    return tuple(value for value in vars(module).values() if isinstance(value, Problem))


def problems(chapter: str) -> ProblemSet:
    """Shows a chapter's problems, below its exercises."""
    return ProblemSet(problems_of(chapter))


def _shown(number: int, problem: Problem, answer: float, way: str) -> str:
    """The question, and below it the answer with the way there; both marked as a guess is, for the page's script."""
    asked = f"{number}. {problem.question}"
    unit = f"In {problem.unit}." if problem.unit not in ("", "times") else ""
    return (
        f'<div class="guess" data-question="{html.escape(asked)}"><strong>{number}.</strong> '
        f'{html.escape(problem.question)} <em class="hint">{html.escape(unit)}</em></div>'
        f'<details class="guess" {for_the_page(asked, answer, problem.unit)}>'
        f"<summary>The way there</summary><p>{html.escape(problem.sentence(answer))}</p>"
        f"<p>{html.escape(way)}</p></details>"
    )
