"""Guess before you look: a question with a number as its answer, and later the answer beside the guess.

>>> server = guess("How many times its own share does the server send, with N = 8?", ...)  # your number for the dots
>>> server.reveal(7.0, {8: "It keeps its own share: only seven are sent."})        # doctest: +SKIP

Left empty, in a batch run, the question stands there and the answer is folded away: a reader can think first. On a page
of the report or the site, a script of the page's own (``report/guess.js.j2``) makes a field of the question, says how
far off the reader's number is, and unfolds the answer. Nothing stops because of a guess.
"""

import html
import json
import math
from collections.abc import Mapping
from typing import Any

from pardemo.claims import short

NEAR = 0.05  # a guess this close is taken for right, and a typical wrong answer for meant


class Guess:
    """A question, and the reader's number if there is one; shown as the question."""

    def __init__(self, question: str, value: float | None, note: str = ""):
        self.question, self.value, self.note = question, value, note
        self._revealed: float | None = None

    def reveal(self, measured: float, typical: Mapping[float, str] | None = None, unit: str = "") -> "Answer":
        """The answer beside the guess; the first number revealed stays the answer to this question.

        A cell that is run again later may be given a number that other cells have changed since: the answer then says
        both. A question that is asked again has no answer yet.

        Args:
            measured: what the code beside it measured.
            typical: for typical wrong numbers one sentence each, that says what was overlooked.
        """
        if self._revealed is None:
            self._revealed = measured
        return Answer(self, self._revealed, dict(typical or {}), unit, given_now=measured)

    def __repr__(self) -> str:
        return f"Guess: {self.question} {self.note or self._own()}"

    def _own(self) -> str:
        return "Write your number in place of the dots." if self.value is None else f"Your guess: {short(self.value)}."

    def _repr_html_(self) -> str:
        field = f' data-question="{html.escape(self.question)}"' if self.value is None else ""
        return (
            f'<div class="guess"{field}><strong>Guess.</strong> {html.escape(self.question)} '
            f"<em>{html.escape(self.note or self._own())}</em></div>"
        )


class Answer:
    """What came out, and what a guess overlooked."""

    def __init__(self, guess: Guess, measured: float, typical: Mapping[float, str], unit: str, given_now: float):
        self._guess, self._measured, self._typical, self._unit = guess, measured, typical, unit
        self._given_now = given_now

    @property
    def told(self) -> str:
        """One or two sentences, and another where the number given now is not the one revealed first."""
        again = "" if _near(self._given_now, self._measured) else f" {self._changed()}"
        return self._first() + again

    def _changed(self) -> str:
        now = self._number(self._given_now)
        return f"Now this cell was given {now}: to measure anew, run the cells again from the question on."

    def _first(self) -> str:
        answer = f"It is {self._number(self._measured)}."
        value = self._guess.value
        if value is None:
            return " ".join([answer, *(f"Not {self._number(v)}: {why}" for v, why in self._typical.items())])
        if _near(value, self._measured):
            return f"{answer} You guessed {self._number(value)}: right."
        why = next((why for wrong, why in self._typical.items() if _near(value, wrong)), None)
        return f"{answer} You guessed {self._number(value)}{': ' + why if why else '.'}"

    def __repr__(self) -> str:
        return self.told

    def _number(self, value: float) -> str:
        return f"{short(value)} {self._unit}".rstrip()

    def _repr_html_(self) -> str:
        text = html.escape(self.told)
        if self._guess.value is not None:
            return f'<div class="guess">{text}</div>'
        question = html.escape(self._guess.question)
        return f'<details class="guess" {self._for_the_page()}><summary>{question}</summary>{text}</details>'

    def _for_the_page(self) -> str:
        """What a page's script needs to judge a reader's number: the question, the answer, typical mistakes."""
        typical = [[float(value), why] for value, why in self._typical.items()]
        answer = {"value": float(self._measured), "unit": self._unit, "typical": typical, "near": NEAR}
        return f'data-question="{html.escape(self._guess.question)}" data-answer="{html.escape(json.dumps(answer))}"'


def guess(question: str, value: Any = ...) -> Guess:
    """Asks ``question``; ``value`` is the reader's number, or ``...`` as long as there is none.

    What is no number is said in one line where the question is shown, and taken for no guess.
    """
    if value is ... or value is None:
        return Guess(question, None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return Guess(question, None, f"{value!r} is no number: write one, such as 2 or 0.5, in place of the dots.")
    return Guess(question, float(value))


def _near(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=NEAR, abs_tol=1e-12)
