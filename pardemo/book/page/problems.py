"""Problems: five for each chapter, each with a number as its answer, and the way to it folded below.

A chapter's ``problems.py`` has them as PROBLEMS. No answer is typed in: the package's own formulas, its planner or
its code compute it when the page is made, and the way shows the numbers that it went through. On a page of the report
or the site, as with a guess, a question is a field that says how far off a reader's number is.
"""

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from pardemo.book.chapters import CHAPTERS
from pardemo.book.page.guesses import NEAR
from pardemo.claims import short


class Worked(NamedTuple):
    """A problem's answer in its unit, and the way there in a few sentences or lines."""

    answer: float
    way: str


@dataclass(frozen=True)
class Problem:
    """A question with a number as its answer.

    Args:
        question: all that is needed to compute it, in one to three sentences. unit: of the answer, as ``GB``; "" for a
            plain number. work: computes it.
    """

    question: str
    unit: str
    work: Callable[[], Worked]

    def told(self, worked: Worked) -> str:
        """The answer in words."""
        return f"It is {short(worked.answer)} {self.unit}".rstrip() + "."


class ProblemSet:
    """A chapter's problems, as a notebook and a page show them."""

    def __init__(self, problems: Sequence[Problem]):
        self._worked = [(problem, problem.work()) for problem in problems]

    def __repr__(self) -> str:
        lines = []
        for number, (problem, worked) in enumerate(self._worked, 1):
            lines += [f"{number}. {problem.question}", f"   {problem.told(worked)} {worked.way}"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        shown = (_shown(number, *one) for number, one in enumerate(self._worked, 1))
        return f'<div class="problems">{"".join(shown)}</div>'


def problems_of(chapter: str) -> tuple[Problem, ...]:
    """The problems of a chapter.

    Raises:
        ValueError: no chapter of that name.
    """
    if chapter not in CHAPTERS:
        raise ValueError(f"no chapter {chapter!r}; there are: {', '.join(CHAPTERS)}")
    return import_module(f"pardemo.book.chapters.{chapter}.problems").PROBLEMS


def problems(chapter: str) -> ProblemSet:
    """What a chapter's page shows below its exercises."""
    return ProblemSet(problems_of(chapter))


def _shown(number: int, problem: Problem, worked: Worked) -> str:
    """The question, and below it the answer with the way there; both marked as a guess is, for the page's script."""
    asked = html.escape(f"{number}. {problem.question}")
    says = f"In {problem.unit}." if problem.unit not in ("", "times") else ""
    for_the_page = {"value": float(worked.answer), "unit": problem.unit, "typical": [], "near": NEAR}
    way = "".join(f"<p>{html.escape(line)}</p>" for line in worked.way.splitlines())
    return (
        f'<div class="guess" data-question="{asked}"><strong>{number}.</strong> {html.escape(problem.question)} '
        f"<em>{html.escape(says)}</em>"
        f'</div><details class="guess" data-question="{asked}" data-answer="{html.escape(json.dumps(for_the_page))}">'
        f"<summary>The way there</summary><p>{html.escape(problem.told(worked))}</p>{way}</details>"
    )
