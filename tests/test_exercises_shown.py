"""What readers see of an exercise: a line that fits, a hint that leads, a solution that can be read. No ranks here."""

import ast
import inspect
import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from nbformat.v4 import new_code_cell, new_notebook, new_output

from pardemo import project
from pardemo.collection.exercises import EXERCISES, check, judge, solutions
from pardemo.collection.exercises.outcome import is_stub
from pardemo.collection.report import pages

QUIET = "Not attempted yet: write my_order above, then run this cell again."


def stub(): ...


def shown(outcome):
    """Text and HTML as a notebook has them."""
    return DisplayFormatter().format(outcome)[0]


def folded(markup):
    return re.findall(r"<details><summary[^>]*>(.*?)</summary>", markup)


def asked(notebook):
    """The exercises of a notebook, as its cells hand them over."""
    found = {}
    for cell in nbformat.read(project.notebooks()[notebook], as_version=4).cells:
        if cell.cell_type == "code" and "exercises.check(" in cell.source:
            exec(cell.source, {"exercises": SimpleNamespace(check=found.__setitem__)})
    return found


def test_each_exercise_is_asked_in_one_notebook_of_its_chapter():
    for number, notebooks in project.chapters().items():
        asked_for = [name for notebook in notebooks for name in asked(notebook)]
        assert sorted(asked_for) == sorted(name for name in EXERCISES if name.startswith(number))


@pytest.mark.parametrize("notebook", project.notebooks())
def test_every_notebook_asks_two_or_three_with_a_stub_that_may_stay_open(notebook):
    found = asked(notebook)
    assert 2 <= len(found) <= 3
    for name, function in found.items():
        assert judge(name, function).told == QUIET.replace("my_order", EXERCISES[name].stub)
        module = sys.modules[f"{solutions.__name__}.chapter_{name[:2]}"]
        solution = getattr(module, function.__name__)
        assert inspect.signature(solution) == inspect.signature(function), "to be pasted in the stub's place"


def test_a_stub_gets_one_quiet_line_and_help_below_it(capsys):
    check("05_order", stub)
    assert capsys.readouterr().out == f"{QUIET}\n"
    outcome = judge("05_order", stub)
    assert not outcome.solved
    data = shown(outcome)
    assert data["text/plain"] == QUIET
    assert QUIET in data["text/html"]
    assert folded(data["text/html"]) == ["Hint", "Solution"]
    assert "<details open" not in data["text/html"]
    assert not re.search("not yet|False|None", data["text/html"].split("<details>")[0])


def test_a_cell_shows_it_once_and_leaves_no_value():
    assert check("05_order", stub) is None


def test_plain_python_prints_one_line():
    code = "from pardemo.collection import exercises\ndef my_order(): ...\nexercises.check('05_order', my_order)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"{QUIET}\n"


def test_a_wrong_answer_has_help_below_its_message_and_a_right_one_a_way_to_write_it():
    wrong, right = (shown(judge("05_order", lambda order=order: order)) for order in ("pp-dp-tp", "tp-dp-pp"))
    assert "let tp run fastest" in wrong["text/html"]
    assert folded(wrong["text/html"]) == ["Hint", "Solution"]
    assert "05_order: solved." in right["text/html"]
    assert folded(right["text/html"]) == ["One way to write it"]
    for data in (wrong, right):
        assert "<pre><code>def my_order():" in data["text/html"]
        assert "my_order" not in data["text/plain"]


def test_code_and_answers_are_text_and_no_markup():
    markup = judge("05_order", lambda: "<b>tp</b>")._repr_html_()
    assert "<b>" not in markup
    assert "&lt;b&gt;" in markup
    assert "(local &gt;= 0) &amp; (local &lt; words)" in judge("04_vocabulary_loss", ...)._repr_html_()


@pytest.mark.parametrize(
    "function",
    [None, ..., stub, lambda *a: ..., lambda: None, *(asked("03_megatron_mlp").values())],
)
def test_what_nobody_has_touched_is_a_stub(function):
    assert is_stub(function)


def with_words():
    """Only a docstring."""
    # and a comment


def with_pass():
    pass


def with_return(x, *, y=1):
    "And this."
    return


def forgets(x):
    x + 1


def gives_back(x):
    return x


def waits():
    yield


def counts():
    return 0


def raises():
    raise NotImplementedError


def test_what_computes_something_is_an_attempt_also_without_a_result():
    assert all(map(is_stub, (with_words, with_pass, with_return)))
    attempts = (forgets, gives_back, waits, counts, raises, len, print, lambda: "tp-dp-pp", lambda: False, dict, 5)
    assert [one for one in attempts if is_stub(one)] == []


def test_a_stub_starts_no_rank(monkeypatch):
    def never(*_, **__):
        raise AssertionError("ranks for nothing")

    monkeypatch.setattr("pardemo.world.World._start", never)
    assert not judge("01_all_reduce", stub).attempted


def test_the_page_keeps_what_is_folded():
    outcome = judge("05_order", stub)
    cell = new_code_cell("", outputs=[new_output("display_data", data=shown(outcome))])
    page = pages._exporter().from_notebook_node(new_notebook(cells=[cell]))[0]
    assert outcome._repr_html_() in page
    assert page.count(QUIET) == 1, "either the text or the HTML"


def test_unknown_exercise():
    with pytest.raises(ValueError, match="no exercise '99_x'; there are: 00_bus_bandwidth"):
        check("99_x", stub)


@pytest.mark.parametrize("name", EXERCISES)
def test_a_hint_leads_and_leaves_the_code_to_the_reader(name):
    hint = EXERCISES[name].hint
    assert 1 <= len(re.findall(r"[.?!](?=\s|$)", hint)) <= 2, "one or two sentences"
    assert hint[-1] in ".?"
    assert 40 < len(hint) < 300
    for part in code_of(name):
        assert part not in hint.replace(" ", ""), part


def code_of(name):
    """What a solution says and a hint may not: its assignments, calls and sums, and a constant that it returns."""
    parts = set()
    for node in ast.walk(ast.parse(solutions.text(name))):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
            parts.add(str(node.value.value))
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.BinOp, ast.Call, ast.Compare, ast.Subscript)):
            parts.add(ast.unparse(node).replace(" ", ""))
    return {part for part in parts if len(part) > 3}


@pytest.mark.parametrize("name", EXERCISES)
def test_a_solution_is_short_and_says_why(name):
    text = solutions.text(name)
    lines = text.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert "pardemo.collection" not in text, "nothing of the checkers"
    assert '"""' not in text
    own = ast.parse(text).body[-1]
    assert own.name == EXERCISES[name].stub
    assert "# " in text, "a word about why"


def test_every_solution_belongs_to_an_exercise():
    for chapter in {name[:2] for name in EXERCISES}:
        body = ast.parse((project.PACKAGE / f"collection/exercises/solutions/chapter_{chapter}.py").read_text()).body
        written = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        assert written == {exercise.stub for name, exercise in EXERCISES.items() if name[:2] == chapter}


def test_only_what_is_needed_is_imported():
    assert solutions.text("01_unequal_shards").startswith("import torch\nimport torch.distributed as dist\n\n\ndef")
    assert solutions.text("05_groups").startswith("def my_groups(")
    assert "class SumBackward" not in solutions.text("03_split")
    assert solutions.text("06_stage").startswith("def my_bytes("), "a helper comes with it"
