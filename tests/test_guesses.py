"""Guesses: nothing stops without one, the answer is folded then, and typical mistakes get their sentence."""

import ast
import re

import nbformat
import pytest
from conftest import says

from pardemo import project
from pardemo.book.page.guesses import guess

WRONG = {8: "it keeps its own share", 1: "every rank wants one"}


def test_left_empty_the_answer_is_folded_and_tells_the_typical_mistakes():
    asked = guess("How many shares?", ...)
    assert says(repr(asked), "write", "number")
    answer = asked.reveal(7, WRONG, "shares")
    assert says(answer._repr_html_(), 'class="guess"', 'data-question="How')
    assert answer.message == (
        "It is 7 shares. If you thought of 8 shares: it keeps its own share "
        "If you thought of 1 shares: every rank wants one"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "It is 7. You guessed 7: right."),
        (7.2, "It is 7. You guessed 7.2: right."),
        (8, "It is 7. You guessed 8: it keeps its own share"),
        (100, "It is 7. You guessed 100."),
        (0, "It is 7. You guessed 0."),
    ],
)
def test_a_guess_is_answered(value, message):
    answer = guess("How many shares?", value).reveal(7, WRONG)
    assert answer.message == message
    assert "details" not in answer._repr_html_(), "who has guessed sees the answer at once"


@pytest.mark.parametrize("value", ["seven", [7], True, float("nan"), float("inf")])
def test_what_is_no_number_is_said_and_stops_nothing(value):
    asked = guess("How many shares?", value)
    assert says(repr(asked), "number", "2", "0.5")
    assert asked.reveal(7).message == "It is 7."


def test_a_measured_number_stands_behind_the_exact_one():
    assert guess("How many?", ..., unit="times").reveal(6.001, exact=6).message == "It is 6 times (measured 6.001)."


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (..., "It is bias. If you thought of plain: it has nothing that balances"),
        ("bias", "It is bias. You guessed bias: right."),
        ("plain", "It is bias. You guessed plain: it has nothing that balances"),
        ("z-loss", "It is bias. You guessed z-loss."),
        (2, "It is bias. If you thought of plain: it has nothing that balances"),
    ],
)
def test_a_choice_is_asked_as_one(value, message):
    asked = guess("Which balances best?", value, choices=("plain", "z-loss", "bias"))
    assert asked.reveal("bias", {"plain": "it has nothing that balances"}).message == message
    with pytest.raises(ValueError, match="none of the choices"):
        asked.reveal("another")


def test_a_question_is_text_and_no_markup():
    assert "<b>" not in guess("Is a<b>c?")._repr_html_()
    assert "<b>" not in guess("Is a<b>c?").reveal(1)._repr_html_()


def test_a_question_keeps_its_first_answer_and_says_what_a_later_cell_was_given():
    question = guess("How many S?", 3)
    assert question.reveal(3.0, unit="S").message == "It is 3 S. You guessed 3 S: right."
    assert question.reveal(3.0, unit="S").message == "It is 3 S. You guessed 3 S: right."
    assert question.reveal(1.501, unit="S").message == (
        "It is 3 S. You guessed 3 S: right. Now this cell was given 1.501 S: to measure anew, "
        "run the cells again from the question on."
    )
    assert guess("How many S?", 3).reveal(1.501, unit="S").message == "It is 1.501 S. You guessed 3 S."


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_each_question_of_a_chapter_is_answered_after_it_where_a_reader_sees_it(name):
    cells = [cell for cell in nbformat.read(project.notebooks()[name], 4).cells if cell.cell_type == "code"]
    asked, answered = {}, {}
    for number, cell in enumerate(cells):
        asked |= dict.fromkeys(re.findall(r"^(\w+) = page\.guess\(", cell.source, re.M), number)
        answered |= {variable: (number, shown) for variable, shown in answers(cell.source)}
    assert set(asked) == set(answered)
    for variable, (number, shown) in answered.items():
        assert asked[variable] < number, variable
        assert shown, f"{variable}.reveal(...) is neither its cell's last expression nor in display(...)"


def answers(source):
    """Each ``x.reveal(...)`` of a cell: x, and whether its value is shown."""
    if ".reveal(" not in source:
        return
    body = ast.parse(source).body
    for statement in body:
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "reveal":
                displayed = isinstance(statement, ast.Expr) and (
                    ast.unparse(statement).startswith("display(") or (statement is body[-1] and statement.value is call)
                )
                yield ast.unparse(call.func.value), displayed


def test_an_answer_that_is_not_shown_is_seen():
    assert list(answers("a.reveal(1.0)\nprint(2)")) == [("a", False)]
    assert list(answers("display(a.reveal(1.0))\nb.reveal(2.0)")) == [("a", True), ("b", True)]
    assert list(answers("b = a.reveal(2.0)")) == [("a", False)]
