"""What readers see of an exercise: a line that fits, a hint that leads, a solution that can be read. No ranks here."""

import ast
import builtins
import functools
import inspect
import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest
from conftest import exercises_of_the_book, says
from IPython.core.formatters import DisplayFormatter
from IPython.core.inputtransformer2 import TransformerManager
from nbformat.v4 import new_code_cell, new_notebook, new_output

from pardemo import project
from pardemo.book.page.exercise_shown import is_stub, solution_of
from pardemo.book.page.exercises import check, judge
from pardemo.book.run.report import pages

EXERCISES = exercises_of_the_book()
QUIET = "Not attempted yet: write my_order above, then run this cell again."


def stub(): ...


def solution(name):
    return solution_of(name.partition(".")[0], EXERCISES[name].stub)


def shown(outcome):
    """Text and HTML as a notebook has them."""
    return DisplayFormatter().format(outcome)[0]


def folded(markup):
    return re.findall(r"<details><summary[^>]*>(.*?)</summary>", markup)


@functools.cache
def cells_of(notebook):
    return nbformat.read(project.notebooks()[notebook], as_version=4).cells


def asked(notebook):
    """The exercises of a notebook, as its cells hand them over: ``chapter.name`` -> the stub."""
    found = {}
    for cell in cells_of(notebook):
        if cell.cell_type == "code" and "page.check(" in cell.source:
            exec(cell.source, {"page": SimpleNamespace(check=found.__setitem__)})
    return {f"{project.chapter_name(notebook)}.{name}": stub for name, stub in found.items()}


def test_each_exercise_is_asked_in_the_notebook_of_its_chapter():
    asked_for = [name for notebook in project.notebooks() for name in asked(notebook)]
    assert sorted(asked_for) == sorted(EXERCISES)


@pytest.mark.parametrize("notebook", project.notebooks())
def test_every_notebook_asks_two_or_three_with_a_stub_that_may_stay_open(notebook):
    found = asked(notebook)
    assert 2 <= len(found) <= (5 if notebook.endswith("is_it_right") else 3), "scripts with bugs are shorter to answer"
    for name, function in found.items():
        assert judge(name, function).message == QUIET.replace("my_order", EXERCISES[name].stub)
        module = sys.modules[f"pardemo.book.chapters.{name.partition('.')[0]}.exercises"]
        solution = getattr(module, function.__name__)
        assert inspect.signature(solution) == inspect.signature(function), "to be pasted in the stub's place"


def short(exercise):
    return exercise.partition(".")[2]


def names_at(notebook, exercise):
    """What a notebook has bound when its reader answers an exercise: name -> what was imported, None for the rest."""
    bound = {}
    for cell in cells_of(notebook):
        if cell.cell_type == "code" and not cell.source.startswith("%%"):
            for node in ast.walk(ast.parse(TransformerManager().transform_cell(cell.source))):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    bound |= imported(node)
                elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    bound[node.name] = None
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    bound[node.id] = None
            if f'page.check("{short(exercise)}"' in cell.source:
                return bound
    raise AssertionError(f"{notebook} does not ask {exercise}")


def imported(node):
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return {alias.asname or alias.name: module + alias.name for alias in node.names}


ASKED = [(notebook, name) for notebook in project.notebooks() for name in asked(notebook)]


