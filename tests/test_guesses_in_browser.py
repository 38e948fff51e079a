"""On a page without a kernel a question is a field: a number in, how far off it is out, and the answer unfolds."""

import nbformat
import pytest
from conftest import says
from nbformat import v4

from pardemo.book.page.guesses import guess
from pardemo.book.page.problems import Problem, ProblemSet
from pardemo.book.run.report import pages

QUESTION = "4 ranks, rank 0 is the server. How many times S does it send?"
TYPICAL = {4: "It keeps <b>its</b> own.", 1: "The sum goes to each worker."}


def work():
    return 25.0, "It takes 25 µs."


@pytest.fixture
def page(chromium, tmp_path):
    asked = guess(QUESTION, ...)
    choice = guess("Which sends most?", ..., choices=("server", "worker"))
    shown = [asked, asked.reveal(3.0, TYPICAL, "S"), guess("Yours?", 2.0), choice]
    shown += [choice.reveal("server", {"worker": "It sends its own."}), ProblemSet([Problem("How long?", "µs", work)])]
    outputs = ({"text/html": one._repr_html_(), "text/plain": repr(one)} for one in shown)
    cells = [v4.new_code_cell("x", outputs=[v4.new_output("execute_result", data=data)]) for data in outputs]
    nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell("# 01 Data parallel"), *cells]), tmp_path / "01_a.ipynb")
    chapter = {"name": "01_a", "number": "01", "title": "Data parallel", "page": "01_a.html"}
    context = chromium.new_context()
    opened = context.new_page()
    opened.errors = []
    opened.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.goto(pages.write_page(tmp_path, "01_a", [chapter], tmp_path).as_uri())
    yield opened
    assert opened.errors == []
    context.close()


def answered(page, number):
    page.locator(".guess form input").first.fill(number)
    page.locator(".guess form button").first.click()
    return page.locator(".guess form output").first.inner_text()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("4", "off by a factor of 1.33: the answer"),
        ("1,5", "off by a factor of 2: the answer"),
        ("3.1", "right: the answer"),
        ("0", "off by 3 S: the answer"),
        ("-3", "off by 6 S: the answer"),
    ],
)
def test_a_number_is_judged_and_unfolds_the_answer(page, number, said):
    assert not page.locator("details.guess").first.evaluate("answer => answer.open")
    assert answered(page, number) == said
    assert page.locator("details.guess").first.evaluate("answer => answer.open")
    assert "It is 3 S." in page.locator("details.guess").first.inner_text()


def test_a_typical_mistake_gets_its_sentence_as_text(page):
    answered(page, "4")
    assert says(page.locator("details.guess p").first.inner_text(), "4", "1.33", "It", "<b>its</b>")
    assert page.locator("details.guess b").count() == 0


def test_what_is_no_number_opens_nothing(page):
    for text in ("", "a lot", "1e999"):
        assert answered(page, text) == "Write a number, such as 2 or 0.5."
    assert not page.locator("details.guess").first.evaluate("answer => answer.open")


def test_the_page_remembers_the_number_and_asks_nobody(page):
    asked = []
    answered(page, "4")
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    assert page.locator(".guess form output").first.inner_text() == "off by a factor of 1.33: the answer"
    assert asked == [page.url]


def test_a_guess_made_in_the_notebook_stays_as_it_is(page):
    assert page.locator("form").count() == 3
    assert "Your guess: 2." in page.inner_text("main")


def test_the_unit_stands_beside_the_field(page):
    assert [text.split() for text in page.locator(".guess form label").all_inner_texts()] == [
        ["Your", "number", unit] for unit in ("S", "µs")
    ]


def test_a_choice_is_a_button(page):
    form = page.locator("form", has=page.get_by_role("button", name="worker"))
    form.get_by_role("button", name="worker").click()
    assert form.locator("output").inner_text() == "no: the answer"
    assert "It sends its own." in page.locator("details.guess").nth(1).inner_text()
    form.get_by_role("button", name="server").click()
    assert form.locator("output").inner_text() == "right: the answer"
