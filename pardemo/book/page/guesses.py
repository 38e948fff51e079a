"""Asks for a guess, a number or a choice, and shows it later beside the measured answer.

>>> server = guess("How many times its own share does the server send, with N = 8?", ..., unit="shares")
>>> server.reveal(7.0, {8: "It keeps its own share: only seven are sent."})        # doctest: +SKIP

The reader writes a number in place of the ``...``, or ``value=`` and one of the ``choices``. Left empty, in a batch
run, the question stands there and the answer is folded away: a reader can think first. On a page of the report or the
site, a script of the page's own (``report/guess.js.j2``) makes a field or buttons of the question, says how far off the
reader's answer is, and unfolds the right one; so it does where a reader has the notebook open. Nothing stops because of
a guess.
"""

import html
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pardemo import project
from pardemo.claims import short

NEAR = 0.05  # a guess this close is taken for right, and a typical wrong answer for meant


class Guess:
    """A question, and the reader's answer if there is one; shown as the question."""

    def __init__(
        self, question: str, value: float | str | None, note: str = "", unit: str = "", choices: Sequence[str] = ()
    ):
        self.question, self.value, self.note, self.unit, self.choices = question, value, note, unit, tuple(choices)
        self._revealed: float | str | None = None

    def reveal(
        self,
        measured: float | str,
        typical: Mapping[Any, str] | None = None,
        unit: str = "",
        exact: float | None = None,
    ) -> "Answer":
        """The answer beside the guess; the first one revealed stays the answer to this question.

        A cell that is run again later may be given a number that other cells have changed since: the answer then says
        both. A question that is asked again has no answer yet.

        Args:
            measured: what the code beside it measured; one of the choices where the question has some.
            typical: for typical wrong answers one sentence each, that says what was overlooked.
            unit: of the number, if the question does not have it.
            exact: the number by reasoning, where the measured one is a little off; then both are shown.
        """
        if self.choices and measured not in self.choices:
            raise ValueError(f"{measured!r} is none of the choices: {', '.join(self.choices)}")
        if self._revealed is None:
            self._revealed = measured
        return Answer(self, self._revealed, dict(typical or {}), self.unit or unit, measured, exact)

    def __repr__(self) -> str:
        return f"Guess: {self.question} {self.note or self._hint()}"

    def _hint(self) -> str:
        if self.value is not None:
            return f"Your guess: {_text(self.value, self.unit)}."
        if self.choices:
            return f"Open this folded cell, add value= and one of {', '.join(map(repr, self.choices))}, and run it."
        unit = f" ({self.unit})" if self.unit else ""
        return f"Open this folded cell, write your number{unit} in place of its ..., and run it."

    def _repr_html_(self) -> str:
        field = f' data-question="{html.escape(self.question)}"' if self.value is None else ""
        return (
            f'<div class="guess"{field}><strong>Guess.</strong> {html.escape(self.question)} '
            f'<em class="hint">{html.escape(self.note or self._hint())}</em></div>'
        )


class Answer:
    """The measured answer of a guess, and what the guess overlooked."""

    def __init__(
        self,
        guess: Guess,
        measured: float | str,
        typical: Mapping[Any, str],
        unit: str,
        given_now: float | str,
        exact: float | None = None,
    ):
        self._guess, self._typical, self._unit = guess, typical, unit
        self._measured, self._given_now, self._exact = measured, given_now, exact

    @property
    def message(self) -> str:
        """One or two sentences, and another where the number given now is not the one revealed first."""
        if _near(self._given_now, self._measured):
            return self._answer()
        now = _text(self._given_now, self._unit)
        again = f"Now this cell was given {now}: to measure anew, run the cells again from the question on."
        return f"{self._answer()} {again}"

    def _answer(self) -> str:
        shown = _text(self._measured, self._unit)
        if self._exact is not None:
            shown = f"{_text(self._exact, self._unit)} (measured {_text(self._measured)})"
        answer, value = f"It is {shown}.", self._guess.value
        if value is None:
            wrong = (f"If you thought of {_text(v, self._unit)}: {why}" for v, why in self._typical.items())
            return " ".join([answer, *wrong])
        if _near(value, self._measured):
            return f"{answer} You guessed {_text(value, self._unit)}: right."
        why = next((why for wrong, why in self._typical.items() if _near(value, wrong)), None)
        return f"{answer} You guessed {_text(value, self._unit)}{': ' + why if why else '.'}"

    def __repr__(self) -> str:
        return self.message

    def _repr_html_(self) -> str:
        text = html.escape(self.message)
        if self._guess.value is not None:
            return f'<div class="guess">{text}</div>'
        question = html.escape(self._guess.question)
        folded = f'<details class="guess" {self._for_the_page()}><summary>{question}</summary>{text}</details>'
        return folded + script_of_an_open_notebook()

    def _for_the_page(self) -> str:
        """What a page's script needs to judge a reader's answer: the question, the answer, typical mistakes."""
        return for_the_page(
            self._guess.question, self._measured, self._unit, list(self._typical.items()), self._guess.choices
        )


def script_of_an_open_notebook() -> str:
    """The page's script behind an answer, if a reader has the notebook open: JupyterLab runs what its own kernel shows.

    Empty in a run without a reader, whose pages bring the script themselves.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel") or project.is_headless() or project.papermills_folder():
        return ""
    script = project.PACKAGE / "book" / "run" / "report" / "guess.js.j2"
    return f"<script>{script.read_text(encoding='utf-8')}</script>"


def for_the_page(
    question: str, value: float | str, unit: str, typical: Sequence[tuple[Any, str]] = (), choices: Sequence[str] = ()
) -> str:
    """Attributes of an answer's element, by which the page's script finds its question and judges a reader's answer."""
    answer = {"value": value, "unit": unit, "typical": [list(pair) for pair in typical], "near": NEAR}
    if choices:
        answer["choices"] = list(choices)
    else:
        answer["value"] = float(value)
    return f'data-question="{html.escape(question)}" data-answer="{html.escape(json.dumps(answer))}"'


def guess(question: str, value: Any = ..., unit: str = "", choices: Sequence[str] = ()) -> Guess:
    """Asks ``question``; ``value`` is the reader's number or choice, or ``...`` as long as there is none.

    What is neither is said in one line where the question is shown, and taken for no guess.
    """
    if value is ... or value is None:
        return Guess(question, None, "", unit, choices)
    if choices:
        if value in choices:
            return Guess(question, value, "", unit, choices)
        return Guess(question, None, f"{value!r} is none of {', '.join(map(repr, choices))}.", unit, choices)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        note = f"{value!r} is no number: write one, such as 2 or 0.5."
        return Guess(question, None, note, unit)
    return Guess(question, float(value), "", unit)


def _text(value: float | str, unit: str = "") -> str:
    return value if isinstance(value, str) else f"{short(value)} {unit}".rstrip()


def _near(first: float | str, second: float | str) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return math.isclose(first, second, rel_tol=NEAR, abs_tol=1e-12)