@pytest.mark.parametrize(("notebook", "name"), ASKED)
def test_the_libraries_that_an_answer_takes_are_there_where_it_is_written(notebook, name):
    taken = {}
    for node in ast.walk(ast.parse(solution(name))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            taken |= imported(node)
    bound = names_at(notebook, name)
    ours = {known: what for known, what in taken.items() if what.partition(".")[0] not in sys.stdlib_module_names}
    assert {known: bound.get(known) for known in ours} == ours


@pytest.mark.parametrize(("notebook", "name"), ASKED)
def test_what_an_exercise_and_its_hint_name_is_there(notebook, name):
    *_, text = itertools.takewhile(
        lambda cell: f'page.check("{short(name)}"' not in cell.source,
        cells_of(notebook),
    )
    words = re.findall("`([^`]+)`", text.source.rpartition("## Exercises")[2] + EXERCISES[name].hint)
    parameters = inspect.signature(asked(notebook)[name]).parameters
    known = {*names_at(notebook, name), *parameters, *dir(builtins), "pardemo"}
    assert text.cell_type == "markdown"
    assert {used for word in words for used in names_that_code_needs(word)} <= known


def names_that_code_needs(word):
    """Of a piece of code in a text: whose attributes it asks for, and what it calls."""
    try:
        nodes = list(ast.walk(ast.parse(word)))
    except SyntaxError:  # a formula
        return set()
    owners = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    owners += [node.func for node in nodes if isinstance(node, ast.Call)]
    return {node.id for node in owners if isinstance(node, ast.Name)} - {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def test_names_that_code_needs():
    assert names_that_code_needs("dist.send(x.clone(), f(r))") == {"dist", "x", "f"}
    assert names_that_code_needs("[x.seconds for x in layouts(big.shape)]") == {"layouts", "big"}
    assert names_that_code_needs("2(N−1)/N") == set()


def test_a_stub_gets_one_quiet_line_and_help_below_it(capsys):
    assert check("hybrid_parallel", "order", stub) is None, "a cell shows it once"
    assert capsys.readouterr().out == f"{QUIET}\n"
    outcome = judge("hybrid_parallel.order", stub)
    assert not outcome.solved
    data = shown(outcome)
    assert data["text/plain"] == QUIET
    assert QUIET in data["text/html"]
    assert folded(data["text/html"]) == ["Hint", "Solution"]
    assert "<details open" not in data["text/html"]
    assert not re.search("not yet|False|None", data["text/html"].split("<details>")[0])


def test_plain_python_prints_one_line():
    code = "from pardemo.book.page import Page\ndef my_order(): ...\nPage('hybrid_parallel').check('order', my_order)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"{QUIET}\n"


def test_a_wrong_answer_has_help_below_its_message_and_a_right_one_a_way_to_write_it():
    wrong, right = (
        shown(judge("hybrid_parallel.order", lambda order=order: order)) for order in ("pp-dp-tp", "tp-dp-pp")
    )
    assert "let tp run fastest" in wrong["text/html"]
    assert folded(wrong["text/html"]) == ["Hint", "Solution"]
    assert "order: solved." in right["text/html"]
    assert folded(right["text/html"]) == ["One way to write it"]
    for data in (wrong, right):
        assert "<pre><code>def my_order():" in data["text/html"]
        assert "my_order" not in data["text/plain"]


def test_code_and_answers_are_text_and_no_markup():
    markup = judge("hybrid_parallel.order", lambda: "<b>tp</b>")._repr_html_()
    assert "<b>" not in markup
    assert "&lt;b&gt;" in markup
    assert says(judge("vocabulary.vocabulary_loss", ...)._repr_html_(), "local", "&gt;=", "0")


@pytest.mark.parametrize(
    "function",
    [None, ..., stub, lambda *a: ..., lambda: None, *(asked("02_megatron_mlp").values())],
)
def test_what_nobody_has_touched_is_a_stub(function):
    assert is_stub(function)


def made(source):
    exec(source, names := {})
    return names["f"]


@pytest.mark.parametrize(
    "source", ["def f(): 'words'  # more", "def f(): pass", "def f(x, *, y=1):\n 'words'\n return"]
)
def test_a_function_without_a_body_is_a_stub(source):
    assert is_stub(made(source))


@pytest.mark.parametrize("body", ["x + 1", "return x", "yield", "return 0", "raise NotImplementedError"])
def test_what_computes_something_is_an_attempt_also_without_a_result(body):
    assert not is_stub(made(f"def f(x): {body}"))


def test_what_was_made_elsewhere_is_an_attempt():
    assert not any(map(is_stub, (len, print, lambda: "tp-dp-pp", lambda: False, dict, 5)))


def test_a_stub_starts_no_rank(monkeypatch):
    def never(*_, **__):
        raise AssertionError("ranks for nothing")

    monkeypatch.setattr("pardemo.world.World._start", never)
    assert not judge("data_parallel.all_reduce", stub).attempted


def test_the_page_keeps_what_is_folded():
    outcome = judge("hybrid_parallel.order", stub)
    cell = new_code_cell("", outputs=[new_output("display_data", data=shown(outcome))])
    page = pages._exporter().from_notebook_node(new_notebook(cells=[cell]))[0]
    assert outcome._repr_html_() in page
    assert page.count(QUIET) == 1, "either the text or the HTML"


def test_unknown_exercise():
    with pytest.raises(ValueError, match=r"'x'.*hybrid_parallel"):
        check("hybrid_parallel", "x", stub)
    with pytest.raises(ValueError, match=r"'hybrid\.order'.*chapter\.name"):
        judge("hybrid.order", stub)


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
    for node in ast.walk(ast.parse(solution(name))):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
            parts.add(str(node.value.value))
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.BinOp, ast.Call, ast.Compare, ast.Subscript)):
            parts.add(ast.unparse(node).replace(" ", ""))
    return {part for part in parts if len(part) > 3}


@pytest.mark.parametrize("name", EXERCISES)
def test_a_solution_is_short_and_says_why(name):
    text = solution(name)
    lines = text.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert "pardemo.book" not in text, "nothing of the checkers"
    assert '"""' not in text
    own = ast.parse(text).body[-1]
    assert own.name == EXERCISES[name].stub
    assert "# " in text, "a word about why"


def test_only_what_is_needed_is_imported():
    assert solution("data_parallel.unequal_shards").startswith(
        "import torch\nimport torch.distributed as dist\n\n\ndef"
    )
    assert solution("hybrid_parallel.groups").startswith("def my_groups(")
    assert "class SumBackward" not in solution("megatron_mlp.split")
    assert solution("zero_memory.stage").startswith("def my_bytes("), "a helper comes with it"
